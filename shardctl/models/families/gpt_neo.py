"""Describes GPT-Neo: separate q, k and v without biases.

Names and shapes follow transformers 5 (`models/gpt_neo/modeling_gpt_neo.py`). Its local layers attend to a window, and
its cache keeps every token all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import build_decoder_classes, build_head_rows
from shardctl.models.tables.family import Family, LogicalDim, ModelDims, Row, RowIndex
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig

_BLOCK_PREFIX: Final = ".h.{layer}"
_ATTENTION_PREFIX: Final = f"{_BLOCK_PREFIX}.attn.attention"
_GPT_NEO_ROWS: Final = (
    Row(".wte.weight", "vocab hidden", on="first"),
    Row(".wpe.weight", "positions hidden", on="first"),
    Row(f"{_BLOCK_PREFIX}.ln_1.weight", "hidden"),
    Row(f"{_BLOCK_PREFIX}.ln_1.bias", "hidden"),
    Row(f"{_ATTENTION_PREFIX}.bias", "1 1 * *", buffer="BOOL"),
    Row(f"{_ATTENTION_PREFIX}.masked_bias", "", buffer="F32"),
    Row(f"{_ATTENTION_PREFIX}.k_proj.weight", "q hidden"),
    Row(f"{_ATTENTION_PREFIX}.v_proj.weight", "q hidden"),
    Row(f"{_ATTENTION_PREFIX}.q_proj.weight", "q hidden"),
    Row(f"{_ATTENTION_PREFIX}.out_proj.weight", "hidden q"),
    Row(f"{_ATTENTION_PREFIX}.out_proj.bias", "hidden"),
    Row(f"{_BLOCK_PREFIX}.ln_2.weight", "hidden"),
    Row(f"{_BLOCK_PREFIX}.ln_2.bias", "hidden"),
    Row(f"{_BLOCK_PREFIX}.mlp.c_fc.weight", "ffn hidden"),
    Row(f"{_BLOCK_PREFIX}.mlp.c_fc.bias", "ffn"),
    Row(f"{_BLOCK_PREFIX}.mlp.c_proj.weight", "hidden ffn"),
    Row(f"{_BLOCK_PREFIX}.mlp.c_proj.bias", "hidden"),
    Row(".ln_f.weight", "hidden", on="last"),
    Row(".ln_f.bias", "hidden", on="last"),
    *build_head_rows(".wte.weight"),
)


def _build_facts(config: ModelConfig) -> ModelDims:
    hidden, head = config.size("hidden_size"), config.divided("hidden_size", "num_heads")
    return ModelDims(
        dims={
            "vocab": LogicalDim(config.size("vocab_size"), axis="tp", even=False),
            "positions": LogicalDim(config.size("max_position_embeddings", 2048)),
            "hidden": LogicalDim(hidden),
            "q": LogicalDim(hidden, head, "tp", noun="attention heads"),
            "ffn": LogicalDim(config.size("intermediate_size", 4 * hidden), axis="tp"),
            "labels": LogicalDim(config.labels(), loose=True),
        },
        indices={"layer": RowIndex(range(config.size("num_layers")), layer=0)},
        flags={"tied": config.read_flag("tie_word_embeddings", default=True)},
    )


GPT_NEO: Final = Family(
    name="gpt_neo",
    rows=_GPT_NEO_ROWS,
    facts=_build_facts,
    classes=build_decoder_classes("GPTNeo", prefix="transformer", tokens="classifier"),
    prefixes=("transformer",),
    traits=LayerFeatures(
        activation=("activation_function", "gelu_new"), dropout=("resid_dropout", 0.0), fp32_scores=True
    ),
    aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
    assumed={"vocab_size": 50257, "hidden_size": 2048, "num_heads": 16, "num_layers": 24},
)
