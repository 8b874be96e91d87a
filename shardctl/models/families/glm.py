"""Describes GLM-4, as `glm` (its first checkpoints) and as `glm4` (those of 0414): gate and up projection fused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.decoder import (
    EMBEDDING,
    FUSED_GATED,
    HEADS,
    LAST_NORM,
    LAYER,
    NORMS,
    QKVO,
    assume_sizes,
    build_decoder_classes,
    build_decoder_facts,
)
from shardctl.models.family import Family, Row
from shardctl.models.layer_traits import LayerTraits

if TYPE_CHECKING:
    from shardctl.models.config import ModelConfig
    from shardctl.models.family import FamilyFacts

_KV_HEADS: Final = 2
_HEAD_DIM: Final = 128
"""What both config classes assume where a config is silent."""
_GLM: Final = (*EMBEDDING, *QKVO, *FUSED_GATED, *NORMS, *LAST_NORM, *HEADS)
_GLM4: Final = (
    *EMBEDDING,
    *QKVO,
    *FUSED_GATED,
    *NORMS,
    Row(f"{LAYER}.post_self_attn_layernorm.weight", "hidden"),
    Row(f"{LAYER}.post_mlp_layernorm.weight", "hidden"),
    *LAST_NORM,
    *HEADS,
)


def _build_facts(config: ModelConfig) -> FamilyFacts:
    bias = config.switch("attention_bias", default=True)
    return build_decoder_facts(config, kv_heads=_KV_HEADS, head_dim=_HEAD_DIM, qkv_bias=bias)


GLM: Final = Family(
    name="glm",
    rows=_GLM,
    facts=_build_facts,
    classes=build_decoder_classes("Glm", question=None),
    prefixes=("model",),
    traits=LayerTraits(activation=("hidden_act", "silu"), norm="rms"),
    assumed=assume_sizes(151552, 4096, 13696, 40, 32),
)
GLM4: Final = Family(
    name="glm4",
    rows=_GLM4,
    facts=_build_facts,
    classes=build_decoder_classes("Glm4", question=None),
    prefixes=("model",),
    traits=LayerTraits(activation=("hidden_act", "silu"), norm="rms"),
    assumed=assume_sizes(151552, 4096, 13696, 40, 32),
)
