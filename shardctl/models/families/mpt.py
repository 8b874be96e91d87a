"""Describes MPT: q, k and v fused one after the other, positions from ALiBi, and no biases.

Names and shapes follow transformers 5 (`models/mpt/modeling_mpt.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import build_decoder_classes, build_head_rows
from shardctl.models.tables.family import Family, LogicalDim, ModelDims, Row, RowIndex
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig

_BLOCK_PREFIX: Final = ".blocks.{layer}"
_MPT_ROWS: Final = (
    Row(".wte.weight", "vocab hidden", on="first"),
    Row(f"{_BLOCK_PREFIX}.norm_1.weight", "hidden"),
    Row(f"{_BLOCK_PREFIX}.attn.Wqkv.weight", "q+q+q hidden"),
    Row(f"{_BLOCK_PREFIX}.attn.out_proj.weight", "hidden q"),
    Row(f"{_BLOCK_PREFIX}.norm_2.weight", "hidden"),
    Row(f"{_BLOCK_PREFIX}.ffn.up_proj.weight", "ffn hidden"),
    Row(f"{_BLOCK_PREFIX}.ffn.down_proj.weight", "hidden ffn"),
    Row(".norm_f.weight", "hidden", on="last"),
    *build_head_rows(".wte.weight"),
)


def _build_facts(config: ModelConfig) -> ModelDims:
    hidden, head = config.size("d_model"), config.divided("d_model", "n_heads")
    return ModelDims(
        dims={
            "vocab": LogicalDim(config.size("vocab_size"), axis="tp", even=False),
            "hidden": LogicalDim(hidden),
            "q": LogicalDim(hidden, head, "tp", noun="attention heads"),
            "ffn": LogicalDim(4 * hidden, axis="tp"),
            "labels": LogicalDim(config.labels(), loose=True),
        },
        indices={"layer": RowIndex(range(config.size("n_layers")), layer=0)},
        flags={"tied": config.read_flag("tie_word_embeddings", default=True)},
    )


MPT: Final = Family(
    name="mpt",
    rows=_MPT_ROWS,
    facts=_build_facts,
    classes=build_decoder_classes("Mpt", prefix="transformer", tokens="classifier"),
    prefixes=("transformer",),
    renamed={"MPTForCausalLM": "MptForCausalLM"},
    traits=LayerFeatures(activation=("", "gelu"), norm="layer", dropout=("resid_pdrop", 0.0), unfused=True),
    aliases={"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"},
    assumed={"vocab_size": 50368, "d_model": 2048, "n_heads": 16, "n_layers": 24},
)
