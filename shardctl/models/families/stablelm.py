"""Describes StableLM: Llama with biased norms, and perhaps a norm for each single head of q and k."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import (
    BIASED_LAST_NORM,
    BIASED_NORMS,
    EMBEDDING,
    GATED,
    HEADS,
    LAYER,
    QKVO,
    assume_sizes,
    build_decoder_classes,
    build_decoder_facts,
)
from shardctl.models.tables.family import Family, Row, RowIndex
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_KV_HEADS: Final = 32
"""What `StableLmConfig` assumes where a config is silent."""
_STABLELM_ROWS: Final = (
    *EMBEDDING,
    *QKVO,
    Row(f"{LAYER}.self_attn.q_layernorm.norms.{{q_head}}.weight", "head", when="qk_norm"),
    Row(f"{LAYER}.self_attn.k_layernorm.norms.{{kv_head}}.weight", "head", when="qk_norm"),
    *GATED,
    *BIASED_NORMS,
    *BIASED_LAST_NORM,
    *HEADS,
)
"""A head's norm is a tensor of its own: every tp rank holds those of all heads, a few kilobytes, and uses its own."""


def _build_facts(config: ModelConfig) -> ModelDims:
    facts = build_decoder_facts(
        config,
        kv_heads=_KV_HEADS,
        qkv_bias=config.read_flag("use_qkv_bias", default=False),
        qk_norm=config.read_flag("qk_layernorm", default=False),
    )
    head = facts.size("head")
    return facts.extend_dims(
        indices={
            "q_head": RowIndex(range(facts.size("q") // head)),
            "kv_head": RowIndex(range(facts.size("kv") // head)),
        },
        flags={"sequential": not config.read_flag("use_parallel_residual", default=False)},
    )


STABLELM: Final = Family(
    name="stablelm",
    rows=_STABLELM_ROWS,
    facts=_build_facts,
    classes=build_decoder_classes("StableLm", question=None),
    prefixes=("model",),
    traits=LayerFeatures(
        activation=("hidden_act", "silu"),
        norm="layer",
        dropout=("hidden_dropout", 0.0),
        side_by_side=("use_parallel_residual", False),
        joined_queries=True,
    ),
    assumed=assume_sizes(50304, 2560, 6912, 32, 32),
)
