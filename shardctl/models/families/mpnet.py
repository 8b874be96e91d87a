"""Describes MPNet: RoBERTa's kin, without token types, with biases of relative positions that all layers share.

Names and shapes follow transformers 5 (`models/mpnet/modeling_mpnet.py`). The biases are computed before the first
layer, whole on every rank, and handed on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.models.families.bert import (
    BLOCK,
    BLOCK_INPUT,
    BLOCK_OUTPUT,
    ENCODER_TRAITS,
    POOLER,
    build_encoder_facts,
    build_norm_rows,
)
from shardctl.models.families.roberta import ROBERTA_HEADS, build_roberta_classes
from shardctl.models.tables.decoder import assume_sizes
from shardctl.models.tables.family import Family, LogicalDim, Row

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_MPNET_ROWS: Final = (
    Row(".embeddings.position_ids", "1 *", on="first", buffer="I64"),
    Row(".embeddings.word_embeddings.weight", "vocab hidden", on="first"),
    Row(".embeddings.position_embeddings.weight", "positions hidden", on="first"),
    *build_norm_rows(".embeddings.LayerNorm", "first"),
    Row(f"{BLOCK}.attention.attn.q.weight", "q hidden"),
    Row(f"{BLOCK}.attention.attn.q.bias", "q"),
    Row(f"{BLOCK}.attention.attn.k.weight", "q hidden"),
    Row(f"{BLOCK}.attention.attn.k.bias", "q"),
    Row(f"{BLOCK}.attention.attn.v.weight", "q hidden"),
    Row(f"{BLOCK}.attention.attn.v.bias", "q"),
    Row(f"{BLOCK}.attention.attn.o.weight", "hidden q"),
    Row(f"{BLOCK}.attention.attn.o.bias", "hidden"),
    *build_norm_rows(f"{BLOCK}.attention.LayerNorm"),
    *BLOCK_INPUT,
    *BLOCK_OUTPUT,
    *build_norm_rows(f"{BLOCK}.output.LayerNorm"),
    Row(".encoder.relative_attention_bias.weight", "buckets heads", on="first"),
    *POOLER,
    *ROBERTA_HEADS,
)


def _build_facts(config: ModelConfig) -> ModelDims:
    return build_encoder_facts(config).extend_dims(
        dims={
            "heads": LogicalDim(config.size("num_attention_heads")),
            "buckets": LogicalDim(config.size("relative_attention_num_buckets", 32)),
        }
    )


MPNET: Final = Family(
    name="mpnet",
    rows=_MPNET_ROWS,
    facts=_build_facts,
    classes=build_roberta_classes("MPNet", "mpnet", causal=False),
    prefixes=("mpnet",),
    traits=replace(ENCODER_TRAITS, position_biases=True, unfused=True),
    assumed=assume_sizes(30527, 768, 3072, 12, 12),
)
