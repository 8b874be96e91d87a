"""Describes LFM2: layers of short convolutions and a few of attention, each with an MLP or experts behind.

Names and shapes follow the Hub (`models/lfm2/modeling_lfm2.py`, and its namesake `lfm2_moe`). tp divides the channels
of the convolution, and the three parts of its input with them, as vLLM does (`mamba/short_conv.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.models.tables.decoder import EMBEDDING, HEADS, LAYER, assume_sizes, build_decoder_facts
from shardctl.models.tables.experts import (
    add_condition,
    add_expert_facts,
    build_expert_rows,
    build_fused_experts,
    count_experts,
)
from shardctl.models.tables.family import Family, LogicalDim, ModelClass, Row
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_MAX_MULTIPLIER: Final = 1e6
"""Of the width of an MLP; published ones are 1 and 1.3."""
_EXPERT_WEIGHT_NAMES: Final = ("w1", "w3", "w2")
_MLP_MODULE_NAME: Final = "feed_forward"
_MLP_ROWS: Final = (
    Row(f"{LAYER}.{_MLP_MODULE_NAME}.w1.weight", "ffn hidden"),
    Row(f"{LAYER}.{_MLP_MODULE_NAME}.w3.weight", "ffn hidden"),
    Row(f"{LAYER}.{_MLP_MODULE_NAME}.w2.weight", "hidden ffn"),
)
_ATTENTION_ROWS: Final = (
    Row(f"{LAYER}.self_attn.q_proj.weight", "q hidden"),
    Row(f"{LAYER}.self_attn.k_proj.weight", "kv hidden"),
    Row(f"{LAYER}.self_attn.v_proj.weight", "kv hidden"),
    Row(f"{LAYER}.self_attn.out_proj.weight", "hidden q"),
    Row(f"{LAYER}.self_attn.q_layernorm.weight", "head"),
    Row(f"{LAYER}.self_attn.k_layernorm.weight", "head"),
)
_CONVOLUTION_ROWS: Final = (
    Row(f"{LAYER}.conv.conv.weight", "inner 1 window"),
    Row(f"{LAYER}.conv.conv.bias", "inner", when="conv_bias"),
    Row(f"{LAYER}.conv.in_proj.weight", "inner+inner+inner hidden"),
    Row(f"{LAYER}.conv.in_proj.bias", "inner+inner+inner", when="conv_bias"),
    Row(f"{LAYER}.conv.out_proj.weight", "hidden inner"),
    Row(f"{LAYER}.conv.out_proj.bias", "hidden", when="conv_bias"),
)
_NORM_ROWS: Final = (
    Row(f"{LAYER}.operator_norm.weight", "hidden"),
    Row(f"{LAYER}.ffn_norm.weight", "hidden"),
    Row(".embedding_norm.weight", "hidden", on="last"),
)
_MIXER_ROWS: Final = (*add_condition(_ATTENTION_ROWS, "attention"), *add_condition(_CONVOLUTION_ROWS, "!attention"))
_LFM2_ROWS: Final = (*EMBEDDING, *_MIXER_ROWS, *_MLP_ROWS, *_NORM_ROWS, *HEADS)
_LFM2_MOE: Final = (
    *EMBEDDING,
    *_MIXER_ROWS,
    *add_condition(_MLP_ROWS, "!moe"),
    Row(f"{LAYER}.{_MLP_MODULE_NAME}.expert_bias", "experts", when="moe balanced", dtype="F32"),
    *build_expert_rows(_MLP_MODULE_NAME, _EXPERT_WEIGHT_NAMES),
    Row(f"{LAYER}.{_MLP_MODULE_NAME}.gate.weight", "experts hidden", when="moe"),
    *_NORM_ROWS,
    *HEADS,
)


def _build_mixer_facts(config: ModelConfig) -> ModelDims:
    """A short convolution remembers its last inputs, and has no state besides."""
    tied = config.read_flag("tie_embedding", default=config.read_flag("tie_word_embeddings", default=True))
    facts = build_decoder_facts(config, kv_heads=8)
    return facts.extend_dims(
        dims={
            "inner": LogicalDim(facts.size("hidden"), axis="tp", noun="channels"),
            "state": LogicalDim(0),
            "window": LogicalDim(config.size("conv_L_cache", 3)),
        },
        flags={
            "tied": tied,
            "attention": _list_attention_layers(config),
            "conv_bias": config.read_flag("conv_bias", default=False),
        },
    )


def _list_attention_layers(config: ModelConfig) -> frozenset[int]:
    """List the layers with attention: by `layer_types`, else `full_attn_idxs`, else all."""
    kinds, listed = config.values.get("layer_types"), config.entries("full_attn_idxs")
    if isinstance(kinds, list):
        return frozenset(n for n, kind in enumerate(kinds) if kind == "full_attention")
    return frozenset(range(config.size("num_hidden_layers")) if listed is None else listed)


def _build_facts(config: ModelConfig) -> ModelDims:
    facts, width = _build_mixer_facts(config), config.size("block_ff_dim", config.size("intermediate_size"))
    if config.read_flag("block_auto_adjust_ff_dim", default=True):
        factor, multiple = config.values.get("block_ffn_dim_multiplier", 1.0), config.size("block_multiple_of", 256)
        width = int(2 * width / 3)
        if factor is not None:
            factor = config.number("block_ffn_dim_multiplier", 1.0)
            if not 0 < factor < _MAX_MULTIPLIER:
                raise SourceError(f"config.json has block_ffn_dim_multiplier = {factor:g}, which makes no MLP")
            width = -(-int(factor * width) // multiple) * multiple
    return facts.extend_dims(dims={"ffn": LogicalDim(width, axis="tp")})


def _build_moe_facts(config: ModelConfig) -> ModelDims:
    facts = add_expert_facts(
        _build_mixer_facts(config),
        count_experts(config, "num_experts"),
        config.size("moe_intermediate_size"),
        moe=range(config.count("num_dense_layers", 2), config.size("num_hidden_layers")),
    )
    return facts.extend_dims(flags={"balanced": config.read_flag("use_expert_bias", default=True)})


_LAYER_FEATURES: Final = LayerFeatures(activation=("", "silu"), norm="rms", attention_dropout=("", 0.0))
LFM2: Final = Family(
    name="lfm2",
    rows=_LFM2_ROWS,
    facts=_build_facts,
    classes={"Lfm2ForCausalLM": ModelClass("model", "lm"), "Lfm2Model": ModelClass()},
    prefixes=("model",),
    traits=_LAYER_FEATURES,
    assumed=assume_sizes(65536, 2560, 12288, 32, 32),
)
LFM2_MOE: Final = Family(
    name="lfm2_moe",
    rows=_LFM2_MOE,
    facts=_build_moe_facts,
    classes={"Lfm2MoeForCausalLM": ModelClass("model", "lm"), "Lfm2MoeModel": ModelClass()},
    prefixes=("model",),
    fused=build_fused_experts(_MLP_MODULE_NAME, _EXPERT_WEIGHT_NAMES),
    traits=replace(_LAYER_FEATURES, experts_per_token=4, narrow_experts=True),
    assumed={**assume_sizes(65536, 2048, 7168, 32, 32), "moe_intermediate_size": 1792, "num_experts": 32},
)
