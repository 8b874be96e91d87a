"""Provides the parts of tables that mixtures of experts share: routed, shared and fused experts.

On the Hub each expert has tensors of its own; in the state dict of transformers 5 those of a layer are stacked, the
gate and up projections joined (`MergeModulelist` and `Concatenate` in transformers/conversion_mapping.py). ep divides
whole experts among ranks, and etp cuts inside each, as tp does inside a dense layer; the router is whole everywhere.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.models.tables.decoder import GATED, LAYER
from shardctl.models.tables.family import FusedArray, LogicalDim, Row, RowIndex

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_EXPERT_WEIGHT_TEMPLATE: Final = "%s.experts.{expert}.%s.weight"
ROUTER: Final = Row(f"{LAYER}.mlp.gate.weight", "experts hidden", when="moe")
BALANCE: Final = Row(f"{LAYER}.mlp.gate.e_score_correction_bias", "experts", when="moe", dtype="F32")
"""In fp32 in the checkpoints and, whatever the model's type, in transformers (`_keep_in_fp32_modules_strict`)."""
_DEFAULT_PROJECTION_NAMES: Final = ("gate_proj", "up_proj", "down_proj")


def build_expert_rows(
    module: str = "mlp", names: tuple[str, str, str] = _DEFAULT_PROJECTION_NAMES, when: str = "moe"
) -> tuple[Row, ...]:
    """Build the routed experts of a layer's `module`, whose gate, up and down projections are called `names`.

    An empty `module` is the layer itself.
    """
    gate, up, down = (_EXPERT_WEIGHT_TEMPLATE % (_name_module(LAYER, module), name) for name in names)
    return (
        Row(gate, "effn hidden", when=when),
        Row(up, "effn hidden", when=when),
        Row(down, "hidden effn", when=when),
    )


def build_fused_experts(
    module: str = "mlp",
    names: tuple[str, str, str] = _DEFAULT_PROJECTION_NAMES,
    *,
    within: str | None = None,
    layer: str = LAYER,
) -> tuple[FusedArray, ...]:
    """Build the two arrays that transformers has for them, in the module that it calls `within` if not the same."""
    gate, up, down = (_EXPERT_WEIGHT_TEMPLATE % (_name_module(layer, module), name) for name in names)
    array = f"{_name_module(layer, within or module)}.experts"
    return FusedArray(f"{array}.gate_up_proj", (gate, up)), FusedArray(f"{array}.down_proj", (down,))


def _name_module(layer: str, module: str) -> str:
    return f"{layer}.{module}" if module else layer


def build_shared_expert_rows(module: str) -> tuple[Row, ...]:
    """Build the experts of a layer that see every token, as one `module`: cut by tp like any gated MLP."""
    return (
        Row(f".layers.{{layer}}.{module}.gate_proj.weight", "sffn hidden", when="moe shared"),
        Row(f".layers.{{layer}}.{module}.up_proj.weight", "sffn hidden", when="moe shared"),
        Row(f".layers.{{layer}}.{module}.down_proj.weight", "hidden sffn", when="moe shared"),
    )


def add_condition(rows: Iterable[Row], when: str) -> tuple[Row, ...]:
    """Return `rows`, under one more condition."""
    return tuple(replace(row, when=f"{row.when} {when}".strip()) for row in rows)


def build_predicting_rows(rows: Iterable[Row], layer: str, conditions: str) -> tuple[Row, ...]:
    """Build the rows of a layer that predicts further tokens, from those of other layers; the last stage has them.

    It is called `layer`, and is as the layers that meet all of `conditions`. Some checkpoints have it, and the state
    dict of transformers does not.
    """
    met = conditions.split()
    return tuple(
        replace(
            row,
            name=row.name.replace(LAYER, layer),
            when=" ".join(word for word in row.when.split() if word not in met),
            on="last",
            optional=True,
            needed="",
        )
        for row in rows
        if not any(f"!{word}" in row.when.split() for word in met) and not row.buffer
    )


def build_predicting_ends(layer: str, dims: Mapping[str, str]) -> tuple[Row, ...]:
    """Build what a layer that predicts has besides, such as what joins two streams: dims by the names of modules."""
    return tuple(Row(f"{layer}.{name}.weight", said, on="last", optional=True) for name, said in dims.items())


def add_expert_facts(
    facts: ModelDims, count: int, ffn: int, *, moe: bool | Collection[int] = True, shared: int | None = None
) -> ModelDims:
    """Return `facts`, and those of experts.

    The dims are `experts` (of a router, whole), `expert` (of a stack), `effn` inside a routed expert and
    `sffn` inside the `shared` ones; `moe` is the layers that have experts.
    """
    return facts.extend_dims(
        dims={
            "experts": LogicalDim(count),
            "expert": LogicalDim(count, axis="ep", noun="experts"),
            "effn": LogicalDim(ffn, axis="etp", noun="columns of each expert"),
            "sffn": LogicalDim(shared or 0, axis="tp"),
        },
        indices={"expert": RowIndex(range(count), axis="ep")},
        flags={"moe": moe, "shared": shared is not None},
    )


DENSE: Final = add_condition((row for row in GATED if not row.when), "!moe")
"""The MLP of a layer without experts."""


def count_experts(config: ModelConfig, *keys: str) -> int:
    """Count the number of routed experts, under the first of `keys` that the config has; transformers renamed some."""
    return config.size(next((key for key in keys if config.values.get(key) is not None), keys[0]))


def list_expert_layers(config: ModelConfig) -> frozenset[int]:
    """List the layers that have experts, by `decoder_sparse_step` and `mlp_only_layers` (Qwen2MoeDecoderLayer)."""
    step, layers = config.size("decoder_sparse_step", 1), config.size("num_hidden_layers")
    dense = config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise SourceError(f"config.json has mlp_only_layers = {dense!r} where a list of layers is expected")
    return frozenset(n for n in range(layers) if (n + 1) % step == 0 and n not in dense)


def list_later_layers(config: ModelConfig, dense: int) -> range:
    """List the layers after the first, dense ones: `dense` of them where `first_k_dense_replace` is silent."""
    return range(config.count("first_k_dense_replace", dense), config.size("num_hidden_layers"))


def list_sparse_layers(config: ModelConfig, dense: int) -> Collection[int]:
    """List the layers that `mlp_layer_types` calls sparse; where it is silent, those of `list_later_layers`.

    Raises SourceError for a list that does not say dense or sparse of every layer.
    """
    kinds, layers = config.entries("mlp_layer_types"), config.size("num_hidden_layers")
    if kinds is None:
        return list_later_layers(config, dense)
    if len(kinds) != layers or not {"dense", "sparse"}.issuperset(kinds):
        raise SourceError(f"config.json has mlp_layer_types = {kinds!r} where {layers} kinds of layers are expected")
    return frozenset(n for n, kind in enumerate(kinds) if kind == "sparse")
