"""Describes BLOOM: q, k and v interleaved head by head, positions from ALiBi.

Names and shapes follow transformers 5 (`models/bloom/modeling_bloom.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import build_decoder_classes, build_head_rows
from shardctl.models.tables.family import Family, LogicalDim, ModelDims, Row, RowIndex
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig

_BLOOM_ROWS: Final = (
    Row(".word_embeddings.weight", "vocab hidden", on="first"),
    Row(".word_embeddings_layernorm.weight", "hidden", on="first"),
    Row(".word_embeddings_layernorm.bias", "hidden", on="first"),
    Row(".h.{layer}.input_layernorm.weight", "hidden"),
    Row(".h.{layer}.input_layernorm.bias", "hidden"),
    Row(".h.{layer}.self_attention.query_key_value.weight", "qkv hidden"),
    Row(".h.{layer}.self_attention.query_key_value.bias", "qkv"),
    Row(".h.{layer}.self_attention.dense.weight", "hidden q"),
    Row(".h.{layer}.self_attention.dense.bias", "hidden"),
    Row(".h.{layer}.post_attention_layernorm.weight", "hidden"),
    Row(".h.{layer}.post_attention_layernorm.bias", "hidden"),
    Row(".h.{layer}.mlp.dense_h_to_4h.weight", "ffn hidden"),
    Row(".h.{layer}.mlp.dense_h_to_4h.bias", "ffn"),
    Row(".h.{layer}.mlp.dense_4h_to_h.weight", "hidden ffn"),
    Row(".h.{layer}.mlp.dense_4h_to_h.bias", "hidden"),
    Row(".ln_f.weight", "hidden", on="last"),
    Row(".ln_f.bias", "hidden", on="last"),
    *build_head_rows(".word_embeddings.weight"),
)
_CONFIG_KEY_ALIASES: Final = {"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
"""Keys of the configs, and what else they are called."""


def _build_facts(config: ModelConfig) -> ModelDims:
    hidden, head = config.size("hidden_size"), config.divided("hidden_size", "n_head")
    return ModelDims(
        dims={
            "vocab": LogicalDim(config.size("vocab_size"), axis="tp", even=False),
            "hidden": LogicalDim(hidden),
            "q": LogicalDim(hidden, head, "tp", noun="attention heads"),
            # The q, k and v of one head lie together.
            "qkv": LogicalDim(3 * hidden, 3 * head, "tp", noun="attention heads"),
            "ffn": LogicalDim(4 * hidden, axis="tp"),
            "labels": LogicalDim(config.labels(), loose=True),
        },
        indices={"layer": RowIndex(range(config.size("n_layer")), layer=0)},
        flags={"tied": config.read_flag("tie_word_embeddings", default=True)},
    )


BLOOM: Final = Family(
    name="bloom",
    rows=_BLOOM_ROWS,
    facts=_build_facts,
    classes=build_decoder_classes("Bloom", prefix="transformer", tokens="classifier"),
    prefixes=("transformer",),
    traits=LayerFeatures(activation=("", "bloom_gelu"), dropout=("hidden_dropout", 0.0), unfused=True),
    aliases=_CONFIG_KEY_ALIASES,
    assumed={"vocab_size": 250880, "hidden_size": 64, "n_head": 8, "n_layer": 2},
)
