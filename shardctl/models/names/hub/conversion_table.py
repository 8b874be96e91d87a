"""Finds how transformers renames and converts the arrays of a class when it loads and saves them.

The table is `conversions.json`, which `docs/benchmarks/freeze_conversions.py` makes of transformers'
`conversion_mapping.py`. Which of its lists apply to a class, and in which order, is decided here as in transformers
(`get_model_conversion_mapping`, and `rename_source_key` in core_model_loading.py).

>>> conversions = find_conversions("Qwen2VLForConditionalGeneration", {"model_type": "qwen2_vl"})
>>> NameRenamer(conversions.saving_renames).rename("model.language_model.embed_tokens.weight")
'model.embed_tokens.weight'
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from shardctl.base.value import value_class
from shardctl.models.names.hub.saving_operations import CHECK_DIMS, OPERATIONS, UNSTACKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

HUB_NAMES: Final = "hub"
"""What `--names` calls the names of the Hub."""
SAVED_AS: Final = "5.24"
"""The version of transformers whose `save_pretrained` is meant; the table is of its first release."""
_CONVERSION_TABLE_FILE: Final = "conversions.json"
_BACKREFERENCE_PATTERN: Final = re.compile(r"\\(\d+)")
_AUTO_ORDER: Final = ("multimodal", "causal", "seq2seq", "base")
"""Where the class of a model type is looked for, if the config names a class that transformers does not have."""
_CONVERSION_KINDS: Final = ("rename", "group", "arrays", "prefix")
SAVED_FOR_NOBODY: Final = frozenset({"Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration"})
"""Classes whose `save_pretrained` in transformers 5.24 writes names that the Hub's files and engines do not have.

It calls Kimi K2.5's layers `language_model.model.blocks`; `--names hub` writes them so if it is given.
"""


class NameMatch(NamedTuple):
    """What a transform makes of a name that it matches."""

    renamed: str
    alternative: int
    """The number of the alternative of the pattern that matched."""


@value_class
class NameTransform:
    """One transform in one direction, for the names below one module of a model."""

    kind: str
    """`rename`, `arrays` for one whose operations change arrays, or `group` for renames that depend on the first.

    `prefix` is a rename that transformers 5 applies only to a model that it has loaded with this prefix.
    """
    pattern: str
    """A regular expression with a group `gN` around each of its alternatives."""
    to: tuple[str, ...]
    """What replaces a match: the first, or in a group that of the alternative; `*` is an index of a list."""
    sources: tuple[str, ...] = ()
    """The alternatives, by which operations know the arrays."""
    operations: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    """Names and settings of the operations, in the order in which they apply."""
    offset: int = 0
    """What is added to the number that the alternative captures."""
    scope: str | None = None
    """The module, without the base model's prefix; None for all names of the model."""
    base_prefix: str = ""

    def match(self, name: str) -> NameMatch | None:
        """Match a name; returns None if it stays as it is."""
        prefix = self._find_prefix(name)
        if prefix is None:
            return None
        rest = name.removeprefix(prefix)
        found = _compile_pattern(self.pattern).search(rest)
        if found is None:
            return None
        group = next(key for key, value in found.groupdict().items() if value is not None)
        alternative, start = int(group[1:]), found.re.groupindex[group]
        replacement = self.to[alternative if self.kind == "group" else 0]
        if self.offset:
            replacement = replacement.replace(r"\1", str(int(found[start + 1]) + self.offset))
        elif "\\" in replacement:
            replacement = _BACKREFERENCE_PATTERN.sub(lambda reference: found[start + int(reference[1])], replacement)
        return NameMatch(prefix + rest.replace(found[0], replacement, 1), alternative)

    def _find_prefix(self, name: str) -> str | None:
        """Find what stands before the part of a name that the pattern is for; None if the name is not in its scope."""
        if self.scope is None:
            return ""
        scope = f"{self.scope}." if self.scope else ""
        base = f"{self.base_prefix}." if self.base_prefix else ""
        return next((prefix for prefix in (base + scope, scope) if name.startswith(prefix)), None)


class NameRenamer:
    """Applies renames in turn, and remembers which groups of them are active.

    Names must come in the order in which transformers sorts them.
    """

    def __init__(self, transforms: Iterable[NameTransform]) -> None:
        self._transforms = tuple(transforms)
        self._active: set[int] = set()

    def rename(self, name: str) -> str:
        """Return the name after all renames."""
        for position, transform in enumerate(self._transforms):
            found = transform.match(name)
            if found is None:
                continue
            if transform.kind == "group":
                if found.alternative == 0:
                    self._active.add(position)
                elif position not in self._active:
                    continue
            name = found.renamed
        return name


