"""Describes GPT-NeoX and Pythia: q, k and v interleaved head by head.

Names and shapes follow transformers 5 (`models/gpt_neox/modeling_gpt_neox.py`). The head is called as on the Hub, which
is what `save_pretrained` writes and all versions read; in the state dict it is `lm_head` (`conversion_mapping.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import build_decoder_classes, build_head_rows
from shardctl.models.tables.family import Family, FusedArray, LogicalDim, ModelDims, Row, RowIndex
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig

_LAYER_PREFIX: Final = ".layers.{layer}"
_HEAD_ROWS: Final = build_head_rows(".embed_in.weight")
_GPT_NEOX_ROWS: Final = (
    Row(".embed_in.weight", "vocab hidden", on="first"),
    Row(f"{_LAYER_PREFIX}.input_layernorm.weight", "hidden"),
    Row(f"{_LAYER_PREFIX}.input_layernorm.bias", "hidden"),
    Row(f"{_LAYER_PREFIX}.post_attention_layernorm.weight", "hidden"),
    Row(f"{_LAYER_PREFIX}.post_attention_layernorm.bias", "hidden"),
    Row(f"{_LAYER_PREFIX}.attention.bias", "1 1 * *", buffer="BOOL"),
    Row(f"{_LAYER_PREFIX}.attention.masked_bias", "", buffer="F32"),
    Row(f"{_LAYER_PREFIX}.attention.rotary_emb.inv_freq", "*", buffer="F32"),
    Row(f"{_LAYER_PREFIX}.attention.query_key_value.weight", "qkv hidden"),
    Row(f"{_LAYER_PREFIX}.attention.query_key_value.bias", "qkv", when="qkv_bias"),
    Row(f"{_LAYER_PREFIX}.attention.dense.weight", "hidden q"),
    Row(f"{_LAYER_PREFIX}.attention.dense.bias", "hidden", when="qkv_bias"),
    Row(f"{_LAYER_PREFIX}.mlp.dense_h_to_4h.weight", "ffn hidden"),
    Row(f"{_LAYER_PREFIX}.mlp.dense_h_to_4h.bias", "ffn"),
    Row(f"{_LAYER_PREFIX}.mlp.dense_4h_to_h.weight", "hidden ffn"),
    Row(f"{_LAYER_PREFIX}.mlp.dense_4h_to_h.bias", "hidden"),
    Row(".final_layer_norm.weight", "hidden", on="last"),
    Row(".final_layer_norm.bias", "hidden", on="last"),
    Row("embed_out.weight", "vocab hidden", when="lm !tied", on="last"),
    replace(_HEAD_ROWS[0], when="lm tied"),
    *_HEAD_ROWS[1:],
)


def _build_facts(config: ModelConfig) -> ModelDims:
    hidden = config.size("hidden_size")
    head = config.divided("hidden_size", "num_attention_heads")
    return ModelDims(
        dims={
            "vocab": LogicalDim(config.size("vocab_size"), axis="tp", even=False),
            "hidden": LogicalDim(hidden),
            "q": LogicalDim(hidden, head, "tp", noun="attention heads"),
            # The q, k and v of one head lie together.
            "qkv": LogicalDim(3 * hidden, 3 * head, "tp", noun="attention heads"),
            "ffn": LogicalDim(config.size("intermediate_size"), axis="tp"),
            "labels": LogicalDim(config.labels(), loose=True),
        },
        indices={"layer": RowIndex(range(config.size("num_hidden_layers")), layer=0)},
        flags={
            "tied": config.read_flag("tie_word_embeddings", default=False),
            "qkv_bias": config.read_flag("attention_bias", default=True),
        },
    )


GPT_NEOX: Final = Family(
    name="gpt_neox",
    rows=_GPT_NEOX_ROWS,
    facts=_build_facts,
    classes=build_decoder_classes("GPTNeoX", prefix="gpt_neox", tokens="classifier"),
    prefixes=("gpt_neox",),
    legacy={"embed_out": "lm_head"},
    fused=(FusedArray("lm_head.weight", ("embed_out.weight",)),),
    traits=LayerFeatures(
        activation=("hidden_act", "gelu"),
        dropout=("hidden_dropout", 0.0),
        side_by_side=("use_parallel_residual", True),
        rotated_product=True,
        joined_queries=True,
    ),
    assumed={
        "num_attention_heads": 64,
        "vocab_size": 50432,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_hidden_layers": 44,
    },
)
