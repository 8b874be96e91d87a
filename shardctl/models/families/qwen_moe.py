"""Describes Qwen2-MoE, Qwen3-MoE, OLMoE and FlexOlmo: routed experts in `mlp.experts.N`, a shared one in Qwen2's.

Names and shapes follow the Hub (`models/qwen2_moe/modeling_qwen2_moe.py`, and its namesakes for the others).
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
    ROUTER,
    add_expert_facts,
    build_expert_rows,
    build_fused_experts,
    build_shared_expert_rows,
    count_experts,
    list_expert_layers,
)
from shardctl.models.tables.family import Family, LogicalDim, ModelClass, Row
from shardctl.models.tables.layer_features import LayerFeatures
from shardctl.models.tables.windows import WindowRule

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

SHARED: Final = (
    *build_shared_expert_rows("mlp.shared_expert"),
    Row(f"{LAYER}.mlp.shared_expert_gate.weight", "1 hidden", when="moe shared"),
)
QWEN_MOE: Final = (*DENSE, ROUTER, *build_expert_rows(), *SHARED)
"""The MLP of a layer: dense, or of routed experts and perhaps a shared one, which a gate weighs."""
_OLMOE_NORMS: Final = (
    Row(f"{LAYER}.self_attn.q_norm.weight", "q_norm"),
    Row(f"{LAYER}.self_attn.k_norm.weight", "kv_norm"),
)
"""Norms over all heads at once: whole on every rank, as transformers keeps them by gathering q and k."""


def add_qwen_experts(facts: ModelDims, config: ModelConfig, *, shared: int | None) -> ModelDims:
    """Return `facts`, and those of Qwen's experts."""
    count = count_experts(config, "num_experts")
    return add_expert_facts(
        facts, count, config.size("moe_intermediate_size"), moe=list_expert_layers(config), shared=shared
    )


def _build_qwen2_moe_facts(config: ModelConfig) -> ModelDims:
    bias = config.read_flag("qkv_bias", default=True)
    return add_qwen_experts(
        build_decoder_facts(config, qkv_bias=bias, kv_heads=16),
        config,
        shared=config.size("shared_expert_intermediate_size"),
    )


def _build_qwen3_moe_facts(config: ModelConfig) -> ModelDims:
    bias = config.read_flag("attention_bias", default=False)
    facts = build_decoder_facts(config, qkv_bias=bias, o_bias=bias, qk_norm=True, kv_heads=4)
    return add_qwen_experts(facts, config, shared=None)


def _build_olmoe_facts(config: ModelConfig) -> ModelDims:
    bias = config.read_flag("attention_bias", default=False)
    facts = build_decoder_facts(config, qkv_bias=bias, o_bias=bias)
    facts = add_expert_facts(facts, count_experts(config, "num_experts"), config.size("intermediate_size"))
    return facts.extend_dims(dims={"q_norm": LogicalDim(facts.size("q")), "kv_norm": LogicalDim(facts.size("kv"))})


_SLIDING_WINDOW_RULE: Final = WindowRule(4096, "first even", start=28, switched=True)
QWEN2_MOE: Final = Family(
    name="qwen2_moe",
    rows=(*EMBEDDING, *QKVO, *QWEN_MOE, *NORMS, *LAST_NORM, *HEADS),
    facts=_build_qwen2_moe_facts,
    classes=build_decoder_classes("Qwen2Moe"),
    prefixes=("model",),
    fused=build_fused_experts(),
    traits=LayerFeatures(
        activation=("hidden_act", "silu"),
        norm="rms",
        window=_SLIDING_WINDOW_RULE,
        experts_per_token=4,
        narrow_experts=True,
    ),
    aliases={"num_local_experts": "num_experts"},
    assumed={
        **assume_sizes(151936, 2048, 5632, 24, 16),
        "moe_intermediate_size": 1408,
        "num_experts": 60,
        "shared_expert_intermediate_size": 5632,
    },
)
QWEN3_MOE: Final = Family(
    name="qwen3_moe",
    rows=(
        *EMBEDDING,
        *QKVO,
        *HEAD_NORMS,
        *DENSE,
        *build_expert_rows(),
        ROUTER,
        *NORMS,
        *LAST_NORM,
        *HEADS,
    ),
    facts=_build_qwen3_moe_facts,
    classes=build_decoder_classes("Qwen3Moe", question="transformer"),
    prefixes=("model", "transformer"),
    fused=build_fused_experts(),
    traits=LayerFeatures(
        activation=("hidden_act", "silu"),
        norm="rms",
        window=WindowRule(4096, switched=True),
        experts_per_token=8,
        narrow_experts=True,
    ),
    aliases={"num_local_experts": "num_experts"},
    assumed={**assume_sizes(151936, 2048, 6144, 24, 32), "moe_intermediate_size": 768, "num_experts": 128},
    inner_kinds={
        "qwen3_vl_moe_text": {
            "rope_theta": 5e5,
            "max_position_embeddings": 128000,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
        },
        "qwen3_omni_moe_text": {
            **assume_sizes(3584, 2048, 18944, 28, 28),
            "rope_theta": 1e6,
            "norm_topk_prob": True,
        },
    },
)
OLMOE: Final = Family(
    name="olmoe",
    rows=(*EMBEDDING, *QKVO, *_OLMOE_NORMS, ROUTER, *build_expert_rows(), *NORMS, *LAST_NORM, *HEADS),
    facts=_build_olmoe_facts,
    classes={"OlmoeForCausalLM": ModelClass("model", "lm"), "OlmoeModel": ModelClass()},
    prefixes=("model",),
    fused=build_fused_experts(),
    traits=LayerFeatures(activation=("hidden_act", "silu"), norm="rms", experts_per_token=8, narrow_experts=True),
    aliases={"num_local_experts": "num_experts"},
    assumed={**assume_sizes(50304, 2048, 2048, 16, 16), "num_experts": 64},
)
FLEX_OLMO: Final = Family(
    name="flex_olmo",
    rows=(
        *EMBEDDING,
        *QKVO,
        *_OLMOE_NORMS,
        ROUTER,
        *build_expert_rows(),
        Row(f"{LAYER}.post_attention_layernorm.weight", "hidden"),
        Row(f"{LAYER}.post_feedforward_layernorm.weight", "hidden"),
        *LAST_NORM,
        *HEADS,
    ),
    facts=_build_olmoe_facts,
    classes={"FlexOlmoForCausalLM": ModelClass("model", "lm"), "FlexOlmoModel": ModelClass()},
    prefixes=("model",),
    fused=build_fused_experts(),
    traits=LayerFeatures(activation=("hidden_act", "silu"), norm="rms32", experts_per_token=5, narrow_experts=True),
    aliases={"num_local_experts": "num_experts"},
    assumed={**assume_sizes(100352, 4096, 11008, 32, 32), "num_experts": 7},
)
