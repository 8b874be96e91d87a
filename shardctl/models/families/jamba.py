"""Describes Jamba: layers of Mamba, and every few layers one of attention, or with experts.

Names and shapes follow transformers 5 (`models/jamba/modeling_jamba.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.families.mamba import build_mixer_rows, compute_time_step_rank
from shardctl.models.tables.decoder import (
    EMBEDDING,
    HEADS,
    LAYER,
    assume_sizes,
    build_decoder_classes,
    build_decoder_facts,
)
from shardctl.models.tables.experts import add_expert_facts, build_expert_rows, build_fused_experts
from shardctl.models.tables.family import Family, LogicalDim, ModelDims, Row
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig

_JAMBA_ROWS: Final = (
    *EMBEDDING,
    Row(f"{LAYER}.self_attn.q_proj.weight", "q hidden", "attention"),
    Row(f"{LAYER}.self_attn.k_proj.weight", "kv hidden", "attention"),
    Row(f"{LAYER}.self_attn.v_proj.weight", "kv hidden", "attention"),
    Row(f"{LAYER}.self_attn.o_proj.weight", "hidden q", "attention"),
    *build_mixer_rows(f"{LAYER}.mamba", "!attention"),
    Row(f"{LAYER}.mamba.dt_layernorm.weight", "rank", "!attention"),
    Row(f"{LAYER}.mamba.b_layernorm.weight", "state", "!attention"),
    Row(f"{LAYER}.mamba.c_layernorm.weight", "state", "!attention"),
    Row(f"{LAYER}.feed_forward.gate_proj.weight", "ffn hidden", when="!moe"),
    Row(f"{LAYER}.feed_forward.up_proj.weight", "ffn hidden", when="!moe"),
    Row(f"{LAYER}.feed_forward.down_proj.weight", "hidden ffn", when="!moe"),
    Row(f"{LAYER}.feed_forward.router.weight", "experts hidden", when="moe"),
    *build_expert_rows("feed_forward"),
    Row(f"{LAYER}.input_layernorm.weight", "hidden"),
    Row(f"{LAYER}.pre_ff_layernorm.weight", "hidden"),
    Row(".final_layernorm.weight", "hidden", on="last"),
    *HEADS,
)
_KV_HEADS: Final = 8
"""What `JambaConfig` assumes where a config is silent."""


def _build_facts(config: ModelConfig) -> ModelDims:
    period, offset = config.size("attn_layer_period", 8), config.values.get("attn_layer_offset", 4)
    facts = build_decoder_facts(config, kv_heads=_KV_HEADS)
    return add_expert_facts(
        facts, config.size("num_experts", 16), config.size("intermediate_size"), moe=_list_expert_layers(config)
    ).extend_dims(
        dims={
            "inner": LogicalDim(
                config.size("mamba_expand", 2) * config.size("hidden_size"), axis="tp", noun="channels"
            ),
            "state": LogicalDim(config.size("mamba_d_state", 16)),
            "rank": LogicalDim(compute_time_step_rank(config, "mamba_dt_rank")),
            "window": LogicalDim(config.size("mamba_d_conv", 4)),
        },
        flags={
            "attention": [n for n in range(config.size("num_hidden_layers")) if n % period == offset],
            "conv_bias": config.read_flag("mamba_conv_bias", default=True),
            "mixer_bias": config.read_flag("mamba_proj_bias", default=False),
        },
    )


def _list_expert_layers(config: ModelConfig) -> frozenset[int]:
    """List the layers that have experts."""
    if config.size("num_experts", 16) == 1:
        return frozenset()
    period, offset = config.size("expert_layer_period", 2), config.count("expert_layer_offset", 1)
    return frozenset(n for n in range(config.size("num_hidden_layers")) if n % period == offset)


JAMBA: Final = Family(
    name="jamba",
    rows=_JAMBA_ROWS,
    facts=_build_facts,
    classes=build_decoder_classes("Jamba", question=None, tokens=None),
    prefixes=("model",),
    fused=build_fused_experts("feed_forward"),
    traits=LayerFeatures(activation=("hidden_act", "silu"), norm="rms", experts_per_token=2, narrow_experts=True),
    aliases={"num_local_experts": "num_experts"},
    assumed=assume_sizes(65536, 4096, 14336, 32, 32),
)
