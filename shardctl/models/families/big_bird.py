"""Describes BigBird: BERT with sparse attention, without biases if the config says so, and heads of its own.

Names and shapes follow transformers 5 (`models/big_bird/modeling_big_bird.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.models.families.bert import (
    BERT,
    ENCODER,
    ENCODER_TRAITS,
    POOLER,
    WORD_HEADS,
    build_encoder_facts,
    build_norm_rows,
)
from shardctl.models.families.roberta import ROBERTA_HEADS
from shardctl.models.tables.decoder import assume_sizes
from shardctl.models.tables.family import Family, ModelClass, Row

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_QKV_BIAS_SUFFIXES: Final = (".self.query.bias", ".self.key.bias", ".self.value.bias")
_BIG_BIRD: Final = (
    Row(".embeddings.word_embeddings.weight", "vocab hidden", on="first"),
    Row(".embeddings.position_embeddings.weight", "positions hidden", on="first"),
    Row(".embeddings.token_type_embeddings.weight", "types hidden", on="first"),
    *build_norm_rows(".embeddings.LayerNorm", "first"),
    *(replace(row, when="biased") if row.name.endswith(_QKV_BIAS_SUFFIXES) else row for row in ENCODER[: -len(POOLER)]),
    *(replace(row, name=row.name.replace(".dense", "")) for row in POOLER),
    *WORD_HEADS,
    *(row for row in ROBERTA_HEADS if row.name.startswith("classifier.")),
    Row("qa_classifier.intermediate.dense.weight", "ffn hidden", "question", on="last"),
    Row("qa_classifier.intermediate.dense.bias", "ffn", "question", on="last"),
    Row("qa_classifier.output.dense.weight", "hidden ffn", "question", on="last"),
    Row("qa_classifier.output.dense.bias", "hidden", "question", on="last"),
    *build_norm_rows("qa_classifier.output.LayerNorm", "last", "question"),
    Row("qa_classifier.qa_outputs.weight", "labels hidden", "question", on="last"),
    Row("qa_classifier.qa_outputs.bias", "labels", "question", on="last"),
)


def _build_facts(config: ModelConfig) -> ModelDims:
    facts = build_encoder_facts(config.over({"max_position_embeddings": 4096}))
    return facts.extend_dims(flags={"biased": config.read_flag("use_bias", default=True)})


BIG_BIRD: Final = Family(
    name="big_bird",
    rows=_BIG_BIRD,
    facts=_build_facts,
    classes={
        "BigBirdModel": ModelClass("", "pooler?"),
        "BigBirdForPreTraining": ModelClass("bert", "pooler mlm nsp"),
        "BigBirdForMaskedLM": ModelClass("bert", "pooler mlm"),
        "BigBirdForCausalLM": ModelClass("bert", "pooler mlm"),
        "BigBirdForSequenceClassification": ModelClass("bert", "pooler sentence"),
        "BigBirdForMultipleChoice": ModelClass("bert", "pooler classifier", labels=1),
        "BigBirdForTokenClassification": ModelClass("bert", "pooler classifier"),
        "BigBirdForQuestionAnswering": ModelClass("bert", "question"),
    },
    prefixes=BERT.prefixes,
    traits=replace(
        ENCODER_TRAITS, activation=("hidden_act", "gelu_new"), unfused=True, unmodelled="sparse blocks of attention"
    ),
    assumed=assume_sizes(50358, 768, 3072, 12, 12),
)
