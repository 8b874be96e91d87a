"""Describes RecurrentGemma: two layers with a gated linear recurrence, then one of attention within a window.

Names and shapes follow transformers 5 (`models/recurrent_gemma/modeling_recurrent_gemma.py`). The recurrence has gates
of their own for each block of channels, as many as attention has heads, and tp divides the blocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.models.tables.decoder import EMBEDDING, GATED, HEADS, LAYER, QKVO, assume_sizes, build_decoder_facts
from shardctl.models.tables.experts import add_condition
from shardctl.models.tables.family import Family, LogicalDim, ModelClass, Row
from shardctl.models.tables.layer_features import LayerFeatures
from shardctl.models.tables.windows import WindowRule

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_TEMPORAL_BLOCK_PREFIX: Final = f"{LAYER}.temporal_block"
_RG_LRU_PREFIX: Final = f"{_TEMPORAL_BLOCK_PREFIX}.rg_lru"
_RECURRENT_BLOCK_ROWS: Final = (
    Row(f"{_TEMPORAL_BLOCK_PREFIX}.linear_y.weight", "inner hidden"),
    Row(f"{_TEMPORAL_BLOCK_PREFIX}.linear_y.bias", "inner"),
    Row(f"{_TEMPORAL_BLOCK_PREFIX}.linear_x.weight", "inner hidden"),
    Row(f"{_TEMPORAL_BLOCK_PREFIX}.linear_x.bias", "inner"),
    Row(f"{_TEMPORAL_BLOCK_PREFIX}.linear_out.weight", "hidden inner"),
    Row(f"{_TEMPORAL_BLOCK_PREFIX}.linear_out.bias", "hidden"),
    Row(f"{_TEMPORAL_BLOCK_PREFIX}.conv_1d.weight", "inner 1 kernel"),
    Row(f"{_TEMPORAL_BLOCK_PREFIX}.conv_1d.bias", "inner"),
    Row(f"{_RG_LRU_PREFIX}.recurrent_param", "inner"),
    Row(f"{_RG_LRU_PREFIX}.input_gate_weight", "blocks block block"),
    Row(f"{_RG_LRU_PREFIX}.input_gate_bias", "blocks block"),
    Row(f"{_RG_LRU_PREFIX}.recurrent_gate_weight", "blocks block block"),
    Row(f"{_RG_LRU_PREFIX}.recurrent_gate_bias", "blocks block"),
)
_ATTENTION_ROWS: Final = tuple(
    replace(row, name=row.name.replace("self_attn", "temporal_block")) for row in QKVO if not row.buffer
)
_RECURRENT_GEMMA_ROWS: Final = (
    *EMBEDDING,
    Row(f"{LAYER}.temporal_pre_norm.weight", "hidden"),
    *add_condition(_ATTENTION_ROWS, "attention"),
    *add_condition(_RECURRENT_BLOCK_ROWS, "!attention"),
    Row(f"{LAYER}.channel_pre_norm.weight", "hidden"),
    *(replace(row, name=row.name.replace(".mlp.", ".mlp_block."), when="") for row in GATED),
    Row(".final_norm.weight", "hidden", on="last"),
    *(row for row in HEADS if row.when == "lm"),
)
_DEFAULT_BLOCK_TYPES: Final = ("recurrent", "recurrent", "attention")


def _list_attention(config: ModelConfig) -> frozenset[int]:
    """List the layers of attention: the kinds of `block_types` come again and again."""
    kinds = config.entries("block_types") or list(_DEFAULT_BLOCK_TYPES)
    if not kinds or not {*_DEFAULT_BLOCK_TYPES}.issuperset(kinds):
        raise SourceError(f"config.json has block_types = {kinds!r} where recurrent and attention are known")
    return frozenset(n for n in range(config.size("num_hidden_layers")) if kinds[n % len(kinds)] == "attention")


def _build_facts(config: ModelConfig) -> ModelDims:
    heads, kernel = config.size("num_attention_heads"), config.size("conv1d_width", 4)
    width = config.size("lru_width", config.size("hidden_size"))
    if width % heads:
        raise SourceError(f"config.json has num_attention_heads = {heads}, which does not divide lru_width = {width}")
    values = {**config.values, "head_dim": config.divided("hidden_size", "num_attention_heads")}
    bias, block = config.read_flag("attention_bias", default=False), width // heads
    facts = build_decoder_facts(replace(config, values=values), tied=True, qkv_bias=bias, o_bias=True)
    return facts.extend_dims(
        dims={
            "ffn": LogicalDim(config.size("intermediate_size") // 2, axis="tp"),
            "inner": LogicalDim(width, block, "tp", noun="channels"),
            "blocks": LogicalDim(heads, axis="tp", noun="channels"),
            "block": LogicalDim(block),
            "kernel": LogicalDim(kernel),
            "window": LogicalDim(kernel - 1),
            "state": LogicalDim(1),
        },
        flags={"attention": _list_attention(config)},
    )


RECURRENT_GEMMA: Final = Family(
    name="recurrent_gemma",
    rows=_RECURRENT_GEMMA_ROWS,
    facts=_build_facts,
    classes={"RecurrentGemmaForCausalLM": ModelClass("model", "lm"), "RecurrentGemmaModel": ModelClass()},
    prefixes=("model",),
    traits=LayerFeatures(
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        norm="rms32",
        joined_queries=True,
        window=WindowRule(2048, key="attention_window_size"),
        logit_cap=("logits_soft_cap", 30.0),
    ),
    aliases={"sliding_window": "attention_window_size"},
    assumed=assume_sizes(256000, 2560, 7680, 26, 10),
)
