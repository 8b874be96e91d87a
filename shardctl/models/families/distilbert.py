"""Describes DistilBERT: BERT with names of its own, without token types and pooler.

Names and shapes follow transformers 5 (`models/distilbert/modeling_distilbert.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.tables.family import Family, LogicalDim, ModelClass, ModelDims, Row, RowIndex
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig

_LAYER_PREFIX: Final = ".transformer.layer.{layer}"
_WORD_EMBEDDING_NAME: Final = ".embeddings.word_embeddings.weight"
_DISTILBERT_ROWS: Final = (
    Row(_WORD_EMBEDDING_NAME, "vocab hidden", on="first"),
    Row(".embeddings.position_embeddings.weight", "positions hidden", on="first"),
    Row(".embeddings.LayerNorm.weight", "hidden", on="first"),
    Row(".embeddings.LayerNorm.bias", "hidden", on="first"),
    Row(f"{_LAYER_PREFIX}.attention.q_lin.weight", "q hidden"),
    Row(f"{_LAYER_PREFIX}.attention.q_lin.bias", "q"),
    Row(f"{_LAYER_PREFIX}.attention.k_lin.weight", "q hidden"),
    Row(f"{_LAYER_PREFIX}.attention.k_lin.bias", "q"),
    Row(f"{_LAYER_PREFIX}.attention.v_lin.weight", "q hidden"),
    Row(f"{_LAYER_PREFIX}.attention.v_lin.bias", "q"),
    Row(f"{_LAYER_PREFIX}.attention.out_lin.weight", "hidden q"),
    Row(f"{_LAYER_PREFIX}.attention.out_lin.bias", "hidden"),
    Row(f"{_LAYER_PREFIX}.sa_layer_norm.weight", "hidden"),
    Row(f"{_LAYER_PREFIX}.sa_layer_norm.bias", "hidden"),
    Row(f"{_LAYER_PREFIX}.ffn.lin1.weight", "ffn hidden"),
    Row(f"{_LAYER_PREFIX}.ffn.lin1.bias", "ffn"),
    Row(f"{_LAYER_PREFIX}.ffn.lin2.weight", "hidden ffn"),
    Row(f"{_LAYER_PREFIX}.ffn.lin2.bias", "hidden"),
    Row(f"{_LAYER_PREFIX}.output_layer_norm.weight", "hidden"),
    Row(f"{_LAYER_PREFIX}.output_layer_norm.bias", "hidden"),
    Row("vocab_transform.weight", "hidden hidden", "mlm", on="last"),
    Row("vocab_transform.bias", "hidden", "mlm", on="last"),
    Row("vocab_layer_norm.weight", "hidden", "mlm", on="last"),
    Row("vocab_layer_norm.bias", "hidden", "mlm", on="last"),
    Row("vocab_projector.weight", "vocab hidden", "mlm", on="last", tie=_WORD_EMBEDDING_NAME),
    Row("vocab_projector.bias", "vocab", "mlm", on="last"),
    Row("pre_classifier.weight", "hidden hidden", "sentence", on="last"),
    Row("pre_classifier.bias", "hidden", "sentence", on="last"),
    Row("classifier.weight", "labels hidden", "classifier", on="last"),
    Row("classifier.bias", "labels", "classifier", on="last"),
    Row("qa_outputs.weight", "2 hidden", "question", on="last"),
    Row("qa_outputs.bias", "2", "question", on="last"),
)
_CONFIG_KEY_ALIASES: Final = {"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
"""Keys of the configs, and what else they are called."""


def _build_facts(config: ModelConfig) -> ModelDims:
    hidden = config.size("dim")
    return ModelDims(
        dims={
            "vocab": LogicalDim(config.size("vocab_size"), axis="tp", even=False),
            "positions": LogicalDim(config.size("max_position_embeddings", 512)),
            "hidden": LogicalDim(hidden),
            "q": LogicalDim(hidden, config.divided("dim", "n_heads"), "tp", noun="attention heads"),
            "ffn": LogicalDim(config.size("hidden_dim"), axis="tp"),
            "labels": LogicalDim(config.labels(), loose=True),
        },
        indices={"layer": RowIndex(range(config.size("n_layers")), layer=0)},
        flags={"tied": config.read_flag("tie_word_embeddings", default=True)},
    )


DISTILBERT: Final = Family(
    name="distilbert",
    rows=_DISTILBERT_ROWS,
    facts=_build_facts,
    classes={
        "DistilBertModel": ModelClass(),
        "DistilBertForMaskedLM": ModelClass("distilbert", "mlm"),
        "DistilBertForSequenceClassification": ModelClass("distilbert", "sentence classifier"),
        "DistilBertForMultipleChoice": ModelClass("distilbert", "sentence classifier", labels=1),
        "DistilBertForTokenClassification": ModelClass("distilbert", "classifier"),
        "DistilBertForQuestionAnswering": ModelClass("distilbert", "question"),
    },
    prefixes=("distilbert",),
    traits=LayerFeatures(
        activation=("activation", "gelu"),
        dropout=("dropout", 0.1),
        attention_dropout=("attention_dropout", 0.1),
        undropped="attention",
        narrow_softmax=True,
    ),
    aliases=_CONFIG_KEY_ALIASES,
    assumed={"n_heads": 12, "vocab_size": 30522, "dim": 768, "hidden_dim": 3072, "n_layers": 6},
)
