"""Tells which modules of a base an adapter's config lists, as PEFT does.

Sources: PEFT 0.18 to 0.21 (tuners/tuners_utils.py, `check_target_module_exists`; utils/other.py,
`match_target_against_key`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import SourceError
from shardctl.base.value import value_class
from shardctl.libraries.files.impostors import ADAPTER_CONFIG
from shardctl.models.quantization.expressions import compile_expression

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.models.quantization.expressions import ModuleExpression

ALL_LINEAR: Final = "all-linear"
"""What stands for all linear layers but the head."""
_LAYER_NUMBER_PATTERN: Final = re.compile(r".*\.[^.]*\.(\d+)\.")
"""The number of a layer in a name, where the config does not say what stands before it."""


@value_class
class NameChoice:
    """Names and ends of names, or one regular expression for whole names."""

    names: tuple[str, ...] = ()
    expression: ModuleExpression | None = None
    unknown: str = ""
    """Why nobody can tell what it matches, if so."""

    def find_entry(self, module: str) -> str | None:
        """Find the entry that a module's name matches."""
        if self.expression is not None:
            return self.expression.compiled.pattern if self.expression.matches(module) else None
        return next((name for name in self.names if module == name or module.endswith(f".{name}")), None)


@value_class
class TargetModules:
    """The modules that an adapter's config lists."""

    targets: NameChoice
    excluded: NameChoice
    every_linear: bool
    """Whether they are all linear layers, without names."""
    layers: tuple[int, ...]
    """The layers that are meant; empty for all."""
    layer_names: tuple[str, ...]
    """What stands before the number of a layer, if the config says it."""
    saved: NameChoice
    """The modules that the adapter has whole (`modules_to_save`)."""

    def find_entry(self, module: str) -> str | None:
        """Find the entry of the config for which a module is adapted; None if it is not."""
        entry = self.targets.find_entry(module)
        if entry is None or self.excluded.find_entry(module) is not None:
            return None
        if not self.layers or self.targets.expression is not None:
            return entry
        expressions = [re.compile(rf".*\.{re.escape(name)}\.(\d+)\.") for name in self.layer_names] or [
            _LAYER_NUMBER_PATTERN
        ]
        match = next(filter(None, (each.match(f"{module}.") for each in expressions)), None)
        return entry if match is not None and int(match[1]) in self.layers else None


def parse_target_modules(values: Mapping[str, Any]) -> TargetModules:
    """Parse what `adapter_config.json` says; raises SourceError for what is neither a name nor a list of names."""
    targets = values.get("target_modules")
    every = isinstance(targets, str) and targets.lower() == ALL_LINEAR
    layers = values.get("layers_to_transform")
    numbers = [layers] if isinstance(layers, int) else layers or []
    if not isinstance(numbers, list) or not all(isinstance(number, int) for number in numbers):
        raise SourceError(f"{ADAPTER_CONFIG} has layers_to_transform = {layers!r:.100} where numbers are expected")
    return TargetModules(
        targets=NameChoice() if every else _parse_choice(values, "target_modules"),
        excluded=_parse_choice(values, "exclude_modules"),
        every_linear=every,
        layers=tuple(numbers),
        layer_names=read_names(values, "layers_pattern"),
        saved=NameChoice(read_names(values, "modules_to_save")),
    )


def _parse_choice(values: Mapping[str, Any], key: str) -> NameChoice:
    found = values.get(key)
    if isinstance(found, str) and found:
        try:
            return NameChoice(expression=compile_expression(rf"({found})\Z", ADAPTER_CONFIG, found))
        except SourceError as error:  # PEFT may take it, and matrices say which modules they belong to
            return NameChoice(unknown=error.message)
    return NameChoice(read_names(values, key))


def read_names(values: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Read one name or a list of names, sorted."""
    found = values.get(key) or []
    names = [found] if isinstance(found, str) else found
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise SourceError(f"{ADAPTER_CONFIG} has {key} = {found!r:.100} where a list of names is expected")
    return tuple(sorted(names))
