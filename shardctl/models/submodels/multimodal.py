"""Describes a model that has a text model of a known family inside, and no table of its own.

The text half is cut as its family's table says, under the prefix that the checkpoint gives it. What else is stored,
towers and projectors, is whole on every tp rank, as in the wrappers that have tables.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UnsupportedError, format_first_few
from shardctl.models.names.binding import bind_names, find_canonical_name
from shardctl.models.quantization import quantize_model
from shardctl.models.rules.untabled import place_tensor
from shardctl.models.submodels.inner_kinds import assume_inner_values, find_inner_family, list_flat_families
from shardctl.models.tables.config import ModelConfig
from shardctl.models.tables.decoder import LAYER
from shardctl.models.tables.family import INDEX, LogicalDim, ModelClass, Row
from shardctl.models.tables.layer_names import count_layers
from shardctl.models.tables.table import build_model
from shardctl.models.tables.text_config import list_outer_configs, list_text_configs
from shardctl.tensors.manifest import Manifest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from shardctl.models.tables.family import Family, ModelDims
    from shardctl.models.tables.model import Model, ModelTensor

_TIED_EMBEDDINGS_KEY: Final = "tie_word_embeddings"
_INHERITED_CONFIG_KEYS: Final = ("dtype", "torch_dtype", _TIED_EMBEDDINGS_KEY)
"""What a config around that of the text model says of it, too; the outermost prevails."""
_OUTER_CONFIG_KEYS: Final = frozenset(
    {"architectures", "auto_map", "model_type", "quantization_config", "vision_config"}
)
"""Keys that are not the text model's where its own stand beside them."""
_DEFAULT_TEXT_PREFIX: Final = "language_model."
"""Where the text model usually is."""
_MAX_PROBED_NAMES: Final = 20
"""Names of a text model by which its prefix is looked for; some may be stored under others, such as stacked experts."""

_LORA_A_PATTERN: Final = re.compile(r".*\.lora_A\.(\w+)\.weight")
_BASE_LAYER_SUFFIX: Final = ".base_layer.weight"
_LORA_RANK_KEY_SUFFIX: Final = "_lora"
"""How keys of an outer config end that say the rank of an adapter, such as `vision_lora`."""


def build_multimodal_model(config: Mapping[str, object], stored: Manifest, *, share_kv: bool) -> Model | None:
    """Build the model whose text half a table knows; None if the config names none, or the files have it nowhere.

    Raises UnsupportedError if what is stored as the text half is not what its table has.
    """
    problem: UnsupportedError | None = None
    for family, inner in list_text_models(config):
        half = TextBackbone(family, inner, config, stored, share_kv=share_kv)
        try:
            model = half.model()
        except (SourceError, UnsupportedError) as error:
            problem = problem or UnsupportedError(f"{half.title} has {family.name} inside: {error.message}")
            continue
        if model is not None:
            return model
    if problem is not None:
        raise problem
    return None


def describe_text_half(config: Mapping[str, object], *, share_kv: bool) -> Model | None:
    """Describe the text model that a config has inside, where there is no checkpoint; None if no table knows any."""
    nothing = Manifest("", {}, {})
    found = list(list_text_models(config))
    if not found or len(list_flat_families(config)) > 1:
        return None
    family, inner = found[0]
    return TextBackbone(family, inner, config, nothing, share_kv=share_kv).alone()


def has_text_half(config: Mapping[str, object]) -> bool:
    """Return whether a config has the config of a text model inside that a table knows."""
    return any(True for _ in list_text_models(config))


def list_text_models(config: Mapping[str, object]) -> Iterator[tuple[Family, Mapping[str, object]]]:
    """List the families of text models that a config has inside, with their configs; the likeliest first."""
    for inner in list_text_configs(config):
        family = find_inner_family(inner)
        if family is not None and "lm" in next(iter(family.classes.values())).parts.split():
            yield family, inner
    for family in list_flat_families(config):
        yield family, {key: value for key, value in config.items() if key not in _OUTER_CONFIG_KEYS}


