"""Describes Bamba and Granite 4: layers of Mamba 2, and a few of attention, each with an MLP or experts behind.

Falcon-H1 has both in every layer, side by side.

Names and shapes follow transformers 5 (`models/bamba/modeling_bamba.py`,
`models/granitemoehybrid/modeling_granitemoehybrid.py`). Granite's shared expert is there without routed ones, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.models.families.granite_moe import FUSED, MOE, SHARED
from shardctl.models.families.mamba import build_mixer2_dims, build_mixer2_rows
from shardctl.models.tables.decoder import (
    EMBEDDING,
    HEADS,
    LAST_NORM,
    LAYER,
    NORMS,
    QKVO,
    assume_sizes,
    build_decoder_facts,
)
from shardctl.models.tables.experts import add_condition, add_expert_facts
from shardctl.models.tables.family import Family, ModelClass, Row
from shardctl.models.tables.layer_features import FurtherTensor, LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_MIXER_ROWS: Final = build_mixer2_rows(f"{LAYER}.mamba", "!attention")
_ATTENTION_ROWS: Final = add_condition((row for row in QKVO if not row.buffer), "attention")
_FEED_FORWARD: Final = (
    Row(f"{LAYER}.feed_forward.gate_proj.weight", "ffn hidden"),
    Row(f"{LAYER}.feed_forward.gate_proj.bias", "ffn", when="mlp_bias"),
    Row(f"{LAYER}.feed_forward.up_proj.weight", "ffn hidden"),
    Row(f"{LAYER}.feed_forward.up_proj.bias", "ffn", when="mlp_bias"),
    Row(f"{LAYER}.feed_forward.down_proj.weight", "hidden ffn"),
    Row(f"{LAYER}.feed_forward.down_proj.bias", "hidden", when="mlp_bias"),
)
_NORM_ROWS: Final = (
    Row(f"{LAYER}.input_layernorm.weight", "hidden"),
    Row(f"{LAYER}.pre_ff_layernorm.weight", "hidden"),
)
_NORM_AND_HEAD_ROWS: Final = (Row(".final_layernorm.weight", "hidden", on="last"), *HEADS)
_BAMBA_ROWS: Final = (*EMBEDDING, *_FEED_FORWARD, *_NORM_ROWS, *_MIXER_ROWS, *_ATTENTION_ROWS, *_NORM_AND_HEAD_ROWS)
_PARALLEL_MIXER_ROWS: Final = tuple(
    replace(row, when="out_bias") if row.name.endswith("out_proj.bias") else row
    for row in build_mixer2_rows(f"{LAYER}.mamba", norm="mixer_norm")
)
_FALCON_H1_ROWS: Final = (
    *EMBEDDING,
    *_FEED_FORWARD,
    *_PARALLEL_MIXER_ROWS,
    *(row for row in QKVO if not row.buffer),
    *_NORM_ROWS,
    *_NORM_AND_HEAD_ROWS,
)
_GRANITE_MOE_HYBRID_ROWS: Final = (
    *EMBEDDING,
    *NORMS,
    *add_condition(MOE, "moe"),
    *SHARED,
    *_MIXER_ROWS,
    *_ATTENTION_ROWS,
    *LAST_NORM,
    *HEADS,
)


def _add_mixer_facts(
    facts: ModelDims, config: ModelConfig, attention: frozenset[int], *, channels: int = 0
) -> ModelDims:
    """`facts`, and those of Mamba 2 in all layers but those of `attention`; with as many `channels`, if it is said."""
    heads, expand = config.size("mamba_n_heads", 128), config.size("mamba_expand", 2)
    inner = channels or expand * config.size("hidden_size")
    if inner % heads:
        raise SourceError(f"config.json has {heads} mamba_n_heads, which do not divide {inner} channels")
    head = inner // heads if config.values.get("mamba_d_head", "auto") == "auto" else config.size("mamba_d_head")
    return facts.extend_dims(
        dims=build_mixer2_dims(
            heads,
            head,
            state=config.size("mamba_d_state", 256),
            groups=config.size("mamba_n_groups", 1),
            window=config.size("mamba_d_conv", 4),
            chunk=config.size("mamba_chunk_size", 256),
        ),
        flags={
            "attention": attention,
            "conv_bias": config.read_flag("mamba_conv_bias", default=True),
            "mixer_bias": config.read_flag("mamba_proj_bias", default=False),
        },
    )


def _build_bamba_facts(config: ModelConfig) -> ModelDims:
    bias, listed = config.read_flag("attention_bias", default=False), config.entries("attn_layer_indices") or ()
    facts = build_decoder_facts(
        config, kv_heads=8, qkv_bias=bias, o_bias=bias, mlp_bias=config.read_flag("mlp_bias", default=False)
    )
    return _add_mixer_facts(facts, config, frozenset(listed))


def _build_granite_facts(config: ModelConfig) -> ModelDims:
    bias, kinds = config.read_flag("attention_bias", default=False), config.entries("layer_types") or ()
    count = config.count("num_local_experts", 8)
    facts = add_expert_facts(
        build_decoder_facts(config, qkv_bias=bias, o_bias=bias),
        count,
        config.size("intermediate_size"),
        moe=count > 0,
        shared=config.size("shared_intermediate_size", 1024),
    )
    attention = frozenset(n for n, kind in enumerate(kinds) if kind in {"attention", "full_attention"})
    return _add_mixer_facts(facts, config, attention)


def _build_falcon_facts(config: ModelConfig) -> ModelDims:
    silent = "mamba_d_ssm" not in config.values
    channels = 1024 if silent else config.count("mamba_d_ssm", 0)
    bias = config.read_flag("attention_bias", default=False)
    facts = build_decoder_facts(
        config, kv_heads=8, qkv_bias=bias, o_bias=bias, mlp_bias=config.read_flag("mlp_bias", default=False)
    )
    return _add_mixer_facts(facts, config, frozenset(), channels=channels).extend_dims(
        flags={
            "out_bias": config.read_flag("projectors_bias", default=False),
            "mixer_norm": config.read_flag("mamba_rms_norm", default=False),
        }
    )


BAMBA: Final = Family(
    name="bamba",
    rows=_BAMBA_ROWS,
    facts=_build_bamba_facts,
    classes={"BambaForCausalLM": ModelClass("model", "lm"), "BambaModel": ModelClass()},
    prefixes=("model",),
    traits=LayerFeatures(activation=("hidden_act", "silu"), norm="rms", joined_queries=True),
    assumed=assume_sizes(128000, 4096, 14336, 32, 32),
)
GRANITE_MOE_HYBRID: Final = Family(
    name="granitemoehybrid",
    rows=_GRANITE_MOE_HYBRID_ROWS,
    facts=_build_granite_facts,
    classes={"GraniteMoeHybridForCausalLM": ModelClass("model", "lm"), "GraniteMoeHybridModel": ModelClass()},
    prefixes=("model",),
    fused=FUSED,
    traits=LayerFeatures(activation=("hidden_act", "silu"), norm="rms", experts_per_token=2, narrow_experts=True),
    assumed=assume_sizes(32000, 4096, 11008, 32, 32),
    aliases={"layers_block_type": "layer_types"},
)
FALCON_H1: Final = Family(
    name="falcon_h1",
    rows=_FALCON_H1_ROWS,
    facts=_build_falcon_facts,
    classes={"FalconH1ForCausalLM": ModelClass("model", "lm"), "FalconH1Model": ModelClass()},
    prefixes=("model",),
    traits=LayerFeatures(
        activation=("hidden_act", "silu"),
        norm="rms",
        further=(FurtherTensor("input of attention, scaled apart from the mixer's", "hidden"),),
    ),
    assumed=assume_sizes(128000, 4096, 14336, 32, 32),
)
