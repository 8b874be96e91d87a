"""Finds which modules the lists of a `quantization_config` mean, by parts of names or regular expressions."""

from __future__ import annotations

import fnmatch
import re
from functools import cache
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.models.quantization.expressions import compile_expression

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

    from shardctl.models.quantization.storage import Names
    from shardctl.models.tables.config import ModelConfig

_LITERAL_NAME_PATTERN: Final = re.compile(r"[\w.\-]+")
_CONFIG_FILE: Final = "config.json"
_WILDCARD_CHARACTERS: Final = frozenset("*?[")
_REGEX_PREFIX: Final = "re:"
"""What stands before a regular expression in the lists of compressed-tensors."""


def find_module_list(config: ModelConfig, *keys: str) -> tuple[str, ...] | None:
    """Find the list of strings under the first of `keys` that the config has; None if it has none of them.

    Raises SourceError if it is anything else.
    """
    for key in keys:
        value = config.values.get(key)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise SourceError(f"config.json has {key} = {value!r} where a list of names is expected")
        return tuple(value)
    return None


def build_list_extension(
    *keys: str,
) -> Callable[[Mapping[str, Any], Sequence[str], Sequence[str]], Mapping[str, Any]]:
    """Build what adds modules to the list under the first of `keys` that the settings have, else under the first key.

    A new list also names the modules that were left without one, because loaders leave nothing else then.

    >>> extend = build_list_extension("ignore", "exclude")
    >>> extend({"exclude": ["lm_head"]}, ["a.b"], ["c"]), extend({}, ["a.b"], ["c"])
    ({'exclude': ['lm_head', 'a.b']}, {'ignore': ['c', 'a.b']})
    """

    def extend(settings: Mapping[str, Any], decoded: Sequence[str], plain: Sequence[str]) -> Mapping[str, Any]:
        key = next((key for key in keys if settings.get(key) is not None), keys[0])
        listed = settings.get(key)
        return {**settings, key: list(dict.fromkeys([*(plain if listed is None else listed), *decoded]))}

    return extend


def match_name_parts(entries: Sequence[str]) -> Callable[[Names], bool]:
    """Return whether a name of a module has one of `entries` as a run of whole parts.

    An entry that is no plain name is a regular expression for the beginning of the name, up to the end of a part, as in
    transformers (`quantizers/quantizers_utils.py`, `should_convert_module`), which demands a whole part of plain names
    only at their end.

    >>> skipped = match_name_parts(["lm_head", "mlp.gate", "model.layers.1[0-9]"])
    >>> [skipped((n,)) for n in ("lm_head", "model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj")]
    [True, True, False]
    >>> [skipped((n,)) for n in ("model.layers.12.mlp.up_proj", "model.layers.1.mlp.up_proj")]
    [True, False]
    """
    plain = [
        f".{entry.removeprefix('.').removesuffix('.')}." for entry in entries if _LITERAL_NAME_PATTERN.fullmatch(entry)
    ]
    others = [
        compile_expression(rf"(?:{entry})(?=\.|$)", _CONFIG_FILE, entry)
        for entry in entries
        if not _LITERAL_NAME_PATTERN.fullmatch(entry)
    ]

    def is_listed(names: Names) -> bool:
        for name in names if entries else ():  # asked of each weight, so spelled out: generators take longer
            dotted = f".{name}."
            for run in plain:
                if run in dotted:
                    return True
            for expression in others:
                if expression.matches(name):
                    return True
        return False

    return is_listed


def match_exact_names(entries: Sequence[str]) -> Callable[[Names], bool]:
    """Return whether a name of a module is one of `entries`, or one that begins with `re:` matches its beginning.

    As in compressed-tensors (`utils/match.py`, `match_name`).

    >>> ignored = match_exact_names(["lm_head", "re:.*self_attn"])
    >>> [ignored((n,)) for n in ("lm_head", "model.lm_head", "model.layers.0.self_attn.q_proj")]
    [True, False, True]
    """
    plain = {entry for entry in entries if not entry.startswith(_REGEX_PREFIX)}
    others = [
        compile_expression(entry.removeprefix(_REGEX_PREFIX), _CONFIG_FILE, entry)
        for entry in entries
        if entry.startswith(_REGEX_PREFIX)
    ]
    return lambda names: any(name in plain or any(expression.matches(name) for expression in others) for name in names)


def match_wildcards(entries: Sequence[str]) -> Callable[[Names], bool]:
    """Return whether one of `entries` is a name of a module or of one around it.

    `*`, `?` and `[...]` are as in file names.

    As in ModelOpt (torch/export/quant_utils.py, `_prefix_wildcard_summarize_exclude_modules`).

    >>> left = match_wildcards(["lm_head", "model.layers.0*", "*.mlp.gate"])
    >>> [left((f"model.layers.{n}",)) for n in ("0.mlp.up_proj", "1.mlp.gate", "1.mlp.gate_proj")]
    [True, True, False]
    """
    plain = {entry for entry in entries if _WILDCARD_CHARACTERS.isdisjoint(entry)}
    begun = tuple(
        entry[:-1] for entry in entries if entry.endswith("*") and _WILDCARD_CHARACTERS.isdisjoint(entry[:-1])
    )
    ended = tuple(
        entry[1:] for entry in entries if entry.startswith("*") and _WILDCARD_CHARACTERS.isdisjoint(entry[1:])
    )
    simple = {*plain, *(f"{entry}*" for entry in begun), *(f"*{entry}" for entry in ended)}
    others = [re.compile(fnmatch.translate(entry)) for entry in entries if entry not in simple]

    @cache
    def is_listed(name: str) -> bool:
        """Whether an entry is `name`; a list of hundreds is asked about hundreds of thousands of names."""
        known = name in plain or name.startswith(begun) or name.endswith(ended)
        return known or any(expression.match(name) for expression in others)

    return lambda names: any(is_listed(each) for name in names for each in list_enclosing_modules(name))


def list_enclosing_modules(name: str) -> Iterator[str]:
    """List a module's name, and those of the modules around it, from the inside.

    >>> list(list_enclosing_modules("layers.0.mlp"))
    ['layers.0.mlp', 'layers.0', 'layers']
    """
    while name:
        yield name
        name = name.rpartition(".")[0]
