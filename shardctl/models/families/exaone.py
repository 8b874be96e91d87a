"""Describes EXAONE 4 and K-EXAONE.

EXAONE 4 has norms of queries and keys, and norms behind attention and MLP instead of before. K-EXAONE has them before,
and experts; of its names the table has those of the Hub (`exaone_moe` in transformers' `conversion_mapping.py`). The
layers that predict, `mtp`, are on the Hub only (vLLM's `exaone_moe_mtp.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.families.qwen3_next import build_mtp_rows
from shardctl.models.tables.decoder import (
    EMBEDDING,
    GATED,
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
    ROUTER,
    add_expert_facts,
    build_expert_rows,
    build_fused_experts,
    build_shared_expert_rows,
    count_experts,
    list_sparse_layers,
)
from shardctl.models.tables.family import Family, FusedArray, ModelClass, Row, RowIndex
from shardctl.models.tables.layer_features import LayerFeatures
from shardctl.models.tables.windows import WindowRule

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims


def _build_facts(config: ModelConfig) -> ModelDims:
    return build_decoder_facts(config, kv_heads=32, qk_norm=True)


EXAONE4: Final = Family(
    name="exaone4",
    rows=(
        *EMBEDDING,
        *QKVO,
        *HEAD_NORMS,
        *GATED,
        Row(f"{LAYER}.post_attention_layernorm.weight", "hidden"),
        Row(f"{LAYER}.post_feedforward_layernorm.weight", "hidden"),
        *LAST_NORM,
        *HEADS,
    ),
    facts=_build_facts,
    classes=build_decoder_classes("Exaone4", question="transformer"),
    prefixes=("model", "transformer"),
    traits=LayerFeatures(
        activation=("hidden_act", "silu"),
        norm="rms",
        window=WindowRule(4096, "all but every nth", period=4, period_key="sliding_window_pattern"),
    ),
    assumed={**assume_sizes(102400, 4096, 16384, 32, 32), "num_key_value_heads": 32},
)

_CORRECTION_BIAS_NAME: Final = f"{LAYER}.mlp.e_score_correction_bias"
_MOE_LAYER: Final = (
    *(row for row in QKVO if not row.when),
    *HEAD_NORMS,
    *DENSE,
    *build_expert_rows(),
    ROUTER,
    Row(_CORRECTION_BIAS_NAME, "experts", when="moe", dtype="F32"),
    *build_shared_expert_rows("mlp.shared_experts"),
    *NORMS,
)


def _build_moe_facts(config: ModelConfig) -> ModelDims:
    ffn = config.size("moe_intermediate_size")
    return add_expert_facts(
        build_decoder_facts(config, qk_norm=True),
        count_experts(config, "num_experts"),
        ffn,
        moe=list_sparse_layers(config, 1),
        shared=ffn * config.size("num_shared_experts", 1),
    ).extend_dims(indices={"next": RowIndex(range(config.count("num_nextn_predict_layers", 0)))})


EXAONE_MOE: Final = Family(
    name="exaone_moe",
    rows=(
        *EMBEDDING,
        *_MOE_LAYER,
        *LAST_NORM,
        *HEADS,
        *build_mtp_rows(tuple(row for row in _MOE_LAYER if "moe" not in row.when.split()), "!moe"),
    ),
    facts=_build_moe_facts,
    classes={"ExaoneMoeForCausalLM": ModelClass("model", "lm"), "ExaoneMoeModel": ModelClass()},
    prefixes=("model",),
    fused=(*build_fused_experts(), FusedArray(f"{LAYER}.mlp.gate.e_score_correction_bias", (_CORRECTION_BIAS_NAME,))),
    traits=LayerFeatures(
        activation=("hidden_act", "silu"),
        norm="rms",
        window=WindowRule(4096, "all but every nth", period=4, period_key="sliding_window_pattern"),
        experts_per_token=8,
        wide_router=True,
    ),
    aliases={"num_local_experts": "num_experts"},
    assumed={
        **assume_sizes(102400, 4096, 16384, 32, 32),
        "num_key_value_heads": 32,
        "moe_intermediate_size": 1024,
        "num_experts": 64,
    },
)