@value_class
class NameConversions:
    """What transformers changes for one model, each direction in the order in which it applies."""

    loading: tuple[NameTransform, ...]
    saving: tuple[NameTransform, ...]

    @property
    def loading_renames(self) -> tuple[NameTransform, ...]:
        """The renames that apply when the model is loaded."""
        return tuple(each for each in self.loading if each.kind != "arrays")

    @property
    def saving_renames(self) -> tuple[NameTransform, ...]:
        """The renames that apply when the model is saved."""
        return tuple(each for each in self.saving if each.kind != "arrays")

    @property
    def saving_arrays(self) -> tuple[NameTransform, ...]:
        """The conversions of arrays that apply when the model is saved; of each name at most one, the first."""
        return tuple(each for each in self.saving if each.kind == "arrays")

    def unstacks_experts(self, name: str) -> bool:
        """Return whether saving takes an array of this name apart into those of each expert."""
        found = next((each for each in self.saving_arrays if each.match(name)), None)
        return found is not None and any(operation in UNSTACKING for operation, _ in found.operations)

    def changes_any(self, names: Iterable[str]) -> bool:
        """Return whether the class saves an array of its state dict that has one of these names under another name."""
        for name in names:
            matches = (match for each in self.saving_arrays if (match := each.match(name)) is not None)
            converted = next(matches, NameMatch(name, 0)).renamed
            if NameRenamer(self.saving_renames).rename(converted) != name:
                return True
        return False

    def lacks_prefix(self, name: str) -> bool:
        """Return whether a stored name lacks a module that transformers 4 has; see `find_conversions`."""
        prefixes = [each for each in self.saving if each.kind == "prefix"]
        if not prefixes:  # as in most models, some of which have 100,000 names
            return False
        renamed = NameRenamer(each for each in self.loading_renames if each.kind != "prefix").rename(name)
        return any(each.match(renamed) for each in prefixes)

    def reads_as_saved(self, names: Collection[str]) -> bool:
        """Return whether these look like names that the class saves, and not like those of its state dict.

        A name of the Hub is one that loading changes and saving does not. A rename for every name tells nothing of one.
        """
        loading = ({name for name in names if each.match(name)} for each in self.loading)
        loaded = set().union(*(found for found in loading if len(found) < len(names)))
        saved = {name for name in names if any(each.match(name) for each in self.saving)}
        return len(loaded - saved) >= len(saved - loaded)


@cache
def _compile_pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


@cache
def _read_table() -> Mapping[str, Any]:
    """Read the table; raises ValueError if it is not one, which is a fault of the package."""
    table = json.loads(files("shardctl.models.names.hub").joinpath(_CONVERSION_TABLE_FILE).read_text(encoding="utf-8"))
    for name, transforms in table["conversions"].items():
        same = table["conversions"].get(transforms) if isinstance(transforms, str) else transforms
        if not isinstance(same, list) or not all(map(_is_transform, same)):
            raise ValueError(f"{_CONVERSION_TABLE_FILE}: the conversions of {name} are not understood")
    return cast("Mapping[str, Any]", table)


def _is_transform(said: Mapping[str, Any]) -> bool:
    """Return whether a transform has both directions, and only operations that are known."""
    names = {name for name, *_ in said["save"].get("operations", ())}
    return said["kind"] in _CONVERSION_KINDS and bool(said["load"]["to"] and said["save"]["to"]) and names <= OPERATIONS


class ClassInModel(NamedTuple):
    """A model, or one inside it."""

    path: str
    """The name of its module; empty for the model itself."""
    name: str
    """That of its class."""
    model_type: str
    config: Mapping[str, Any]


def knows_class(architecture: str, config: Mapping[str, Any]) -> bool:
    """Return whether transformers has a class of this name, or one for the config's model type."""
    table = _read_table()
    model_type = config.get("model_type")
    types = (table["auto"][kind] for kind in _AUTO_ORDER)
    return (
        architecture in table["classes"] or architecture in table["plain"] or any(model_type in each for each in types)
    )


def find_class_name(architecture: str, config: Mapping[str, Any]) -> str:
    """Find the class of transformers for a config whose class is the Hub's own code, and called as its model type is.

    A class with another name may compute something else, and is returned as it is.

    >>> find_class_name("SarvamMoEForCausalLM", {"model_type": "sarvam_moe"})
    'Glm4MoeForCausalLM'
    """
    stem = str(config.get("model_type") or "").replace("_", "").lower()
    if architecture and not architecture.lower().startswith(stem):
        return architecture
    return next(_list_models(architecture, config)).name


