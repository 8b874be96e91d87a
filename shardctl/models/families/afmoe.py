"""Describes AFMoE (Arcee's Trinity): gated attention, four norms a layer, and experts after dense layers.

Names and shapes follow the Hub (`models/afmoe/modeling_afmoe.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import (
    EMBEDDING,
    HEAD_NORMS,
    HEADS,
    LAST_NORM,
    LAYER,
    NORMS,
    QKVO,
    assume_sizes,
    build_decoder_classes,
    build_decoder_facts,
)
from shardctl.models.tables.experts import (
    DENSE,
    add_expert_facts,
    build_expert_rows,
    build_fused_experts,
    build_shared_expert_rows,
    count_experts,
)
from shardctl.models.tables.family import Family, Row
from shardctl.models.tables.layer_features import LayerFeatures
from shardctl.models.tables.windows import WindowRule

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_AFMOE_ROWS: Final = (
    *EMBEDDING,
    *QKVO,
    *HEAD_NORMS,
    Row(f"{LAYER}.self_attn.gate_proj.weight", "gated_q hidden"),
    *NORMS,
    Row(f"{LAYER}.pre_mlp_layernorm.weight", "hidden"),
    Row(f"{LAYER}.post_mlp_layernorm.weight", "hidden"),
    *DENSE,
    Row(f"{LAYER}.mlp.expert_bias", "experts", when="moe", dtype="F32"),
    Row(f"{LAYER}.mlp.router.gate.weight", "experts hidden", when="moe"),
    *build_shared_expert_rows("mlp.shared_experts"),
    *build_expert_rows(),
    *LAST_NORM,
    *HEADS,
)


def _build_facts(config: ModelConfig) -> ModelDims:
    bias, ffn = config.read_flag("attention_bias", default=False), config.size("moe_intermediate_size")
    facts = build_decoder_facts(config, head_dim=128, qkv_bias=bias, o_bias=bias, qk_norm=True)
    return add_expert_facts(
        facts.extend_dims(dims={"gated_q": facts.dims["q"]}),
        count_experts(config, "num_experts"),
        ffn,
        moe=range(config.count("num_dense_layers", 1), config.size("num_hidden_layers")),
        shared=ffn * config.size("num_shared_experts", 2),
    )


AFMOE: Final = Family(
    name="afmoe",
    rows=_AFMOE_ROWS,
    facts=_build_facts,
    classes=build_decoder_classes("Afmoe", question=None, sentences=False, tokens=None),
    prefixes=("model",),
    fused=build_fused_experts(),
    traits=LayerFeatures(
        activation=("hidden_act", "silu"),
        norm="rms32",
        window=WindowRule(1024, "all but every nth", period=4, period_key="global_attn_every_n_layers"),
        experts_per_token=6,
    ),
    assumed={**assume_sizes(200192, 2048, 6144, 32, 16), "moe_intermediate_size": 1408, "num_experts": 64},
)
