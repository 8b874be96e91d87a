"""Defines the notation in which a family's table gives names, shapes and placement."""

from __future__ import annotations

from dataclasses import field, replace
from re import compile as pattern
from typing import TYPE_CHECKING, Final

from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.layer_features import LayerFeatures
    from shardctl.tensors.placement import Where

INDEX: Final = pattern(r"\{(\w+)\}")
"""An index in the name of a row."""


@value_class
class LogicalDim:
    """A logical dim: what one dim of many tensors has in common."""

    size: int
    """Elements."""
    unit: int = 1
    """Elements that stay together, such as one head."""
    axis: str = ""
    """The mesh axis that cuts it; empty for none."""
    shared: bool = False
    """Units can be held by several neighbouring ranks (key/value heads, under `--kv-heads replicate`)."""
    noun: str = ""
    """What the units are called in messages."""
    loose: bool = False
    """The extent is the class's choice (labels), and not checked in the head of another class."""
    even: bool = True
    """Whether the parts must be equal. A vocabulary's need not: DTensor cuts it in ceil-sized parts, unpadded. With a
    `noun`, the parts are of whole units, and no rank goes without: vLLM's MXFP4 blocks."""
    tower_axis: str = ""
    """The mesh axis that cuts it where towers are cut, as vLLM does unless it is told otherwise; empty for none."""


@value_class
class RowIndex:
    """What a `{name}` in a row counts."""

    values: Sequence[int]
    """The indices, in order."""
    layer: int | None = None
    """The pipeline layer of index 0; None if the index does not count pipeline layers (experts)."""
    axis: str = ""
    """The mesh axis that divides what is counted among its ranks, each whole (experts); empty for none."""
    within: Mapping[int, Collection[int]] | None = None
    """Of an index inside another: which of the values there are, by that of the outermost; None for all everywhere."""


@value_class
class ModelDims:
    """What a family reads from a config."""

    dims: Mapping[str, LogicalDim | tuple[LogicalDim, ...]]
    """The logical dims by name; several, if the config says which are fused along one dim."""
    indices: Mapping[str, RowIndex]
    """The indices by name."""
    flags: Mapping[str, bool | Collection[int]] = field(default_factory=dict)
    """Conditions by name: true, false, or the values of the outermost index for which it is true. The `tied` of a row
    may be a mapping: of the values for which it is true, to those of the tensor that is the same (Zamba2's blocks)."""
    stages: Mapping[str, tuple[Where, int]] = field(default_factory=dict)
    """Stages by name, beside `first` and `last`."""

    def size(self, name: str) -> int:
        """Return elements of a logical dim."""
        dims = self.dims[name]
        return sum(dim.size for dim in dims) if isinstance(dims, tuple) else dims.size

    def extend_dims(
        self,
        *,
        dims: Mapping[str, LogicalDim | tuple[LogicalDim, ...]] | None = None,
        indices: Mapping[str, RowIndex] | None = None,
        flags: Mapping[str, bool | Collection[int]] | None = None,
    ) -> ModelDims:
        """These facts and more, or others under the same names."""
        return replace(
            self,
            dims={**self.dims, **(dims or {})},
            indices={**self.indices, **(indices or {})},
            flags={**self.flags, **(flags or {})},
        )


@value_class
class Row:
    """The names of some tensors, and their shape in logical dims.

    >>> Row(".layers.{layer}.self_attn.o_proj.weight", "hidden q").name
    '.layers.{layer}.self_attn.o_proj.weight'
    """

    name: str
    """The tensor's name. A leading dot stands for the base model's prefix, which the class decides; `{layer}` and
    other indices count."""
    dims: str
    """One word a dim: a logical dim; several fused along it, joined by `+`; a literal extent; or `*`, an extent that
    the config does not determine. No word for a 0-d tensor."""
    when: str = ""
    """Conditions that must all hold: flags of the facts or parts of the class, `!` before one that must not."""
    on: str = ""
    """The stage (`first`, `last`, both as `ends`, `all` or one of the facts'); empty for the stage of its layer."""
    tie: str = ""
    """The tensor that this is another name of, if `tied` holds: a name without indices, or with those of this row."""
    tied: str = "tied"
    """The flag that says so; `always` needs no flag."""
    buffer: str = ""
    """The safetensors dtype of a buffer: present in some checkpoints only, never a parameter, never cut."""
    dtype: str = ""
    """The safetensors dtype of a parameter where it is not the model's."""
    optional: bool = False
    """Present in some checkpoints only, and not in the state dict of any class (DeepSeek's layers that predict)."""
    needed: str = ""
    """The flag of the only layers whose state dict has it; checkpoints may have it in others (GLM-5.2's indexers)."""


