"""GLM-4, as `glm` (its first checkpoints) and as `glm4` (those of 0414): gate and up projection fused."""

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
    decoder_classes,
    decoder_facts,
)
from shardctl.models.family import Family, Row
from shardctl.models.layer_traits import LayerTraits

if TYPE_CHECKING:
    from shardctl.models.config import Config
    from shardctl.models.family import Facts

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


def _facts(config: Config) -> Facts:
    bias = config.switch("attention_bias", default=True)
    return decoder_facts(config, kv_heads=_KV_HEADS, head_dim=_HEAD_DIM, qkv_bias=bias)


GLM: Final = Family(
    name="glm",
    rows=_GLM,
    facts=_facts,
    classes=decoder_classes("Glm", question=None),
    prefixes=("model",),
    traits=LayerTraits(activation=("hidden_act", "silu"), norm="rms"),
)
GLM4: Final = Family(
    name="glm4",
    rows=_GLM4,
    facts=_facts,
    classes=decoder_classes("Glm4", question=None),
    prefixes=("model",),
    traits=LayerTraits(activation=("hidden_act", "silu"), norm="rms"),
)
