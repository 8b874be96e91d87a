"""Describes Qwen3-Next: one layer in four has gated attention, the others gated DeltaNet; all have experts.

Names and shapes follow the Hub (`models/qwen3_next/modeling_qwen3_next.py`). Linear attention is cut by key heads, with
the value heads that each of them serves: `in_proj_qkvz` and `in_proj_ba` hold one key head after another, q|k|v|z and
b|a (`fix_query_key_value_ordering`), while the convolution holds all of q, then k, then v.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.models.families.qwen_moe import QWEN_MOE, add_qwen_experts
from shardctl.models.tables.decoder import (
    EMBEDDING,
    HEADS,
    LAST_NORM,
    LAYER,
    NORMS,
    assume_sizes,
    build_decoder_classes,
    build_decoder_facts,
)
from shardctl.models.tables.experts import (
    add_condition,
    build_fused_experts,
    build_predicting_ends,
    build_predicting_rows,
)
from shardctl.models.tables.family import Family, LogicalDim, Row, RowIndex
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

GATED_ATTENTION: Final = (
    Row(f"{LAYER}.self_attn.q_proj.weight", "gated_q hidden"),
    Row(f"{LAYER}.self_attn.q_proj.bias", "gated_q", when="qkv_bias"),
    Row(f"{LAYER}.self_attn.k_proj.weight", "kv hidden"),
    Row(f"{LAYER}.self_attn.k_proj.bias", "kv", when="qkv_bias"),
    Row(f"{LAYER}.self_attn.v_proj.weight", "kv hidden"),
    Row(f"{LAYER}.self_attn.v_proj.bias", "kv", when="qkv_bias"),
    Row(f"{LAYER}.self_attn.o_proj.weight", "hidden q"),
    Row(f"{LAYER}.self_attn.o_proj.bias", "hidden", when="o_bias"),
    Row(f"{LAYER}.self_attn.q_norm.weight", "head"),
    Row(f"{LAYER}.self_attn.k_norm.weight", "head"),
)
"""Attention whose q heads each carry a gate."""
_LINEAR_ATTENTION_ROWS: Final = (
    Row(f"{LAYER}.linear_attn.dt_bias", "value_heads"),
    Row(f"{LAYER}.linear_attn.A_log", "value_heads"),
    Row(f"{LAYER}.linear_attn.conv1d.weight", "keys+keys+values 1 window"),
    Row(f"{LAYER}.linear_attn.in_proj_qkvz.weight", "qkvz hidden"),
    Row(f"{LAYER}.linear_attn.in_proj_ba.weight", "ba hidden"),
    Row(f"{LAYER}.linear_attn.norm.weight", "value_head"),
    Row(f"{LAYER}.linear_attn.out_proj.weight", "hidden values"),
)
MTP_LAYER: Final = "mtp.layers.{next}"


def build_mtp_rows(layer: tuple[Row, ...], conditions: str) -> tuple[Row, ...]:
    """Build the layers of the Hub's files that predict further tokens, and are as those that meet all of `conditions`.

    The state dict of transformers leaves them out.
    """
    return (
        *build_predicting_ends("mtp", {"fc": "hidden hidden+hidden"}),
        *build_predicting_rows(layer, MTP_LAYER, conditions),
        *build_predicting_ends(
            "mtp", {"norm": "hidden", "pre_fc_norm_embedding": "hidden", "pre_fc_norm_hidden": "hidden"}
        ),
    )


def add_delta_facts(facts: ModelDims, config: ModelConfig) -> ModelDims:
    """Return `facts`, and those of linear attention and of queries with gates."""
    keys, values = config.size("linear_num_key_heads", 16), config.size("linear_num_value_heads", 32)
    key, value = config.size("linear_key_head_dim", 128), config.size("linear_value_head_dim", 128)
    if values % keys:
        raise SourceError(f"config.json has {values} value heads for {keys} key heads of linear attention")
    served, noun = values // keys, "key heads of linear attention"
    return facts.extend_dims(
        dims={
            "gated_q": LogicalDim(2 * facts.size("q"), 2 * facts.size("head"), "tp", noun="attention heads"),
            "keys": LogicalDim(keys * key, key, "tp", noun=noun),
            "values": LogicalDim(values * value, served * value, "tp", noun=noun),
            "value_heads": LogicalDim(values, served, "tp", noun=noun),
            "value_head": LogicalDim(value),
            "qkvz": LogicalDim(2 * (keys * key + values * value), 2 * (key + served * value), "tp", noun=noun),
            "ba": LogicalDim(2 * values, 2 * served, "tp", noun=noun),
            "window": LogicalDim(config.size("linear_conv_kernel_dim", 4)),
        },
        indices={"next": RowIndex(range(config.count("mtp_num_hidden_layers", 1)))},
        flags={"attention": _list_attention_layers(config)},
    )


def _list_attention_layers(config: ModelConfig) -> frozenset[int]:
    """List the layers with full attention."""
    layers, kinds = config.size("num_hidden_layers"), config.values.get("layer_types")
    if isinstance(kinds, list):
        return frozenset(n for n, kind in enumerate(kinds) if kind == "full_attention")
    interval = config.size("full_attention_interval", 4)
    return frozenset(range(interval - 1, layers, interval))


def _build_facts(config: ModelConfig) -> ModelDims:
    bias = config.read_flag("attention_bias", default=False)
    facts = build_decoder_facts(config, head_dim=256, kv_heads=2, qkv_bias=bias, o_bias=bias)
    shared = config.size("shared_expert_intermediate_size", 512)
    return add_delta_facts(add_qwen_experts(facts, config, shared=shared), config)


QWEN3_NEXT: Final = Family(
    name="qwen3_next",
    rows=(
        *EMBEDDING,
        *add_condition(_LINEAR_ATTENTION_ROWS, "!attention"),
        *add_condition(GATED_ATTENTION, "attention"),
        *QWEN_MOE,
        *NORMS,
        *LAST_NORM,
        *HEADS,
        *build_mtp_rows((*GATED_ATTENTION, *QWEN_MOE, *NORMS), "moe shared"),
    ),
    facts=_build_facts,
    classes=build_decoder_classes("Qwen3Next", question="transformer"),
    prefixes=("model", "transformer"),
    fused=build_fused_experts(),
    traits=LayerFeatures(
        activation=("hidden_act", "silu"), norm="rms32", experts_per_token=10, narrow_experts=True, joined_queries=True
    ),
    aliases={"num_local_experts": "num_experts"},
    assumed={**assume_sizes(151936, 2048, 5632, 48, 16), "moe_intermediate_size": 512, "num_experts": 512},
)
