"""Describes ERNIE 4.5's mixtures: routed and shared experts in most layers, with biases everywhere or nowhere.

Names and shapes follow the Hub (`models/ernie4_5_moe/modeling_ernie4_5_moe.py`, and its namesake in
`conversion_mapping.py`). Layers that predict further tokens, which transformers leaves out, are as in vLLM's
`ernie_mtp.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.families.deepseek import BIASED_SHARED
from shardctl.models.tables.decoder import (
    EMBEDDING,
    GATED,
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
    add_condition,
    add_expert_facts,
    build_expert_rows,
    build_fused_experts,
    build_predicting_rows,
    count_experts,
)
from shardctl.models.tables.family import Family, FusedArray, Row, RowIndex
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_CORRECTION_BIAS_NAME: Final = "moe_statics.e_score_correction_bias"
_ERNIE_MOE_ROWS: Final = (
    *EMBEDDING,
    *QKVO,
    *add_condition(GATED, "!moe"),
    Row(f"{LAYER}.mlp.gate.weight", "experts hidden", when="moe", dtype="F32"),
    Row(f"{LAYER}.mlp.{_CORRECTION_BIAS_NAME}", "1 experts", when="moe", dtype="F32"),
    *build_expert_rows(),
    *BIASED_SHARED,
    *NORMS,
    *LAST_NORM,
    *HEADS,
    Row("lm_head.bias", "vocab", when="lm mlp_bias", on="last"),
    *build_predicting_rows((*QKVO, *GATED, *NORMS), ".mtp_block.{next}", ""),
    Row(".mtp_emb_norm.{next}.weight", "hidden", on="last", optional=True),
    Row(".mtp_hidden_norm.{next}.weight", "hidden", on="last", optional=True),
    Row(".mtp_linear_proj.{next}.weight", "hidden hidden+hidden", on="last", optional=True),
    Row(".mtp_linear_proj.{next}.bias", "hidden", when="mlp_bias", on="last", optional=True),
)


def _build_facts(config: ModelConfig) -> ModelDims:
    bias, layers = config.read_flag("use_bias", default=False), config.size("num_hidden_layers")
    ffn, shared = config.size("moe_intermediate_size"), config.count("moe_num_shared_experts", 2)
    first, interval = config.count("moe_layer_start_index", 1), config.size("moe_layer_interval", 1)
    silent = config.values.get("moe_layer_end_index", -1) in (-1, None)
    last = layers - 1 if silent else config.count("moe_layer_end_index", 0)
    facts = build_decoder_facts(config, tied=True, kv_heads=4, qkv_bias=bias, o_bias=bias, mlp_bias=bias)
    return add_expert_facts(
        facts,
        count_experts(config, "moe_num_experts"),
        ffn,
        moe=frozenset(n for n in range(first, min(last + 1, layers)) if (n + 1) % interval == 0),
        shared=ffn * shared or None,
    ).extend_dims(indices={"next": RowIndex(range(config.count("num_nextn_predict_layers", 0)))})


ERNIE4_5_MOE: Final = Family(
    name="ernie4_5_moe",
    rows=_ERNIE_MOE_ROWS,
    facts=_build_facts,
    classes=build_decoder_classes("Ernie4_5_Moe", question=None, sentences=False, tokens=None),
    prefixes=("model",),
    fused=(
        FusedArray(f"{LAYER}.mlp.gate.{_CORRECTION_BIAS_NAME}", (f"{LAYER}.mlp.{_CORRECTION_BIAS_NAME}",)),
        *build_fused_experts(),
    ),
    traits=LayerFeatures(
        activation=("hidden_act", "silu"),
        norm="rms",
        attention_dropout=("", 0.0),
        experts_per_token=6,
        narrow_experts=True,
        wide_router=True,
    ),
    aliases={"num_experts": "moe_num_experts", "moe_k": "num_experts_per_tok"},
    assumed={**assume_sizes(103424, 2560, 12288, 28, 20), "moe_intermediate_size": 1536, "moe_num_experts": 64},
)
