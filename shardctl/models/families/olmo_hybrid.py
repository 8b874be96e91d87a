"""Describes OLMo-Hybrid: one layer in four has OLMo 2's attention, the others a gated delta net.

Names and shapes follow transformers 5 (`models/olmo_hybrid/modeling_olmo_hybrid.py`), which joins three convolutions;
other names of the Hub, in `conversion_mapping.py`, are spellings. Layers with attention have norms after attention and
MLP, the others before. Linear attention is cut by key heads, with the value heads that each of them serves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.models.families.olmo import ALL_HEAD_NORMS
from shardctl.models.families.qwen3_next import add_delta_facts
from shardctl.models.tables.decoder import (
    EMBEDDING,
    GATED,
    HEADS,
    LAST_NORM,
    LAYER,
    QKVO,
    assume_sizes,
    build_decoder_facts,
)
from shardctl.models.tables.experts import add_condition
from shardctl.models.tables.family import Family, FusedArray, LogicalDim, ModelClass, Row
from shardctl.models.tables.layer_features import FurtherTensor, LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_LINEAR_ATTENTION_PREFIX: Final = f"{LAYER}.linear_attn"
_LINEAR_ATTENTION_ROWS: Final = (
    Row(f"{_LINEAR_ATTENTION_PREFIX}.A_log", "value_heads", dtype="F32"),
    Row(f"{_LINEAR_ATTENTION_PREFIX}.dt_bias", "value_heads"),
    Row(f"{_LINEAR_ATTENTION_PREFIX}.q_proj.weight", "keys hidden"),
    Row(f"{_LINEAR_ATTENTION_PREFIX}.k_proj.weight", "keys hidden"),
    Row(f"{_LINEAR_ATTENTION_PREFIX}.v_proj.weight", "values hidden"),
    Row(f"{_LINEAR_ATTENTION_PREFIX}.a_proj.weight", "value_heads hidden"),
    Row(f"{_LINEAR_ATTENTION_PREFIX}.b_proj.weight", "value_heads hidden"),
    Row(f"{_LINEAR_ATTENTION_PREFIX}.g_proj.weight", "values hidden"),
    Row(f"{_LINEAR_ATTENTION_PREFIX}.o_proj.weight", "hidden values"),
    Row(f"{_LINEAR_ATTENTION_PREFIX}.q_conv1d.weight", "keys 1 window"),
    Row(f"{_LINEAR_ATTENTION_PREFIX}.k_conv1d.weight", "keys 1 window"),
    Row(f"{_LINEAR_ATTENTION_PREFIX}.v_conv1d.weight", "values 1 window"),
    Row(f"{_LINEAR_ATTENTION_PREFIX}.o_norm.weight", "value_head"),
)
_ATTENTION_ROWS: Final = (*(row for row in QKVO if not row.buffer), *ALL_HEAD_NORMS)
_NORM_ROWS: Final = (
    Row(f"{LAYER}.input_layernorm.weight", "hidden", when="!attention"),
    Row(f"{LAYER}.post_attention_layernorm.weight", "hidden"),
    Row(f"{LAYER}.post_feedforward_layernorm.weight", "hidden", when="attention"),
)


def _build_facts(config: ModelConfig) -> ModelDims:
    bias, heads = config.read_flag("attention_bias", default=False), config.size("num_attention_heads")
    facts = build_decoder_facts(config, qkv_bias=bias, o_bias=bias)
    keys = config.size("linear_num_key_heads", heads)
    head = config.size("linear_key_head_dim", int(0.75 * facts.size("hidden") / keys))
    sizes = {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": config.size("linear_num_value_heads", heads),
        "linear_key_head_dim": head,
        "linear_value_head_dim": config.size("linear_value_head_dim", 2 * head),
    }
    q, kv = facts.size("q"), facts.size("kv")
    facts = facts.extend_dims(dims={"all_q": LogicalDim(q), "all_kv": LogicalDim(kv)})
    found = add_delta_facts(facts, replace(config, values={**config.values, **sizes}))
    found = found.extend_dims(flags={"doubled": config.read_flag("linear_allow_neg_eigval", default=True)})
    last = frozenset({config.size("num_hidden_layers") - 1})
    return (
        found
        if config.values.get("layer_types") or found.flags["attention"]
        else found.extend_dims(flags={"attention": last})
    )


OLMO_HYBRID: Final = Family(
    name="olmo_hybrid",
    rows=(
        *EMBEDDING,
        *add_condition(_ATTENTION_ROWS, "attention"),
        *(row for row in GATED if not row.when),
        *_NORM_ROWS,
        *add_condition(_LINEAR_ATTENTION_ROWS, "!attention"),
        *LAST_NORM,
        *HEADS,
    ),
    facts=_build_facts,
    classes={"OlmoHybridForCausalLM": ModelClass("model", "lm"), "OlmoHybridModel": ModelClass()},
    prefixes=("model",),
    legacy={"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"},
    fused=(
        FusedArray(
            f"{_LINEAR_ATTENTION_PREFIX}.conv1d.weight",
            tuple(f"{_LINEAR_ATTENTION_PREFIX}.{one}_conv1d.weight" for one in "qkv"),
        ),
    ),
    traits=LayerFeatures(
        activation=("hidden_act", "silu"),
        norm="rms32",
        further=(FurtherTensor("strengths before they are doubled", dims="value_heads", when="!attention doubled"),),
    ),
    assumed=assume_sizes(100352, 3840, 11008, 32, 30),
)
