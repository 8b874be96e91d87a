"""Describes Solar-Open: plain attention, and in every layer experts with a shared one, as in DeepSeek-V3.

Names and shapes follow the Hub (`models/solar_open/modeling_solar_open.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import EMBEDDING, HEADS, LAST_NORM, NORMS, QKVO, build_decoder_facts
from shardctl.models.tables.experts import (
    BALANCE,
    ROUTER,
    add_expert_facts,
    build_expert_rows,
    build_fused_experts,
    build_shared_expert_rows,
    count_experts,
)
from shardctl.models.tables.family import Family, ModelClass
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims


def _build_facts(config: ModelConfig) -> ModelDims:
    ffn, bias = config.size("moe_intermediate_size"), config.read_flag("attention_bias", default=False)
    facts = build_decoder_facts(
        replace(config, values={**config.values, "intermediate_size": ffn}), head_dim=128, kv_heads=8, qkv_bias=bias
    )
    shared = ffn * config.size("n_shared_experts", 1)
    return add_expert_facts(facts, count_experts(config, "n_routed_experts"), ffn, shared=shared)


SOLAR_OPEN: Final = Family(
    name="solar_open",
    rows=(
        *EMBEDDING,
        *(row for row in QKVO if row.when != "o_bias"),
        *build_expert_rows(),
        ROUTER,
        BALANCE,
        *build_shared_expert_rows("mlp.shared_experts"),
        *NORMS,
        *LAST_NORM,
        *HEADS,
    ),
    facts=_build_facts,
    classes={"SolarOpenForCausalLM": ModelClass("model", "lm"), "SolarOpenModel": ModelClass()},
    prefixes=("model",),
    fused=build_fused_experts(),
    traits=LayerFeatures(activation=("hidden_act", "silu"), norm="rms", experts_per_token=8, wide_router=True),
    aliases={"num_local_experts": "n_routed_experts"},
    assumed={
        "vocab_size": 196608,
        "hidden_size": 4096,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "moe_intermediate_size": 1280,
        "n_routed_experts": 128,
    },
)
