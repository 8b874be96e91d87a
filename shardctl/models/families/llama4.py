"""Describes the text half of Llama 4: transposed experts, gate columns before up columns, and a shared expert.

Names and shapes follow the Hub (`models/llama4/modeling_llama4.py`, `Llama4ForCausalLM`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.errors import SourceError
from shardctl.models.decoder import EMBEDDING, HEADS, LAST_NORM, LAYER, NORMS, QKVO, assume_sizes, build_decoder_facts
from shardctl.models.experts import add_expert_facts, build_shared_expert_rows, count_experts
from shardctl.models.family import Family, LogicalDim, ModelClass, Row
from shardctl.models.layer_traits import LayerTraits
from shardctl.models.windows import WindowRule, mark_rotary_layers

if TYPE_CHECKING:
    from collections.abc import Collection

    from shardctl.models.config import ModelConfig
    from shardctl.models.family import FamilyFacts

_MODULE: Final = "feed_forward"
_LLAMA4: Final = (
    *EMBEDDING,
    *QKVO,
    Row(f"{LAYER}.{_MODULE}.gate_proj.weight", "dffn hidden", when="!moe"),
    Row(f"{LAYER}.{_MODULE}.up_proj.weight", "dffn hidden", when="!moe"),
    Row(f"{LAYER}.{_MODULE}.down_proj.weight", "hidden dffn", when="!moe"),
    Row(f"{LAYER}.{_MODULE}.experts.gate_up_proj", "expert hidden effn+effn", when="moe"),
    Row(f"{LAYER}.{_MODULE}.experts.down_proj", "expert effn hidden", when="moe"),
    Row(f"{LAYER}.{_MODULE}.router.weight", "experts hidden", when="moe"),
    *build_shared_expert_rows(f"{_MODULE}.shared_expert"),
    *NORMS,
    *LAST_NORM,
    *HEADS,
)

_CHUNKS: Final = WindowRule(8192, "rotary", period=4, key="attention_chunk_size", period_key="no_rope_layer_interval")
"""Layers with rotary positions attend within chunks, and norm queries and keys."""


def _build_facts(config: ModelConfig) -> FamilyFacts:
    bias, ffn = config.switch("attention_bias", default=False), config.size("intermediate_size")
    facts = build_decoder_facts(config, head_dim=128, kv_heads=8, qkv_bias=bias, o_bias=bias)
    count = count_experts(config, "num_local_experts")
    marks = mark_rotary_layers(_CHUNKS, config, config.size("num_hidden_layers"))
    rotary = frozenset(n for n, marked in enumerate(marks) if marked)
    return add_expert_facts(facts, count, ffn, moe=_list_expert_layers(config), shared=ffn).also(
        dims={"dffn": LogicalDim(config.size("intermediate_size_mlp", 16384), axis="tp")},
        flags={"qk_norm": config.switch("use_qk_norm", default=True), "rotary": rotary},
    )


def _list_expert_layers(config: ModelConfig) -> Collection[int]:
    """List the layers that have experts."""
    listed = config.values.get("moe_layers")
    if listed is None:
        step = config.size("interleave_moe_layer_step", 1)
        return range(step - 1, config.size("num_hidden_layers"), step)
    if not isinstance(listed, list):
        raise SourceError(f"config.json has moe_layers = {listed!r} where a list of layers is expected")
    return frozenset(listed)


LLAMA4_TEXT: Final = Family(
    name="llama4_text",
    rows=_LLAMA4,
    facts=_build_facts,
    classes={"Llama4ForCausalLM": ModelClass("model", "lm"), "Llama4TextModel": ModelClass()},
    prefixes=("model",),
    traits=LayerTraits(
        activation=("hidden_act", "silu"), norm="rms", window=_CHUNKS, experts_per_token=1, narrow_experts=True
    ),
    weightless=(Row(f"{LAYER}.self_attn.qk_norm.weight", "head", when="qk_norm rotary"),),
    assumed={**assume_sizes(202048, 5120, 8192, 48, 40), "num_local_experts": 16},
)
