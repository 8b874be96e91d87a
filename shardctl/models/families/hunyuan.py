"""Describes Hunyuan 1 and 3 (Hy3): norms of heads; in Hy3 a dense layer before routed and shared experts.

Names and shapes follow transformers 5 (`models/hy_v3/modeling_hy_v3.py`); the names of the Hub, which stand in
`conversion_mapping.py`, are spellings of them. Layers that predict further tokens, which transformers leaves out, are
as in vLLM's `hy_v3_mtp.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

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
    build_decoder_facts,
)
from shardctl.models.tables.experts import (
    DENSE,
    ROUTER,
    add_expert_facts,
    build_expert_rows,
    build_fused_experts,
    build_predicting_ends,
    build_predicting_rows,
    build_shared_expert_rows,
    count_experts,
    list_sparse_layers,
)
from shardctl.models.tables.family import Family, ModelClass, Row, RowIndex
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_LAYER_ROWS: Final = (
    *QKVO,
    *HEAD_NORMS,
    *DENSE,
    Row(f"{LAYER}.mlp.e_score_correction_bias", "experts", when="moe", dtype="F32"),
    ROUTER,
    *build_expert_rows(),
    *build_shared_expert_rows("mlp.shared_experts"),
    *NORMS,
)
_MTP_LAYER_PREFIX: Final = ".layers.{next}"
_MTP_EXTRA_TENSORS: Final = {
    "enorm": "hidden",
    "hnorm": "hidden",
    "eh_proj": "hidden hidden+hidden",
    "final_layernorm": "hidden",
    "embed_tokens": "vocab hidden",
    "shared_head.head": "vocab hidden",
}
"""What a layer that predicts has besides; not all have an embedding and a head."""


def _build_facts(config: ModelConfig) -> ModelDims:
    bias, layers = config.read_flag("attention_bias", default=False), config.size("num_hidden_layers")
    facts = build_decoder_facts(config, head_dim=128, qkv_bias=bias, o_bias=bias, qk_norm=True)
    ffn = config.size("moe_intermediate_size")
    return add_expert_facts(
        facts,
        count_experts(config, "num_experts"),
        ffn,
        moe=list_sparse_layers(config, 1),
        shared=ffn * config.size("num_shared_experts", 1),
    ).extend_dims(indices={"next": RowIndex(range(layers, layers + config.count("num_nextn_predict_layers", 1)))})


HY_V3: Final = Family(
    name="hy_v3",
    rows=(
        *EMBEDDING,
        *_LAYER_ROWS,
        *LAST_NORM,
        *HEADS,
        *build_predicting_rows(_LAYER_ROWS, _MTP_LAYER_PREFIX, "moe shared"),
        *build_predicting_ends(_MTP_LAYER_PREFIX, _MTP_EXTRA_TENSORS),
    ),
    facts=_build_facts,
    classes={"HYV3ForCausalLM": ModelClass("model", "lm"), "HYV3Model": ModelClass()},
    prefixes=("model",),
    legacy={
        "mlp.router.gate": "mlp.gate",
        "mlp.expert_bias": "mlp.e_score_correction_bias",
        "mlp.shared_mlp": "mlp.shared_experts",
    },
    fused=build_fused_experts(),
    traits=LayerFeatures(activation=("hidden_act", "silu"), norm="rms", experts_per_token=8, wide_router=True),
    aliases={"num_local_experts": "num_experts"},
    assumed={
        **assume_sizes(120832, 4096, 13312, 80, 64),
        "num_key_value_heads": 8,
        "moe_intermediate_size": 1536,
        "num_experts": 192,
    },
)

_V1_ATTENTION: Final = (
    *QKVO,
    Row(f"{LAYER}.self_attn.query_layernorm.weight", "head"),
    Row(f"{LAYER}.self_attn.key_layernorm.weight", "head"),
)


def _build_v1_facts(config: ModelConfig) -> ModelDims:
    bias = config.read_flag("attention_bias", default=False)
    return build_decoder_facts(config, qkv_bias=bias, o_bias=bias)


HUNYUAN_V1_DENSE: Final = Family(
    name="hunyuan_v1_dense",
    rows=(*EMBEDDING, *_V1_ATTENTION, *(row for row in GATED if not row.when), *NORMS, *LAST_NORM, *HEADS),
    facts=_build_v1_facts,
    classes={
        "HunYuanDenseV1ForCausalLM": ModelClass("model", "lm"),
        "HunYuanDenseV1Model": ModelClass(),
        "HunYuanDenseV1ForSequenceClassification": ModelClass("model", "score"),
    },
    prefixes=("model",),
    traits=LayerFeatures(activation=("hidden_act", "silu"), norm="rms"),
    assumed=assume_sizes(290943, 4096, 11008, 32, 32),
    inner_kinds={"hunyuan_vl_text": {"tie_word_embeddings": True}},
)
_V1_MOE: Final = (
    Row(f"{LAYER}.mlp.gate.wg.weight", "experts hidden", when="moe", dtype="F32"),
    *build_expert_rows(),
    *build_shared_expert_rows("mlp.shared_mlp"),
)
"""A router in fp32, whatever the model's type; each expert, routed or shared, is as wide as a dense MLP would be."""


def _build_v1_moe_facts(config: ModelConfig) -> ModelDims:
    ffn = config.size("intermediate_size")
    return add_expert_facts(_build_v1_facts(config), config.size("num_experts"), ffn, shared=ffn)


HUNYUAN_V1_MOE: Final = Family(
    name="hunyuan_v1_moe",
    rows=(*EMBEDDING, *_V1_ATTENTION, *_V1_MOE, *NORMS, *LAST_NORM, *HEADS),
    facts=_build_v1_moe_facts,
    classes={
        "HunYuanMoEV1ForCausalLM": ModelClass("model", "lm"),
        "HunYuanMoEV1Model": ModelClass(),
        "HunYuanMoEV1ForSequenceClassification": ModelClass("model", "score"),
    },
    prefixes=("model",),
    fused=build_fused_experts(),
    traits=LayerFeatures(activation=("hidden_act", "silu"), norm="rms", experts_per_token=1, wide_router=True),
    aliases={"moe_topk": "num_experts_per_tok", "num_local_experts": "num_experts"},
    assumed={**assume_sizes(290943, 4096, 11008, 32, 32), "num_experts": 1},
)
