"""Describes DeepSeek 1, V2 and V3, GLM-4.5 and GLM-4.7-Flash: experts after dense layers, and often latent attention.

Names and shapes follow the Hub (`models/deepseek_v3/modeling_deepseek_v3.py`, and its namesakes `deepseek_v2`,
`glm4_moe` and `glm4_moe_lite`; of DeepSeek 1, vLLM's `deepseek_v2.py`). V3 and GLM have layers after the last that
predict further tokens; the Hub has them, and transformers leaves them out.
"""

from __future__ import annotations

from dataclasses import replace
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
    BALANCE,
    DENSE,
    ROUTER,
    add_condition,
    add_expert_facts,
    build_expert_rows,
    build_fused_experts,
    build_predicting_ends,
    build_predicting_rows,
    build_shared_expert_rows,
    count_experts,
    list_later_layers,
    list_sparse_layers,
)
from shardctl.models.tables.family import Family, ModelClass, Row, RowIndex
from shardctl.models.tables.latent_attention import LATENT, build_latent_facts
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from collections.abc import Collection

    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_SHARED_EXPERT_ROWS: Final = build_shared_expert_rows("mlp.shared_experts")
_SHARED_BIASES: Final = (
    Row(f"{LAYER}.mlp.shared_experts.gate_proj.bias", "sffn", when="moe mlp_bias"),
    Row(f"{LAYER}.mlp.shared_experts.up_proj.bias", "sffn", when="moe mlp_bias"),
    Row(f"{LAYER}.mlp.shared_experts.down_proj.bias", "hidden", when="moe mlp_bias"),
)
BIASED_SHARED: Final = tuple(row for pair in zip(_SHARED_EXPERT_ROWS, _SHARED_BIASES, strict=True) for row in pair)
BALANCED_EXPERTS: Final = (*DENSE, *build_expert_rows(), ROUTER, BALANCE, *_SHARED_EXPERT_ROWS)
_BUFFERED_BALANCE: Final = replace(BALANCE, dtype="", buffer="F32")
"""Only DeepSeek-VL2's largest has it, among those of V2."""
_V3_LAYER: Final = (*LATENT, *BALANCED_EXPERTS, *NORMS)
_V1_EXPERTS: Final = (*DENSE, *build_expert_rows(), ROUTER, _BUFFERED_BALANCE, *_SHARED_EXPERT_ROWS)
_GLM_LAYER: Final = (*QKVO, *HEAD_NORMS, *BALANCED_EXPERTS, *NORMS)
_MTP_LAYER_PREFIX: Final = ".layers.{next}"
_MTP_EXTRA_TENSORS: Final = {
    "embed_tokens": "vocab hidden",
    "enorm": "hidden",
    "hnorm": "hidden",
    "eh_proj": "hidden hidden+hidden",
    "shared_head.norm": "hidden",
    "shared_head.head": "vocab hidden",
}
"""What a layer that predicts has besides: its own embedding and head, and what joins the two streams."""


def build_balanced_rows(layer: tuple[Row, ...], conditions: str = "moe shared") -> tuple[Row, ...]:
    """Build the table of a model whose layers have the rows `layer`; those that predict meet all of `conditions`."""
    following = (
        *build_predicting_rows(layer, _MTP_LAYER_PREFIX, conditions),
        *build_predicting_ends(_MTP_LAYER_PREFIX, _MTP_EXTRA_TENSORS),
    )
    return (*EMBEDDING, *layer, *LAST_NORM, *HEADS, *following)


def add_balanced_facts(facts: ModelDims, config: ModelConfig, *, moe: Collection[int], following: int) -> ModelDims:
    """Return `facts`, and those of experts in the layers `moe` and of `following` layers that predict."""
    layers, ffn = config.size("num_hidden_layers"), config.size("moe_intermediate_size")
    return add_expert_facts(
        facts,
        count_experts(config, "n_routed_experts"),
        ffn,
        moe=moe,
        shared=ffn * config.size("n_shared_experts"),
    ).extend_dims(
        indices={"next": RowIndex(range(layers, layers + config.count("num_nextn_predict_layers", following)))}
    )


def _build_v2_facts(config: ModelConfig) -> ModelDims:
    facts = build_latent_facts(config, mlp_bias=config.read_flag("mlp_bias", default=False))
    return add_balanced_facts(facts, config, moe=list_later_layers(config, 0), following=0)


def _build_v1_facts(config: ModelConfig) -> ModelDims:
    facts = build_decoder_facts(config, qkv_bias=config.read_flag("attention_bias", default=False))
    return add_balanced_facts(facts, config, moe=list_sparse_layers(config, 0), following=0)


def _build_v3_facts(config: ModelConfig) -> ModelDims:
    facts = build_latent_facts(config, mlp_bias=False)
    return add_balanced_facts(facts, config, moe=list_later_layers(config, 3), following=1)


def _build_glm4_lite_facts(config: ModelConfig) -> ModelDims:
    sizes = config.over({"q_lora_rank": 768, "v_head_dim": 256, "qk_nope_head_dim": 192})
    facts = build_latent_facts(sizes, mlp_bias=False)
    return add_balanced_facts(facts, config, moe=list_sparse_layers(config, 1), following=1)