class TextBackbone:
    """A text model inside another, and the checkpoint of that."""

    def __init__(
        self,
        family: Family,
        inner: Mapping[str, object],
        config: Mapping[str, object],
        stored: Manifest,
        *,
        share_kv: bool,
    ) -> None:
        self.config, self.stored, self.share_kv = config, stored, share_kv
        self.adapters = _list_inner_adapters(config, stored)
        self.family = _add_inner_adapters(family, self.adapters, stored)
        around = reversed(list_outer_configs(config, inner))
        outer = {key: each[key] for each in around for key in _INHERITED_CONFIG_KEYS if each.get(key) is not None}
        self.architecture, self.member = next(iter(family.classes.items()))
        self.values = {**outer, **assume_inner_values(inner), "architectures": [self.architecture]}
        if _TIED_EMBEDDINGS_KEY in outer:
            self.values[_TIED_EMBEDDINGS_KEY] = outer[_TIED_EMBEDDINGS_KEY]
        named = ModelConfig(config)
        self.title = named.architecture() or named.text("model_type", "")

    def model(self) -> Model | None:
        """Build the text half and all else; None if nothing is stored under names of the text half."""
        plain = self.build("", "")
        inside = [t.name for t in plain.own() if t.row.name.startswith(".")]
        base = self.find_base(plain)
        if base is None:
            return None
        own = {t.name for t in plain.own()} | plain.aliases.keys()
        head = self.find_head(base, [row.name for row in self.family.rows if row.name in own])
        if _TIED_EMBEDDINGS_KEY not in self.values:
            self.values[_TIED_EMBEDDINGS_KEY] = head is None
        text = self.build(base, head or "")
        if head is None:  # the names that a tied head would have are anyone's guess
            text = replace(text, tensors={n: replace(t, ties=()) for n, t in text.tensors.items()}, aliases={})
        text = quantize_model(text, self.config, self.stored)
        known = {name for name in self.stored.tensors if find_canonical_name(text, name) is not None}
        rest = {name: None for name in self.stored.tensors if name not in known}
        self.check(text, base, known, rest, {name.split(".")[0] for name in inside})
        line = f"{self.title} has {self.family.name} inside, {base}**, which is cut by its table"
        if rest:
            line += f"; whole on every tp rank: {format_first_few(_list_modules(rest, base))}"
        towers = self.place(text, rest)
        if text.plain is not None:
            text = replace(text, plain=replace(text.plain, tensors={**towers, **text.plain.tensors}))
        return self.complete(replace(text, tensors={**towers, **text.tensors}), line)

    def alone(self) -> Model:
        """Build the text half of a model of which nothing is stored, under the usual names."""
        text = quantize_model(
            self.build(f"{_DEFAULT_TEXT_PREFIX}{self.member.prefix}.", _DEFAULT_TEXT_PREFIX), self.config
        )
        return self.complete(text, f"only the {self.family.name} inside {self.title} is counted, without its towers")

    def complete(self, text: Model, line: str) -> Model:
        """Complete the description of the model around the text half, and say `line` of it."""
        outer = ModelConfig(self.config).architecture()
        return replace(text, family="", architecture=outer, warnings=(*text.warnings, line), text=self.values)

    def build(self, base: str, head: str) -> Model:
        """Build the text model with prefixes, dots included, before the names of its base model and of its head."""
        family = self.family
        member = ModelClass(base.removesuffix("."), self.member.parts, self.member.labels)
        inner = replace(
            family,
            rows=tuple(
                row if row.name.startswith(".") else replace(row, name=f"{head}{row.name}") for row in family.rows
            ),
            classes={**family.classes, self.architecture: member},
            prefixes=(),
        )
        return build_model(inner, self.architecture, ModelConfig(self.values), share_kv=self.share_kv)

    def find_base(self, plain: Model) -> str | None:
        """Find what stands before the names inside the base model, dot included; `plain` has none before them.

        In several places, it is where the most tensors have its shapes, a stack of experts for as many as it holds, and
        then where the fewest have other names: what speaks in Qwen-Omni is much like what thinks.
        """
        inside = {tensor.name: tensor.shape for tensor in plain.own() if tensor.row.name.startswith(".")}
        arrays = {name: fusion.shape for name, fusion in plain.fusions.items()}
        found: dict[str, None] = {}
        for probe in islice((name for name in inside if any(map(str.isdecimal, name.split(".")))), _MAX_PROBED_NAMES):
            found |= {name[: -len(probe)]: None for name in self.stored.tensors if f".{name}".endswith(f".{probe}")}
        return max(found, key=lambda base: self.rate_base(base, plain, inside | arrays), default=None)

    def rate_base(self, base: str, plain: Model, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        """Count what has the `shapes` of the text model after `base`, and, negated, what has other names there."""
        there = [name.removeprefix(base) for name in self.stored.tensors if name.startswith(base)]
        alike = [name for name in there if shapes.get(name) == self.stored.tensors[f"{base}{name}"].shape]
        roots = {name.split(".")[0] for name in shapes}
        strange = sum(name not in shapes and name.split(".")[0] in roots for name in there)
        return sum(len(plain.fusions[name].tensors) if name in plain.fusions else 1 for name in alike), -strange

    def find_head(self, base: str, heads: list[str]) -> str | None:
        """Find what stands before the names of the head: a module around the base model; None for no head."""
        words = base.split(".")[:-1]
        for count in range(len(words), -1, -1):
            prefix = "".join(f"{word}." for word in words[:count])
            if any(f"{prefix}{name}" in self.stored.tensors for name in heads):
                return prefix
        return None

    def check(self, text: Model, base: str, known: set[str], rest: Iterable[str], roots: set[str]) -> None:
        """Raise UnsupportedError for names of the text half that its table lacks, SourceError for what is missing."""
        alone = not {*base.split(".")} <= {"", "model", "transformer", self.member.prefix}
        mine = (base,) if alone else tuple(f"{base}{root}." for root in roots)
        unknown = [name for name in rest if name.startswith(mine)]
        if unknown:
            raise UnsupportedError(f"its table has no {format_first_few(unknown)}")
        bind_names(text, replace(self.stored, tensors={n: t for n, t in self.stored.tensors.items() if n in known}))

    def place(self, text: Model, rest: Iterable[str]) -> dict[str, ModelTensor]:
        """Place what is none of the text half: on the first stage, or what follows it by its name, on the last."""
        places = count_layers({name: tensor.shape for name, tensor in self.stored.tensors.items()})
        first = min((places.inside[name] for name in text.tensors if name in places.inside), default=0)
        found = {}
        for name in rest:
            kind, layer = places.find_stage(name)
            after = kind == "last" or (kind == "layer" and layer >= first)
            found[name] = place_tensor(self.stored.tensors[name], (("last" if after else "first", 0),))
        return found


def _list_modules(names: Iterable[str], base: str) -> list[str]:
    """List the modules that have the names and are not around `base`, each once.

    >>> _list_modules(["model.visual.blocks.0.up", "model.visual.norm", "newline"], "model.language_model.")
    ['model.visual.**', 'newline']
    """
    found: dict[str, None] = {}
    for name in names:
        words = name.split(".")
        count = next(n for n in range(1, len(words) + 1) if not base.startswith(".".join([*words[:n], ""])))
        found[".".join([*words[:count], "**"] if count < len(words) else words)] = None
    return list(found)


def _list_inner_adapters(config: Mapping[str, object], stored: Manifest) -> dict[str, int]:
    """List the ranks of the adapters in a checkpoint, by name; of a config alone, those that it speaks of.

    >>> from shardctl.tensors.manifest import Manifest
    >>> _list_inner_adapters({"vision_lora": {"r": 256}}, Manifest("", {}, {}))
    {'vision': 256}
    """
    if stored.tensors:
        found = (
            (_LORA_A_PATTERN.fullmatch(name), tensor.shape)
            for name, tensor in stored.tensors.items()
            if "lora_A" in name
        )
        return {match[1]: shape[0] for match, shape in found if match and shape}
    said = (
        (key.removesuffix(_LORA_RANK_KEY_SUFFIX), value)
        for key, value in config.items()
        if key.endswith(_LORA_RANK_KEY_SUFFIX)
    )
    return {name: value["r"] for name, value in said if isinstance(value, dict) and isinstance(value.get("r"), int)}


def _add_inner_adapters(family: Family, adapters: Mapping[str, int], stored: Manifest) -> Family:
    """Return `family` with `adapters` beside those linears that have them; of a config alone, beside all of layers."""
    if not adapters:
        return family
    wrapped = [name for name in stored.tensors if name.endswith(_BASE_LAYER_SUFFIX)]

    def build_facts(config: ModelConfig) -> ModelDims:
        dims = {f"rank_{name}": LogicalDim(rank) for name, rank in adapters.items()}
        return family.facts(config).extend_dims(dims=dims)

    rows = tuple(new for row in family.rows for new in _adapt_row(row, adapters, wrapped, alone=not stored.tensors))
    return replace(family, rows=rows, facts=build_facts)


def _adapt_row(row: Row, adapters: Mapping[str, int], wrapped: Sequence[str], *, alone: bool) -> Iterator[Row]:
    module, dims = row.name.removesuffix(".weight"), row.dims.split()
    pattern = re.compile(
        INDEX.sub(r"\\d+", re.escape(module).replace(r"\{", "{").replace(r"\}", "}")) + re.escape(_BASE_LAYER_SUFFIX)
    )
    linear = len(dims) == 2 and module != row.name  # noqa: PLR2004 - what it writes, and what it reads
    if not linear or not (row.name.startswith(LAYER) if alone else any(map(pattern.search, wrapped))):
        yield row
        return
    yield replace(row, name=f"{module}{_BASE_LAYER_SUFFIX}")
    for name in adapters:
        yield replace(row, name=f"{module}.lora_A.{name}.weight", dims=f"rank_{name} {dims[1]}")
        yield replace(row, name=f"{module}.lora_B.{name}.weight", dims=f"{dims[0]} rank_{name}")
