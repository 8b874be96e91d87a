"""Describes OPT: separate q, k and v, learned positions, and perhaps an embedding narrower than the layers.

Names and shapes follow transformers 5 (`models/opt/modeling_opt.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import build_decoder_classes
from shardctl.models.tables.family import Family, LogicalDim, ModelDims, Row, RowIndex
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig

_LAYER_PREFIX: Final = ".decoder.layers.{layer}"
_OPT_ROWS: Final = (
    Row(".decoder.embed_tokens.weight", "vocab embedding", on="first"),
    Row(".decoder.embed_positions.weight", "positions hidden", on="first"),
    Row(".decoder.project_out.weight", "embedding hidden", when="narrow", on="last"),
    Row(".decoder.project_in.weight", "hidden embedding", when="narrow", on="first"),
    Row(".decoder.final_layer_norm.weight", "hidden", when="affine last_norm", on="last"),
    Row(".decoder.final_layer_norm.bias", "hidden", when="affine last_norm", on="last"),
    Row(f"{_LAYER_PREFIX}.self_attn.k_proj.weight", "q hidden"),
    Row(f"{_LAYER_PREFIX}.self_attn.k_proj.bias", "q", when="bias"),
    Row(f"{_LAYER_PREFIX}.self_attn.v_proj.weight", "q hidden"),
    Row(f"{_LAYER_PREFIX}.self_attn.v_proj.bias", "q", when="bias"),
    Row(f"{_LAYER_PREFIX}.self_attn.q_proj.weight", "q hidden"),
    Row(f"{_LAYER_PREFIX}.self_attn.q_proj.bias", "q", when="bias"),
    Row(f"{_LAYER_PREFIX}.self_attn.out_proj.weight", "hidden q"),
    Row(f"{_LAYER_PREFIX}.self_attn.out_proj.bias", "hidden", when="bias"),
    Row(f"{_LAYER_PREFIX}.self_attn_layer_norm.weight", "hidden", when="affine"),
    Row(f"{_LAYER_PREFIX}.self_attn_layer_norm.bias", "hidden", when="affine"),
    Row(f"{_LAYER_PREFIX}.fc1.weight", "ffn hidden"),
    Row(f"{_LAYER_PREFIX}.fc1.bias", "ffn", when="bias"),
    Row(f"{_LAYER_PREFIX}.fc2.weight", "hidden ffn"),
    Row(f"{_LAYER_PREFIX}.fc2.bias", "hidden", when="bias"),
    Row(f"{_LAYER_PREFIX}.final_layer_norm.weight", "hidden", when="affine"),
    Row(f"{_LAYER_PREFIX}.final_layer_norm.bias", "hidden", when="affine"),
    Row("lm_head.weight", "vocab embedding", when="lm", on="last", tie=".decoder.embed_tokens.weight"),
    Row("score.weight", "labels embedding", when="score", on="last"),
    Row("qa_outputs.weight", "2 embedding", when="question", on="last"),
    Row("qa_outputs.bias", "2", when="question", on="last"),
)
_POSITION_EMBEDDING_OFFSET: Final = 2
"""Rows of the positions before the first (`OPTLearnedPositionalEmbedding`)."""


def _build_facts(config: ModelConfig) -> ModelDims:
    hidden = config.size("hidden_size")
    embedding = config.size("word_embed_proj_dim", hidden)
    bare = config.read_flag("_remove_final_layer_norm", default=False)
    return ModelDims(
        dims={
            "vocab": LogicalDim(config.size("vocab_size"), axis="tp", even=False),
            "embedding": LogicalDim(embedding),
            "positions": LogicalDim(config.size("max_position_embeddings", 2048) + _POSITION_EMBEDDING_OFFSET),
            "hidden": LogicalDim(hidden),
            "q": LogicalDim(hidden, config.divided("hidden_size", "num_attention_heads"), "tp", noun="attention heads"),
            "ffn": LogicalDim(config.size("ffn_dim"), axis="tp"),
            "labels": LogicalDim(config.labels(), loose=True),
        },
        indices={"layer": RowIndex(range(config.size("num_hidden_layers")), layer=0)},
        flags={
            "tied": config.read_flag("tie_word_embeddings", default=True),
            "bias": config.read_flag("enable_bias", default=True),
            "affine": config.read_flag("layer_norm_elementwise_affine", default=True),
            "last_norm": config.read_flag("do_layer_norm_before", default=True) and not bare,
            "narrow": embedding != hidden,
        },
    )


OPT: Final = Family(
    name="opt",
    rows=_OPT_ROWS,
    facts=_build_facts,
    classes=build_decoder_classes("OPT", tokens=None),
    prefixes=("model",),
    traits=LayerFeatures(activation=("activation_function", "relu"), norm="layer", dropout=("dropout", 0.1)),
    weightless=(
        Row(f"{_LAYER_PREFIX}.self_attn_layer_norm.weight", "hidden", when="!affine"),
        Row(f"{_LAYER_PREFIX}.final_layer_norm.weight", "hidden", when="!affine"),
    ),
    assumed={
        "num_attention_heads": 12,
        "vocab_size": 50272,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "ffn_dim": 3072,
    },
)
