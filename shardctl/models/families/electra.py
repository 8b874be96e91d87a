"""Describes ELECTRA: BERT's blocks without a pooler, an embedding narrower than they are, and heads of its own.

Names and shapes follow transformers 5 (`models/electra/modeling_electra.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.families.bert import ENCODER, ENCODER_TRAITS, build_encoder_facts
from shardctl.models.tables.decoder import assume_sizes
from shardctl.models.tables.family import Family, LogicalDim, ModelClass, Row

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_WORD_EMBEDDING_NAME: Final = ".embeddings.word_embeddings.weight"
_ELECTRA_ROWS: Final = (
    Row(".embeddings.position_ids", "1 *", on="first", buffer="I64"),
    Row(_WORD_EMBEDDING_NAME, "vocab embedding", on="first"),
    Row(".embeddings.position_embeddings.weight", "positions embedding", on="first"),
    Row(".embeddings.token_type_embeddings.weight", "types embedding", on="first"),
    Row(".embeddings.LayerNorm.weight", "embedding", on="first"),
    Row(".embeddings.LayerNorm.bias", "embedding", on="first"),
    Row(".embeddings_project.weight", "hidden embedding", when="narrow", on="first"),
    Row(".embeddings_project.bias", "hidden", when="narrow", on="first"),
    *(row for row in ENCODER if row.when != "pooler"),
    Row("discriminator_predictions.dense.weight", "hidden hidden", when="discriminator", on="last"),
    Row("discriminator_predictions.dense.bias", "hidden", when="discriminator", on="last"),
    Row("discriminator_predictions.dense_prediction.weight", "1 hidden", when="discriminator", on="last"),
    Row("discriminator_predictions.dense_prediction.bias", "1", when="discriminator", on="last"),
    Row("generator_predictions.LayerNorm.weight", "embedding", when="mlm", on="last"),
    Row("generator_predictions.LayerNorm.bias", "embedding", when="mlm", on="last"),
    Row("generator_predictions.dense.weight", "embedding hidden", when="mlm", on="last"),
    Row("generator_predictions.dense.bias", "embedding", when="mlm", on="last"),
    Row("generator_lm_head.weight", "vocab embedding", when="mlm", on="last", tie=_WORD_EMBEDDING_NAME),
    Row("generator_lm_head.bias", "vocab", when="mlm", on="last"),
    Row("classifier.dense.weight", "hidden hidden", when="sentence", on="last"),
    Row("classifier.dense.bias", "hidden", when="sentence", on="last"),
    Row("classifier.out_proj.weight", "labels hidden", when="sentence", on="last"),
    Row("classifier.out_proj.bias", "labels", when="sentence", on="last"),
    Row("sequence_summary.summary.weight", "hidden hidden", when="choice summary", on="last"),
    Row("sequence_summary.summary.bias", "hidden", when="choice summary", on="last"),
    Row("classifier.weight", "labels hidden", when="classifier", on="last"),
    Row("classifier.bias", "labels", when="classifier", on="last"),
    Row("qa_outputs.weight", "labels hidden", when="question", on="last"),
    Row("qa_outputs.bias", "labels", when="question", on="last"),
)


def _build_facts(config: ModelConfig) -> ModelDims:
    width = config.size("embedding_size", 128)
    return build_encoder_facts(config).extend_dims(
        dims={"embedding": LogicalDim(width)},
        flags={
            "narrow": width != config.size("hidden_size"),
            "summary": config.read_flag("summary_use_proj", default=True),
        },
    )


ELECTRA: Final = Family(
    name="electra",
    rows=_ELECTRA_ROWS,
    facts=_build_facts,
    classes={
        "ElectraModel": ModelClass(),
        "ElectraForPreTraining": ModelClass("electra", "discriminator"),
        "ElectraForMaskedLM": ModelClass("electra", "mlm"),
        "ElectraForCausalLM": ModelClass("electra", "mlm"),
        "ElectraForSequenceClassification": ModelClass("electra", "sentence"),
        "ElectraForMultipleChoice": ModelClass("electra", "choice classifier", labels=1),
        "ElectraForTokenClassification": ModelClass("electra", "classifier"),
        "ElectraForQuestionAnswering": ModelClass("electra", "question"),
    },
    prefixes=("electra",),
    traits=ENCODER_TRAITS,
    assumed=assume_sizes(30522, 256, 1024, 12, 4),
)
