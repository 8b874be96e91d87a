"""Qwen2-MoE, Qwen3-MoE and OLMoE: routed experts in `mlp.experts.N`, a shared one in Qwen2's.

Names and shapes follow the Hub (`models/qwen2_moe/modeling_qwen2_moe.py`, and its namesakes for Qwen3 and OLMoE).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.decoder import (
    EMBEDDING,
    HEAD_NORMS,
    HEADS,
    LAST_NORM,
    LAYER,
    NORMS,
    QKVO,
    decoder_classes,
    decoder_facts,
)
from shardctl.models.experts import (
    DENSE,
    expert_count,
    experts,
    fused_experts,
    shared_experts,
    stepped,
    with_experts,
)
from shardctl.models.family import Dim, Family, ModelClass, Row
from shardctl.models.layer_traits import LayerTraits
from shardctl.models.windows import WindowRule

if TYPE_CHECKING:
    from shardctl.models.config import Config
    from shardctl.models.family import Facts

ROUTER: Final = (Row(f"{LAYER}.mlp.gate.weight", "experts hidden", when="moe"),)
SHARED: Final = (
    *shared_experts("mlp.shared_expert"),
    Row(f"{LAYER}.mlp.shared_expert_gate.weight", "1 hidden", when="moe shared"),
)
QWEN_MOE: Final = (*DENSE, *ROUTER, *experts(), *SHARED)
"""The MLP of a layer: dense, or of routed experts and perhaps a shared one, which a gate weighs."""
_OLMOE_NORMS: Final = (
    Row(f"{LAYER}.self_attn.q_norm.weight", "q_norm"),
    Row(f"{LAYER}.self_attn.k_norm.weight", "kv_norm"),
)
"""Norms over all heads at once: whole on every rank, as transformers keeps them by gathering q and k."""


def qwen_experts(facts: Facts, config: Config, *, shared: int | None) -> Facts:
    """`facts`, and those of Qwen's experts."""
    count = expert_count(config, "num_experts", "num_local_experts")
    return with_experts(facts, count, config.size("moe_intermediate_size"), moe=stepped(config), shared=shared)


def _qwen2_moe(config: Config) -> Facts:
    bias = config.switch("qkv_bias", default=True)
    return qwen_experts(
        decoder_facts(config, qkv_bias=bias, kv_heads=16), config, shared=config.size("shared_expert_intermediate_size")
    )


def _qwen3_moe(config: Config) -> Facts:
    bias = config.switch("attention_bias", default=False)
    facts = decoder_facts(config, qkv_bias=bias, o_bias=bias, qk_norm=True, kv_heads=4)
    return qwen_experts(facts, config, shared=None)


def _olmoe(config: Config) -> Facts:
    bias = config.switch("attention_bias", default=False)
    facts = decoder_facts(config, qkv_bias=bias, o_bias=bias)
    facts = with_experts(facts, expert_count(config, "num_experts"), config.size("intermediate_size"))
    return facts.also(dims={"q_norm": Dim(facts.size("q")), "kv_norm": Dim(facts.size("kv"))})


_WINDOW: Final = WindowRule(4096, "first even", start=28, switched=True)
QWEN2_MOE: Final = Family(
    name="qwen2_moe",
    rows=(*EMBEDDING, *QKVO, *QWEN_MOE, *NORMS, *LAST_NORM, *HEADS),
    facts=_qwen2_moe,
    classes=decoder_classes("Qwen2Moe"),
    prefixes=("model",),
    fused=fused_experts(),
    traits=LayerTraits(
        activation=("hidden_act", "silu"), norm="rms", window=_WINDOW, experts_per_token=4, narrow_experts=True
    ),
)
QWEN3_MOE: Final = Family(
    name="qwen3_moe",
    rows=(
        *EMBEDDING,
        *QKVO,
        *HEAD_NORMS,
        *DENSE,
        *experts(),
        *ROUTER,
        *NORMS,
        *LAST_NORM,
        *HEADS,
    ),
    facts=_qwen3_moe,
    classes=decoder_classes("Qwen3Moe", question="transformer"),
    prefixes=("model", "transformer"),
    fused=fused_experts(),
    traits=LayerTraits(
        activation=("hidden_act", "silu"),
        norm="rms",
        window=WindowRule(4096, switched=True),
        experts_per_token=8,
        narrow_experts=True,
    ),
)
OLMOE: Final = Family(
    name="olmoe",
    rows=(*EMBEDDING, *QKVO, *_OLMOE_NORMS, *ROUTER, *experts(), *NORMS, *LAST_NORM, *HEADS),
    facts=_olmoe,
    classes={"OlmoeForCausalLM": ModelClass("model", "lm"), "OlmoeModel": ModelClass()},
    prefixes=("model",),
    fused=fused_experts(),
    traits=LayerTraits(activation=("hidden_act", "silu"), norm="rms", experts_per_token=8, narrow_experts=True),
)
