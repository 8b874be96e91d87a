"""Describes Qwen3.5: Qwen3-Next's layers, dense or with experts, by themselves or behind a model that sees.

Names and shapes follow the Hub (`models/qwen3_5/modeling_qwen3_5.py` and its namesake with experts). The projections of
linear attention are apart, where Qwen3-Next has two: each of q, k and v is one section of `in_proj_qkv` and `conv1d`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.models.families.qwen3_next import GATED_ATTENTION, MTP_LAYER, add_delta_facts, build_mtp_rows
from shardctl.models.families.qwen_moe import SHARED, add_qwen_experts
from shardctl.models.families.vision_towers import QWEN3_EYES, build_qwen3_vision_facts
from shardctl.models.submodels.towers import ModelTower, build_tower_classes, build_tower_family
from shardctl.models.tables.decoder import (
    EMBEDDING,
    GATED,
    HEADS,
    LAST_NORM,
    LAYER,
    NORMS,
    assume_sizes,
    build_decoder_facts,
)
from shardctl.models.tables.experts import ROUTER, add_condition, build_expert_rows, build_fused_experts
from shardctl.models.tables.family import Family, ModelClass, Row
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_LINEAR_ATTENTION_ROWS: Final = (
    Row(f"{LAYER}.linear_attn.dt_bias", "value_heads"),
    Row(f"{LAYER}.linear_attn.A_log", "value_heads"),
    Row(f"{LAYER}.linear_attn.conv1d.weight", "keys+keys+values 1 window"),
    Row(f"{LAYER}.linear_attn.norm.weight", "value_head"),
    Row(f"{LAYER}.linear_attn.out_proj.weight", "hidden values"),
    Row(f"{LAYER}.linear_attn.in_proj_qkv.weight", "keys+keys+values hidden"),
    Row(f"{LAYER}.linear_attn.in_proj_z.weight", "values hidden"),
    Row(f"{LAYER}.linear_attn.in_proj_b.weight", "value_heads hidden"),
    Row(f"{LAYER}.linear_attn.in_proj_a.weight", "value_heads hidden"),
)
_MLP_ROWS: Final = tuple(row for row in GATED if not row.when)
_MOE_ROWS: Final = (ROUTER, *build_expert_rows(), *SHARED)
_LAYER_FEATURES: Final = LayerFeatures(activation=("hidden_act", "silu"), norm="rms32", joined_queries=True)


def _build_rows(mlp: tuple[Row, ...], conditions: str) -> tuple[Row, ...]:
    return (
        *EMBEDDING,
        *add_condition(_LINEAR_ATTENTION_ROWS, "!attention"),
        *add_condition(GATED_ATTENTION, "attention"),
        *mlp,
        *NORMS,
        *LAST_NORM,
        *HEADS,
        *build_mtp_rows((*GATED_ATTENTION, *mlp, *NORMS), conditions),
    )


def _build_facts(config: ModelConfig, kv_heads: int = 4) -> ModelDims:
    bias = config.read_flag("attention_bias", default=False)
    facts = build_decoder_facts(config, head_dim=256, kv_heads=kv_heads, qkv_bias=bias, o_bias=bias)
    return add_delta_facts(facts, config)


def _build_moe_facts(config: ModelConfig) -> ModelDims:
    shared, ffn = config.size("shared_expert_intermediate_size", 512), config.size("moe_intermediate_size")
    facts = _build_facts(config.over({"intermediate_size": ffn}), kv_heads=2)
    return add_qwen_experts(facts, config, shared=shared).extend_dims(flags={"moe": True})


QWEN3_5_TEXT: Final = Family(
    name="qwen3_5_text",
    rows=_build_rows(_MLP_ROWS, ""),
    facts=_build_facts,
    classes={
        "Qwen3_5ForCausalLM": ModelClass("model", "lm"),
        "Qwen3_5TextModel": ModelClass(),
        "Qwen3_5TextForSequenceClassification": ModelClass("model", "score"),
    },
    prefixes=("model", "model.language_model"),
    traits=_LAYER_FEATURES,
    assumed={**assume_sizes(248320, 4096, 12288, 32, 16), "num_key_value_heads": 4},
)
QWEN3_5_MOE_TEXT: Final = Family(
    name="qwen3_5_moe_text",
    rows=_build_rows(_MOE_ROWS, "moe shared"),
    facts=_build_moe_facts,
    classes={"Qwen3_5MoeForCausalLM": ModelClass("model", "lm"), "Qwen3_5MoeTextModel": ModelClass()},
    prefixes=("model", "model.language_model"),
    fused=(*build_fused_experts(), *build_fused_experts(layer=MTP_LAYER)),
    traits=replace(_LAYER_FEATURES, experts_per_token=8, narrow_experts=True),
    aliases={"num_local_experts": "num_experts"},
    assumed={
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "num_experts": 256,
    },
)
_VISION_TOWERS: Final = (ModelTower("vision_config", "visual", QWEN3_EYES, build_qwen3_vision_facts),)
QWEN3_5: Final = build_tower_family(
    "qwen3_5",
    build_tower_classes(
        "Qwen3_5",
        Qwen3_5ForSequenceClassification=ModelClass("model", "score"),
        Qwen3_5ForTokenClassification=ModelClass("model", "score score_bias"),
    ),
    QWEN3_5_TEXT,
    _VISION_TOWERS,
)
QWEN3_5_MOE: Final = build_tower_family(
    "qwen3_5_moe", build_tower_classes("Qwen3_5Moe"), QWEN3_5_MOE_TEXT, _VISION_TOWERS
)
