"""Describes RoBERTa, XLM-RoBERTa and CamemBERT: BERT's blocks, with heads of their own for words and for sentences."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.models.families.bert import ENCODER, ENCODER_TRAITS, build_encoder_facts
from shardctl.models.tables.decoder import assume_sizes
from shardctl.models.tables.family import Family, ModelClass, Row

if TYPE_CHECKING:
    from collections.abc import Mapping

ROBERTA_HEADS: Final = (
    Row("lm_head.bias", "vocab", when="mlm", on="last"),
    Row("lm_head.dense.weight", "hidden hidden", when="mlm", on="last"),
    Row("lm_head.dense.bias", "hidden", when="mlm", on="last"),
    Row("lm_head.layer_norm.weight", "hidden", when="mlm", on="last"),
    Row("lm_head.layer_norm.bias", "hidden", when="mlm", on="last"),
    Row("lm_head.decoder.weight", "vocab hidden", when="mlm", on="last", tie=".embeddings.word_embeddings.weight"),
    Row("lm_head.decoder.bias", "vocab", when="mlm", on="last", tie="lm_head.bias"),
    Row("classifier.dense.weight", "hidden hidden", when="sentence", on="last"),
    Row("classifier.dense.bias", "hidden", when="sentence", on="last"),
    Row("classifier.out_proj.weight", "labels hidden", when="sentence", on="last"),
    Row("classifier.out_proj.bias", "labels", when="sentence", on="last"),
    Row("classifier.weight", "labels hidden", when="classifier", on="last"),
    Row("classifier.bias", "labels", when="classifier", on="last"),
    Row("qa_outputs.weight", "2 hidden", when="question", on="last"),
    Row("qa_outputs.bias", "2", when="question", on="last"),
)
"""What the classes have after the base model."""
_ROBERTA_ROWS: Final = (
    Row(".embeddings.position_ids", "1 *", on="first", buffer="I64"),
    Row(".embeddings.word_embeddings.weight", "vocab hidden", on="first"),
    Row(".embeddings.token_type_embeddings.weight", "types hidden", on="first"),
    Row(".embeddings.LayerNorm.weight", "hidden", on="first"),
    Row(".embeddings.LayerNorm.bias", "hidden", on="first"),
    Row(".embeddings.position_embeddings.weight", "positions hidden", on="first"),
    *ENCODER,
    *ROBERTA_HEADS,
)


def build_roberta_classes(stem: str, prefix: str = "roberta", *, causal: bool = True) -> Mapping[str, ModelClass]:
    """Build the classes with these heads, whose base model is called `prefix`; `causal` says if one generates."""
    classes = {
        f"{stem}Model": ModelClass("", "pooler?"),
        f"{stem}ForMaskedLM": ModelClass(prefix, "mlm"),
        f"{stem}ForCausalLM": ModelClass(prefix, "mlm"),
        f"{stem}ForSequenceClassification": ModelClass(prefix, "sentence"),
        f"{stem}ForMultipleChoice": ModelClass(prefix, "pooler classifier", labels=1),
        f"{stem}ForTokenClassification": ModelClass(prefix, "classifier"),
        f"{stem}ForQuestionAnswering": ModelClass(prefix, "question"),
    }
    if not causal:
        del classes[f"{stem}ForCausalLM"]
    return classes


ROBERTA: Final = Family(
    name="roberta",
    rows=_ROBERTA_ROWS,
    facts=build_encoder_facts,
    classes=build_roberta_classes("Roberta"),
    prefixes=("roberta",),
    traits=ENCODER_TRAITS,
    assumed=assume_sizes(50265, 768, 3072, 12, 12),
)
XLM_ROBERTA: Final = Family(
    name="xlm-roberta",
    rows=_ROBERTA_ROWS,
    facts=build_encoder_facts,
    classes=build_roberta_classes("XLMRoberta"),
    prefixes=("roberta",),
    traits=ENCODER_TRAITS,
    assumed=assume_sizes(30522, 768, 3072, 12, 12),
)
CAMEMBERT: Final = replace(XLM_ROBERTA, name="camembert", classes=build_roberta_classes("Camembert"))
