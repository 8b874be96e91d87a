"""Describes OLMo 1, without norm weights, and 2 and 3, with norms after attention and MLP, and of all of q and k."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import (
    EMBEDDING,
    GATED,
    HEADS,
    LAST_NORM,
    LAYER,
    QKVO,
    assume_sizes,
    build_decoder_classes,
    build_decoder_facts,
)
from shardctl.models.tables.family import Family, LogicalDim, Row
from shardctl.models.tables.layer_features import LayerFeatures
from shardctl.models.tables.windows import WindowRule

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_OLMO_ROWS: Final = (*EMBEDDING, *QKVO, *GATED, *HEADS)
ALL_HEAD_NORMS: Final = (
    Row(f"{LAYER}.self_attn.q_norm.weight", "all_q"),
    Row(f"{LAYER}.self_attn.k_norm.weight", "all_kv"),
)
"""The norms of q and k are over all heads together. transformers and vLLM gather q and k for them, and so every tp
rank needs the whole weight."""
_OLMO2_ROWS: Final = (
    *EMBEDDING,
    *QKVO,
    *ALL_HEAD_NORMS,
    *GATED,
    Row(f"{LAYER}.post_attention_layernorm.weight", "hidden"),
    Row(f"{LAYER}.post_feedforward_layernorm.weight", "hidden"),
    *LAST_NORM,
    *HEADS,
)


def _build_facts(config: ModelConfig) -> ModelDims:
    bias = config.read_flag("attention_bias", default=False)
    facts = build_decoder_facts(config, qkv_bias=bias, o_bias=bias)
    q, kv = facts.size("q"), facts.size("kv")
    return facts.extend_dims(dims={"all_q": LogicalDim(q), "all_kv": LogicalDim(kv)})


OLMO: Final = Family(
    name="olmo",
    rows=_OLMO_ROWS,
    facts=_build_facts,
    classes=build_decoder_classes("Olmo", question=None, tokens=None),
    prefixes=("model",),
    traits=LayerFeatures(activation=("hidden_act", "silu"), norm="bare32"),
    weightless=(
        Row(f"{LAYER}.input_layernorm.weight", "hidden"),
        Row(f"{LAYER}.post_attention_layernorm.weight", "hidden"),
    ),
    assumed=assume_sizes(50304, 4096, 11008, 32, 32),
)
OLMO2: Final = Family(
    name="olmo2",
    rows=_OLMO2_ROWS,
    facts=_build_facts,
    classes=build_decoder_classes("Olmo2", question=None, tokens=None),
    prefixes=("model",),
    traits=LayerFeatures(activation=("hidden_act", "silu"), norm="rms32"),
    assumed=assume_sizes(50304, 4096, 11008, 32, 32),
)
OLMO3: Final = Family(
    name="olmo3",
    rows=_OLMO2_ROWS,
    facts=_build_facts,
    classes=build_decoder_classes("Olmo3", question=None, tokens=None),
    prefixes=("model",),
    traits=LayerFeatures(
        activation=("hidden_act", "silu"), norm="rms32", window=WindowRule(4096, "all but every nth", period=4)
    ),
    assumed=assume_sizes(50304, 4096, 11008, 32, 32),
)