def find_conversions(architecture: str, config: Mapping[str, Any], *, as_on_hub: bool = False) -> NameConversions:
    """Find what transformers changes when it loads and saves a class with this config; nothing if it knows neither.

    `as_on_hub` is for what transformers 4 and engines load, where `save_pretrained` of a model that was not loaded
    writes something else: the vision towers of CLIP and SigLIP have one more module on the Hub (`vision_model`), and
    the experts of Qwen3-VL are transposed.
    """
    table = _read_table()
    conversions = table["conversions"]
    models = list(_list_models(architecture, config))
    base_prefix = table["classes"].get(models[0].name, {}).get("prefix", "")
    claimed: dict[str, list[str]] = {}
    loading: list[NameTransform] = []
    saving: list[NameTransform] = []
    for path, name, model_type, _ in models:
        if _is_claimed(claimed, name, path):
            continue
        by_class = name in conversions
        if not by_class and (model_type not in conversions or _is_claimed(claimed, model_type, path)):
            continue
        key = name if by_class else model_type
        scope = path.removeprefix(base_prefix).removeprefix(".") if path else None
        for each in _get_transforms(key):
            if each["kind"] == "prefix" and not as_on_hub:
                continue
            loading.append(_build_transform(each["kind"], each["load"], scope, base_prefix))
            saved = _build_transform(each["kind"], each["save"], scope, base_prefix)
            saving.append(_always_transpose(saved) if as_on_hub else saved)
        claimed.setdefault(name, []).append(path)
        if not by_class:
            claimed.setdefault(model_type, []).append(path)
    return NameConversions(tuple(loading), tuple(reversed(saving)))


def _always_transpose(transform: NameTransform) -> NameTransform:
    """Return a transform that transposes what fits the class as well."""
    operations = tuple(
        (name, {key: value for key, value in settings.items() if key != CHECK_DIMS})
        for name, settings in transform.operations
    )
    return replace(transform, operations=operations)


def _is_claimed(claimed: Mapping[str, Sequence[str]], identifier: str, path: str) -> bool:
    """Return whether a model around this one has the transforms of this identifier already."""
    return any(not outer or path.startswith(f"{outer}.") for outer in claimed.get(identifier, ()))


def _get_transforms(key: str) -> list[dict[str, Any]]:
    conversions = _read_table()["conversions"]
    found = conversions[key]
    return list(conversions[found] if isinstance(found, str) else found)


def _build_transform(kind: str, said: Mapping[str, Any], scope: str | None, base_prefix: str) -> NameTransform:
    return NameTransform(
        kind=kind,
        pattern=said["pattern"],
        to=tuple(said["to"]),
        sources=tuple(said.get("from", ())),
        operations=tuple((name, settings[0] if settings else {}) for name, *settings in said.get("operations", ())),
        offset=said.get("offset", 0),
        scope=scope,
        base_prefix=base_prefix,
    )


def list_model_ties(architecture: str, config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, str]]]:
    """List the paths of a model and of those inside it that tie weights, with patterns of names and what they are."""
    classes = _read_table()["classes"]
    for path, name, _, inner in _list_models(architecture, config):
        found = classes.get(name, {})
        if found.get("ties") and inner.get("tie_word_embeddings", found["tied"]):
            yield path, found["ties"]


def list_unsaved_names(architecture: str, config: Mapping[str, Any]) -> frozenset[str]:
    """List the names that a class has in its state dict and does not save."""
    (_, name, _, _), *_ = _list_models(architecture, config)
    return frozenset(_read_table()["classes"].get(name, {}).get("unsaved", ()))


def _list_models(architecture: str, config: Mapping[str, Any], path: str = "") -> Iterator[ClassInModel]:
    """List a model and those inside it, outer ones first."""
    table = _read_table()
    model_type = str(config.get("model_type") or "")
    if not path and architecture not in table["classes"] and architecture not in table["plain"]:
        found = (table["auto"][kind].get(model_type) for kind in _AUTO_ORDER)
        architecture = next((name for name in found if name is not None), architecture)
    yield ClassInModel(path, architecture, model_type, config)
    for part in table["classes"].get(architecture, {}).get("parts", ()):
        inner = _find_inner_config(config, part["config"]) if "config" in part else {}
        inner = {**inner, "model_type": inner.get("model_type") or part["type"]}
        name = part["class"]
        if inner["model_type"] != part["type"] and part.get("config") and "auto" in part:
            name = table["auto"][part["auto"]].get(inner["model_type"], "")
        yield from _list_models(name, inner, f"{path}.{part['path']}" if path else part["path"])


def _find_inner_config(config: Mapping[str, Any], keys: str) -> Mapping[str, Any]:
    """Find the config below these keys, joined by dots; empty if there is none."""
    for key in keys.split(".") if keys else ():
        inner = config.get(key)
        config = inner if isinstance(inner, dict) else {}
    return config