@value_class
class FusedArray:
    """An array that transformers' state dict has in place of several tensors of the table, or of one.

    >>> FusedArray(".layers.{layer}.mlp.experts.gate_up_proj", (
    ...     ".layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
    ...     ".layers.{layer}.mlp.experts.{expert}.up_proj.weight",
    ... )).stacked
    'expert'
    """

    name: str
    """The array's name, in the notation of rows."""
    parts: tuple[str, ...]
    """Names of rows. An index that only they have counts along dim 0 of the array, where the parts are stacked; what
    several names give is joined along the first dim of the parts."""
    transposed: bool = False
    """Whether it is the one part with its last two dims swapped, perhaps of the same name: then the shape tells."""
    joined: bool = False
    """Whether parts that are counted lie behind each other along their first dim, instead of in a stack."""
    stored: bool = False
    """Whether only files have it, and transformers' state dict has the parts (NomicBERT's `Wqkv`)."""

    @property
    def stacked(self) -> str:
        """The index that counts along dim 0, or an empty string."""
        return next((word for word in INDEX.findall(self.parts[0]) if word not in INDEX.findall(self.name)), "")


@value_class
class ModelClass:
    """A transformers class: which parts of the family's table it has."""

    prefix: str = ""
    """What stands before the names of the base model."""
    parts: str = ""
    """The conditions of the table that hold for this class; a `?` after one: a checkpoint may lack the whole part."""
    labels: int | None = None
    """Outputs of the head where the class, not the config, decides."""


@value_class
class Family:
    """Architectures that share a table."""

    name: str
    """The `model_type` of its configs."""
    rows: tuple[Row, ...]
    """The table, in the order of transformers' state dict."""
    facts: Callable[[ModelConfig], ModelDims]
    """What the config says about dims, indices and conditions."""
    classes: Mapping[str, ModelClass]
    """The classes by name; the first is assumed when a config names none."""
    prefixes: tuple[str, ...]
    """Base-model prefixes that stored names may have, or lack."""
    legacy: Mapping[str, str] = field(default_factory=dict)
    """Older spellings of runs of whole name parts, and the present ones, replaced in this order. With `^` before it,
    one that only stands at the start, after a base-model prefix or without."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Older names of classes, which configs on the Hub still have."""
    fused: tuple[FusedArray, ...] = ()
    """Where the names of transformers' state dict are not those of the table, which are those of the Hub."""
    traits: LayerFeatures | None = None
    """What its layers compute that rows do not show. `reshard` needs none of it; without, `plan` knows weights only."""
    weightless: tuple[Row, ...] = ()
    """Norms without weights, and what layers compute at once with several experts: no tensors, but counted as rows
    are."""
    text: Callable[[ModelConfig], tuple[LayerFeatures | None, ModelConfig]] | None = None
    """Of a model with a text model inside: the traits and the config of that."""
    assumed: Mapping[str, object] = field(default_factory=dict)
    """What the config class assumes of those keys that `facts` cannot do without, where a config is silent."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names that keys may have in a config, and the names that `facts` reads (`attribute_map`)."""

    transposed: bool = False
    """Whether its linear weights are stored as `[in, out]`."""
    inner_kinds: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """The `model_type` of text models without a head of their own that have these layers, and what the config class of
    each assumes otherwise than this family's; a `head_dim` of None is the hidden size over the heads."""

    without_latents: str = ""
    """The family of an inner config that calls itself this one, and says by `use_mla: false` that its attention has no
    latents."""
    towers: tuple[str, ...] = ()
    """Modules that see or hear inside the base model, whole on every tp rank."""
    class_names_only: bool = False
    """Whether transformers' classes load their own state dict and none of the Hub's names, where it is no part of
    another model (MiniMax-M3)."""

    hub_modules: tuple[str, ...] = ()
    """How canonical names begin that, with their arrays, are those of the Hub and not of transformers' class."""
    outer_classes: tuple[str, ...] = ()
    """Classes of the Hub's own code around this model, whose configs have its keys among their own; of several families
    that name one, the files tell which it is."""

    def complete_config(self, config: ModelConfig) -> ModelConfig:
        """Return `config` as its class reads it: keys under one name, and what the class assumes if they are absent."""
        return config.alias_keys(self.aliases).over(self.assumed)
