"""Describes ALBERT: BERT's blocks in groups, each of which runs several times, and an embedding narrower than they are.

Names and shapes follow transformers 5 (`models/albert/modeling_albert.py`). A group is what a stage has whole: the
layers that run it follow each other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.models.families.bert import ENCODER_TRAITS, build_encoder_facts, build_norm_rows
from shardctl.models.tables.decoder import assume_sizes
from shardctl.models.tables.family import Family, LogicalDim, ModelClass, Row, RowIndex

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_WORD_EMBEDDING_NAME: Final = ".embeddings.word_embeddings.weight"
_BLOCK_PREFIX: Final = ".encoder.albert_layer_groups.{layer}.albert_layers.{inner}"
_ALBERT_ROWS: Final = (
    Row(".embeddings.position_ids", "1 *", on="first", buffer="I64"),
    Row(_WORD_EMBEDDING_NAME, "vocab embedding", on="first"),
    Row(".embeddings.position_embeddings.weight", "positions embedding", on="first"),
    Row(".embeddings.token_type_embeddings.weight", "types embedding", on="first"),
    Row(".embeddings.LayerNorm.weight", "embedding", on="first"),
    Row(".embeddings.LayerNorm.bias", "embedding", on="first"),
    Row(".encoder.embedding_hidden_mapping_in.weight", "hidden embedding", on="first"),
    Row(".encoder.embedding_hidden_mapping_in.bias", "hidden", on="first"),
    *build_norm_rows(f"{_BLOCK_PREFIX}.full_layer_layer_norm"),
    Row(f"{_BLOCK_PREFIX}.attention.query.weight", "q hidden"),
    Row(f"{_BLOCK_PREFIX}.attention.query.bias", "q"),
    Row(f"{_BLOCK_PREFIX}.attention.key.weight", "q hidden"),
    Row(f"{_BLOCK_PREFIX}.attention.key.bias", "q"),
    Row(f"{_BLOCK_PREFIX}.attention.value.weight", "q hidden"),
    Row(f"{_BLOCK_PREFIX}.attention.value.bias", "q"),
    Row(f"{_BLOCK_PREFIX}.attention.dense.weight", "hidden q"),
    Row(f"{_BLOCK_PREFIX}.attention.dense.bias", "hidden"),
    *build_norm_rows(f"{_BLOCK_PREFIX}.attention.LayerNorm"),
    Row(f"{_BLOCK_PREFIX}.ffn.weight", "ffn hidden"),
    Row(f"{_BLOCK_PREFIX}.ffn.bias", "ffn"),
    Row(f"{_BLOCK_PREFIX}.ffn_output.weight", "hidden ffn"),
    Row(f"{_BLOCK_PREFIX}.ffn_output.bias", "hidden"),
    Row(".pooler.weight", "hidden hidden", "pooler", on="last"),
    Row(".pooler.bias", "hidden", "pooler", on="last"),
    Row("predictions.bias", "vocab", "mlm", on="last"),
    Row("predictions.LayerNorm.weight", "embedding", "mlm", on="last"),
    Row("predictions.LayerNorm.bias", "embedding", "mlm", on="last"),
    Row("predictions.dense.weight", "embedding hidden", "mlm", on="last"),
    Row("predictions.dense.bias", "embedding", "mlm", on="last"),
    Row("predictions.decoder.weight", "vocab embedding", "mlm", on="last", tie=_WORD_EMBEDDING_NAME),
    Row("predictions.decoder.bias", "vocab", "mlm", on="last", tie="predictions.bias"),
    Row("sop_classifier.classifier.weight", "labels hidden", "order", on="last"),
    Row("sop_classifier.classifier.bias", "labels", "order", on="last"),
    Row("classifier.weight", "labels hidden", "classifier", on="last"),
    Row("classifier.bias", "labels", "classifier", on="last"),
    Row("qa_outputs.weight", "labels hidden", "question", on="last"),
    Row("qa_outputs.bias", "labels", "question", on="last"),
)


def _build_facts(config: ModelConfig) -> ModelDims:
    groups = config.size("num_hidden_groups", 1)
    runs, rest = divmod(config.size("num_hidden_layers", 12), groups)
    return build_encoder_facts(config).extend_dims(
        # Where groups run differently often, each is counted as often as one of them does.
        dims={"embedding": LogicalDim(config.size("embedding_size", 128)), "runs": LogicalDim(runs + bool(rest))},
        indices={
            "layer": RowIndex(range(groups), layer=0),
            "inner": RowIndex(range(config.size("inner_group_num", 1))),
        },
    )


ALBERT: Final = Family(
    name="albert",
    rows=_ALBERT_ROWS,
    facts=_build_facts,
    classes={
        "AlbertModel": ModelClass("", "pooler?"),
        "AlbertForPreTraining": ModelClass("albert", "pooler mlm order"),
        "AlbertForMaskedLM": ModelClass("albert", "mlm"),
        "AlbertForSequenceClassification": ModelClass("albert", "pooler classifier"),
        "AlbertForMultipleChoice": ModelClass("albert", "pooler classifier", labels=1),
        "AlbertForTokenClassification": ModelClass("albert", "classifier"),
        "AlbertForQuestionAnswering": ModelClass("albert", "question"),
    },
    prefixes=("albert",),
    traits=replace(
        ENCODER_TRAITS,
        activation=("hidden_act", "gelu_new"),
        dropout=("hidden_dropout_prob", 0.0),
        attention_dropout=("attention_probs_dropout_prob", 0.0),
    ),
    assumed=assume_sizes(30000, 4096, 16384, 12, 64),
)
