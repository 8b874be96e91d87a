"""Describes gpt-oss: transposed experts with alternating gate and up columns, in bf16 or MXFP4, and sinks.

Names and shapes follow the Hub (`models/gpt_oss/modeling_gpt_oss.py`; the blocks in `integrations/mxfp4.py`): a block
is 32 elements of one row along the summed dim, 16 bytes, with one byte of scale. Where blocks do not divide evenly,
each rank has the ceil of its share and the last one fewer, as in vLLM (`vllm/model_executor/models/gpt_oss.py`,
`per_rank_intermediate_size_block`); gate and up columns follow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

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
from shardctl.models.tables.experts import add_expert_facts, count_experts
from shardctl.models.tables.family import Family, LogicalDim, ModelClass, Row
from shardctl.models.tables.layer_features import LayerFeatures
from shardctl.models.tables.windows import WindowRule

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_MXFP4_BLOCK_COLUMNS: Final = 32
_EXPERTS_PREFIX: Final = f"{LAYER}.mlp.experts"
_GPT_OSS: Final = (
    *EMBEDDING,
    Row(f"{LAYER}.self_attn.sinks", "q_heads"),
    *QKVO,
    Row(f"{LAYER}.mlp.router.weight", "experts hidden"),
    Row(f"{LAYER}.mlp.router.bias", "experts"),
    Row(f"{_EXPERTS_PREFIX}.gate_up_proj", "expert hidden pairs", when="!mxfp4"),
    Row(f"{_EXPERTS_PREFIX}.gate_up_proj_blocks", "expert pairs hidden_blocks 16", when="mxfp4", dtype="U8"),
    Row(f"{_EXPERTS_PREFIX}.gate_up_proj_scales", "expert pairs hidden_blocks", when="mxfp4", dtype="U8"),
    Row(f"{_EXPERTS_PREFIX}.gate_up_proj_bias", "expert pairs"),
    Row(f"{_EXPERTS_PREFIX}.down_proj", "expert effn hidden", when="!mxfp4"),
    Row(f"{_EXPERTS_PREFIX}.down_proj_blocks", "expert hidden blocks 16", when="mxfp4", dtype="U8"),
    Row(f"{_EXPERTS_PREFIX}.down_proj_scales", "expert hidden blocks", when="mxfp4", dtype="U8"),
    Row(f"{_EXPERTS_PREFIX}.down_proj_bias", "expert hidden"),
    *NORMS,
    *LAST_NORM,
    *HEADS,
)


def _build_facts(config: ModelConfig) -> ModelDims:
    bias, ffn = config.read_flag("attention_bias", default=True), config.size("intermediate_size")
    quantized = config.values.get("quantization_config")
    mxfp4 = isinstance(quantized, dict) and quantized.get("quant_method") == "mxfp4"
    noun = "pairs of gate and up columns of each expert"
    if mxfp4:
        noun = f"MXFP4 blocks of {_MXFP4_BLOCK_COLUMNS} columns of each expert"
    facts = build_decoder_facts(config, head_dim=64, kv_heads=8, qkv_bias=bias, o_bias=bias)
    return add_expert_facts(facts, count_experts(config, "num_local_experts"), ffn).extend_dims(
        dims={
            "q_heads": LogicalDim(config.size("num_attention_heads"), axis="tp", noun="attention heads"),
            "pairs": LogicalDim(2 * ffn, 2 * _MXFP4_BLOCK_COLUMNS if mxfp4 else 2, "etp", noun=noun, even=not mxfp4),
            "hidden_blocks": LogicalDim(config.size("hidden_size") // _MXFP4_BLOCK_COLUMNS),
            "blocks": LogicalDim(ffn // _MXFP4_BLOCK_COLUMNS, axis="etp", noun=noun, even=False),
        },
        flags={"mxfp4": mxfp4},
    )


GPT_OSS: Final = Family(
    name="gpt_oss",
    rows=_GPT_OSS,
    facts=_build_facts,
    classes={
        "GptOssForCausalLM": ModelClass("model", "lm"),
        "GptOssModel": ModelClass(),
        "GptOssForSequenceClassification": ModelClass("model", "score"),
        "GptOssForTokenClassification": ModelClass("model", "score score_bias"),
    },
    prefixes=("model",),
    traits=LayerFeatures(
        activation=("hidden_act", "silu"),
        norm="rms32",
        narrow_softmax=True,
        shifted_scores=True,
        joined_queries=True,
        expert_steps=3,
        window=WindowRule(128, "even"),
        experts_per_token=4,
        narrow_experts=True,
    ),
    aliases={"num_experts": "num_local_experts"},
    assumed={**assume_sizes(201088, 2880, 2880, 36, 64), "num_local_experts": 128},
)