def _build_glm4_moe_facts(config: ModelConfig) -> ModelDims:
    facts = build_decoder_facts(
        config,
        kv_heads=8,
        qkv_bias=config.read_flag("attention_bias", default=False),
        qk_norm=config.read_flag("use_qk_norm", default=False),
    )
    return add_balanced_facts(facts, config, moe=list_later_layers(config, 1), following=1)


_V2_NAMES: Final = {"num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts"}
_V2_SIZES: Final = {
    **assume_sizes(102400, 4096, 11008, 32, 32),
    "moe_intermediate_size": 1407,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
}
_CONFIG_KEY_ALIASES: Final = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}
DEEPSEEK: Final = Family(
    name="deepseek",
    rows=(*EMBEDDING, *QKVO, *_V1_EXPERTS, *NORMS, *LAST_NORM, *HEADS),
    facts=_build_v1_facts,
    classes={"DeepseekForCausalLM": ModelClass("model", "lm")},
    prefixes=("model",),
    fused=build_fused_experts(),
    traits=LayerFeatures(activation=("hidden_act", "silu"), norm="rms", wide_router=True),
    aliases=_V2_NAMES,
    assumed=_V2_SIZES,
    inner_kinds={
        "deepseek_ocr2_text": {},
        "unlimited_ocr_text": {**assume_sizes(129280, 1280, 6848, 12, 10), "moe_intermediate_size": 896},
    },
)
"""DeepSeek-MoE, and the text models of DeepSeek-OCR and the smaller DeepSeek-VL2, whose configs call them V2."""
DEEPSEEK_V2: Final = Family(
    name="deepseek_v2",
    rows=(
        *EMBEDDING,
        *LATENT,
        *add_condition(GATED, "!moe"),
        *build_expert_rows(),
        ROUTER,
        _BUFFERED_BALANCE,
        *BIASED_SHARED,
        *NORMS,
        *LAST_NORM,
        *HEADS,
    ),
    facts=_build_v2_facts,
    classes={
        "DeepseekV2ForCausalLM": ModelClass("model", "lm"),
        "DeepseekV2Model": ModelClass(),
        "DeepseekV2ForSequenceClassification": ModelClass("model", "score"),
    },
    prefixes=("model",),
    fused=build_fused_experts(),
    traits=LayerFeatures(activation=("hidden_act", "silu"), norm="rms", wide_router=True),
    aliases=_V2_NAMES,
    assumed=_V2_SIZES,
    without_latents=DEEPSEEK.name,
)
DEEPSEEK_V3: Final = Family(
    name="deepseek_v3",
    rows=build_balanced_rows(_V3_LAYER),
    facts=_build_v3_facts,
    classes={
        "DeepseekV3ForCausalLM": ModelClass("model", "lm"),
        "DeepseekV3Model": ModelClass(),
        "DeepseekV3ForSequenceClassification": ModelClass("model", "score"),
        "DeepseekV3ForTokenClassification": ModelClass("model", "score score_bias"),
    },
    prefixes=("model",),
    fused=build_fused_experts(),
    traits=LayerFeatures(activation=("hidden_act", "silu"), norm="rms", experts_per_token=8, wide_router=True),
    aliases=_CONFIG_KEY_ALIASES,
    assumed={
        **assume_sizes(129280, 7168, 18432, 61, 128),
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
    },
    inner_kinds={"kimi_k2": {}},
)
GLM4_MOE: Final = Family(
    name="glm4_moe",
    rows=build_balanced_rows(_GLM_LAYER),
    facts=_build_glm4_moe_facts,
    classes={"Glm4MoeForCausalLM": ModelClass("model", "lm"), "Glm4MoeModel": ModelClass()},
    prefixes=("model",),
    fused=build_fused_experts(),
    traits=LayerFeatures(
        activation=("hidden_act", "silu"), norm="rms", experts_per_token=8, joined_queries=True, wide_router=True
    ),
    aliases=_CONFIG_KEY_ALIASES,
    assumed={
        **assume_sizes(151552, 4096, 10944, 46, 96),
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
    },
    inner_kinds={
        "glm4v_moe_text": {
            "attention_bias": True,
            "vocab_size": 151424,
            "max_position_embeddings": 65536,
            "num_nextn_predict_layers": 0,
        }
    },
)
GLM4_MOE_LITE: Final = Family(
    name="glm4_moe_lite",
    rows=DEEPSEEK_V3.rows,
    facts=_build_glm4_lite_facts,
    classes={"Glm4MoeLiteForCausalLM": ModelClass("model", "lm"), "Glm4MoeLiteModel": ModelClass()},
    prefixes=("model",),
    fused=build_fused_experts(),
    traits=LayerFeatures(activation=("hidden_act", "silu"), norm="rms", experts_per_token=4, wide_router=True),
    aliases={**_CONFIG_KEY_ALIASES, "head_dim": "qk_rope_head_dim"},
    assumed={
        **assume_sizes(154880, 2048, 10240, 47, 20),
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
    },
)
