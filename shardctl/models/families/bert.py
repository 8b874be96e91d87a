"""Describes BERT, and the encoder table that its descendants share.

Names and shapes follow transformers 5 (`models/bert/modeling_bert.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import assume_sizes
from shardctl.models.tables.family import Family, LogicalDim, ModelClass, ModelDims, Row, RowIndex
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig

BLOCK: Final = ".encoder.layer.{layer}"
BLOCK_ATTENTION: Final = (
    Row(f"{BLOCK}.attention.self.query.weight", "q hidden"),
    Row(f"{BLOCK}.attention.self.query.bias", "q"),
    Row(f"{BLOCK}.attention.self.key.weight", "q hidden"),
    Row(f"{BLOCK}.attention.self.key.bias", "q"),
    Row(f"{BLOCK}.attention.self.value.weight", "q hidden"),
    Row(f"{BLOCK}.attention.self.value.bias", "q"),
    Row(f"{BLOCK}.attention.output.dense.weight", "hidden q"),
    Row(f"{BLOCK}.attention.output.dense.bias", "hidden"),
)
BLOCK_INPUT: Final = (
    Row(f"{BLOCK}.intermediate.dense.weight", "ffn hidden"),
    Row(f"{BLOCK}.intermediate.dense.bias", "ffn"),
)
BLOCK_OUTPUT: Final = (
    Row(f"{BLOCK}.output.dense.weight", "hidden ffn"),
    Row(f"{BLOCK}.output.dense.bias", "hidden"),
)
POOLER: Final = (
    Row(".pooler.dense.weight", "hidden hidden", when="pooler", on="last"),
    Row(".pooler.dense.bias", "hidden", when="pooler", on="last"),
)


def build_norm_rows(name: str, on: str = "", when: str = "") -> tuple[Row, ...]:
    """Build a norm's weight and bias, of the hidden size."""
    return (Row(f"{name}.weight", "hidden", when, on), Row(f"{name}.bias", "hidden", when, on))


ENCODER: Final = (
    *BLOCK_ATTENTION,
    *build_norm_rows(f"{BLOCK}.attention.output.LayerNorm"),
    *BLOCK_INPUT,
    *BLOCK_OUTPUT,
    *build_norm_rows(f"{BLOCK}.output.LayerNorm"),
    *POOLER,
)
"""The blocks and the pooler; the embeddings before and the heads after them differ between the families."""

WORD_HEADS: Final = (
    Row("cls.predictions.bias", "vocab", when="mlm", on="last"),
    Row("cls.predictions.transform.dense.weight", "hidden hidden", when="mlm", on="last"),
    Row("cls.predictions.transform.dense.bias", "hidden", when="mlm", on="last"),
    Row("cls.predictions.transform.LayerNorm.weight", "hidden", when="mlm", on="last"),
    Row("cls.predictions.transform.LayerNorm.bias", "hidden", when="mlm", on="last"),
    Row(
        "cls.predictions.decoder.weight",
        "vocab hidden",
        when="mlm",
        on="last",
        tie=".embeddings.word_embeddings.weight",
    ),
    Row("cls.predictions.decoder.bias", "vocab", when="mlm", on="last", tie="cls.predictions.bias"),
    Row("cls.seq_relationship.weight", "2 hidden", when="nsp", on="last"),
    Row("cls.seq_relationship.bias", "2", when="nsp", on="last"),
)
"""What predicts words, and whether one sentence follows another."""
_BERT_ROWS: Final = (
    Row(".embeddings.position_ids", "1 *", on="first", buffer="I64"),
    Row(".embeddings.word_embeddings.weight", "vocab hidden", on="first"),
    Row(".embeddings.position_embeddings.weight", "positions hidden", on="first"),
    Row(".embeddings.token_type_embeddings.weight", "types hidden", on="first"),
    Row(".embeddings.LayerNorm.weight", "hidden", on="first"),
    Row(".embeddings.LayerNorm.bias", "hidden", on="first"),
    *ENCODER,
    *WORD_HEADS,
    Row("classifier.weight", "labels hidden", when="classifier", on="last"),
    Row("classifier.bias", "labels", when="classifier", on="last"),
    Row("qa_outputs.weight", "2 hidden", when="question", on="last"),
    Row("qa_outputs.bias", "2", when="question", on="last"),
)


def build_encoder_facts(config: ModelConfig) -> ModelDims:
    """Build what the tables of BERT and its descendants need to know."""
    hidden = config.size("hidden_size")
    head = config.divided("hidden_size", "num_attention_heads")
    return ModelDims(
        dims={
            "vocab": LogicalDim(config.size("vocab_size"), axis="tp", even=False),
            "positions": LogicalDim(config.size("max_position_embeddings", 512)),
            "types": LogicalDim(config.count("type_vocab_size", 2)),
            "hidden": LogicalDim(hidden),
            "q": LogicalDim(hidden, head, "tp", noun="attention heads"),
            "ffn": LogicalDim(config.size("intermediate_size"), axis="tp"),
            "labels": LogicalDim(config.labels(), loose=True),
        },
        indices={"layer": RowIndex(range(config.size("num_hidden_layers")), layer=0)},
        flags={"tied": config.read_flag("tie_word_embeddings", default=True)},
    )


ENCODER_TRAITS: Final = LayerFeatures(
    activation=("hidden_act", "gelu"),
    dropout=("hidden_dropout_prob", 0.1),
    attention_dropout=("attention_probs_dropout_prob", 0.1),
    narrow_softmax=True,
)
BERT: Final = Family(
    name="bert",
    rows=_BERT_ROWS,
    facts=build_encoder_facts,
    classes={
        "BertModel": ModelClass("", "pooler?"),
        "BertForPreTraining": ModelClass("bert", "pooler mlm nsp"),
        "BertForMaskedLM": ModelClass("bert", "mlm"),
        "BertLMHeadModel": ModelClass("bert", "mlm"),
        "BertForNextSentencePrediction": ModelClass("bert", "pooler nsp"),
        "BertForSequenceClassification": ModelClass("bert", "pooler classifier"),
        "BertForMultipleChoice": ModelClass("bert", "pooler classifier", labels=1),
        "BertForTokenClassification": ModelClass("bert", "classifier"),
        "BertForQuestionAnswering": ModelClass("bert", "question"),
    },
    prefixes=("bert",),
    legacy={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    traits=ENCODER_TRAITS,
    assumed=assume_sizes(30522, 768, 3072, 12, 12),
)
