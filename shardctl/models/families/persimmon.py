"""Describes Persimmon: q, k and v interleaved head by head, norms of heads, and biases everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.families.phi import BIASED_HEAD_NORMS, FINAL_NORM
from shardctl.models.tables.decoder import (
    BIASED_NORMS,
    EMBEDDING,
    HEADS,
    LAYER,
    assume_sizes,
    build_decoder_classes,
    build_decoder_facts,
)
from shardctl.models.tables.family import Family, LogicalDim, Row
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_PERSIMMON_ROWS: Final = (
    *EMBEDDING,
    Row(f"{LAYER}.self_attn.query_key_value.weight", "qkv hidden"),
    Row(f"{LAYER}.self_attn.query_key_value.bias", "qkv"),
    Row(f"{LAYER}.self_attn.dense.weight", "hidden q"),
    Row(f"{LAYER}.self_attn.dense.bias", "hidden"),
    *BIASED_HEAD_NORMS,
    Row(f"{LAYER}.mlp.dense_h_to_4h.weight", "ffn hidden"),
    Row(f"{LAYER}.mlp.dense_h_to_4h.bias", "ffn"),
    Row(f"{LAYER}.mlp.dense_4h_to_h.weight", "hidden ffn"),
    Row(f"{LAYER}.mlp.dense_4h_to_h.bias", "hidden"),
    *BIASED_NORMS,
    *FINAL_NORM,
    *HEADS,
)


def _build_facts(config: ModelConfig) -> ModelDims:
    facts = build_decoder_facts(config, qk_norm=config.read_flag("qk_layernorm", default=True))
    q, head = facts.size("q"), facts.size("head")
    return facts.extend_dims(
        dims={"qkv": LogicalDim(3 * q, 3 * head, "tp", noun="attention heads")}, flags={"sequential": True}
    )


PERSIMMON: Final = Family(
    name="persimmon",
    rows=_PERSIMMON_ROWS,
    facts=_build_facts,
    classes=build_decoder_classes("Persimmon", question=None),
    prefixes=("model",),
    traits=LayerFeatures(
        activation=("hidden_act", "relu2"), dropout=("hidden_dropout", 0.0), rotated_product=True, joined_queries=True
    ),
    assumed=assume_sizes(262144, 4096, 16384, 36, 64),
)
