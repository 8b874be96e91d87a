"""Describes RoBERTa and XLM-RoBERTa with norms before attention and MLP, and one after the last layer.

Names and shapes follow transformers 5 (`models/roberta_prelayernorm/modeling_roberta_prelayernorm.py`,
`models/xlm_roberta_xl/modeling_xlm_roberta_xl.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.models.families.bert import (
    BLOCK,
    BLOCK_ATTENTION,
    BLOCK_INPUT,
    BLOCK_OUTPUT,
    ENCODER_TRAITS,
    POOLER,
    build_encoder_facts,
    build_norm_rows,
)
from shardctl.models.families.roberta import ROBERTA, ROBERTA_HEADS, build_roberta_classes
from shardctl.models.tables.decoder import assume_sizes
from shardctl.models.tables.family import Row

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_WORD_EMBEDDING_ROWS: Final = (
    Row(".embeddings.word_embeddings.weight", "vocab hidden", on="first"),
    Row(".embeddings.token_type_embeddings.weight", "types hidden", on="first"),
)
_POSITION_EMBEDDING_ROWS: Final = (Row(".embeddings.position_embeddings.weight", "positions hidden", on="first"),)
_ROBERTA_PRELAYERNORM_ROWS: Final = (
    *_WORD_EMBEDDING_ROWS,
    *build_norm_rows(".embeddings.LayerNorm", "first"),
    *_POSITION_EMBEDDING_ROWS,
    *BLOCK_ATTENTION,
    *build_norm_rows(f"{BLOCK}.attention.LayerNorm"),
    *build_norm_rows(f"{BLOCK}.intermediate.LayerNorm"),
    *BLOCK_INPUT,
    *BLOCK_OUTPUT,
    *build_norm_rows(".LayerNorm", "last"),
    *POOLER,
    *ROBERTA_HEADS,
)
_XLM_ROBERTA_XL_ROWS: Final = (
    *_WORD_EMBEDDING_ROWS,
    *_POSITION_EMBEDDING_ROWS,
    *BLOCK_ATTENTION,
    *build_norm_rows(f"{BLOCK}.attention.self_attn_layer_norm"),
    *BLOCK_INPUT,
    *BLOCK_OUTPUT,
    *build_norm_rows(f"{BLOCK}.LayerNorm"),
    *build_norm_rows(".encoder.LayerNorm", "last"),
    *POOLER,
    *ROBERTA_HEADS,
)


def _build_large_facts(config: ModelConfig) -> ModelDims:
    return build_encoder_facts(config.over({"max_position_embeddings": 514, "type_vocab_size": 1}))


ROBERTA_PRELAYERNORM: Final = replace(
    ROBERTA,
    name="roberta-prelayernorm",
    rows=_ROBERTA_PRELAYERNORM_ROWS,
    classes=build_roberta_classes("RobertaPreLayerNorm", "roberta_prelayernorm"),
    prefixes=("roberta_prelayernorm",),
)
XLM_ROBERTA_XL: Final = replace(
    ROBERTA,
    name="xlm-roberta-xl",
    rows=_XLM_ROBERTA_XL_ROWS,
    facts=_build_large_facts,
    traits=replace(ENCODER_TRAITS, undropped="mlp"),
    classes=build_roberta_classes("XLMRobertaXL"),
    assumed=assume_sizes(250880, 2560, 10240, 36, 32),
)
