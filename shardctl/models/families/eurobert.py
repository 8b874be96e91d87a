"""Describes EuroBERT: Llama's layers, in which tokens see each other both ways.

Names and shapes follow transformers 5 (`models/eurobert/modeling_eurobert.py`).
"""

from __future__ import annotations

from typing import Final

from shardctl.models.tables.decoder import EMBEDDING, GATED, LAST_NORM, NORMS, QKVO, assume_sizes, build_biased_facts
from shardctl.models.tables.family import Family, ModelClass, Row
from shardctl.models.tables.layer_features import LayerFeatures

_EUROBERT_ROWS: Final = (
    *EMBEDDING,
    *(row for row in QKVO if not row.buffer),
    *GATED,
    *NORMS,
    *LAST_NORM,
    Row("lm_head.weight", "vocab hidden", "mlm", on="last", tie=".embed_tokens.weight"),
    Row("lm_head.bias", "vocab", "mlm mlp_bias", on="last"),
    Row("dense.weight", "hidden hidden", "sentence", on="last"),
    Row("dense.bias", "hidden", "sentence", on="last"),
    Row("classifier.weight", "labels hidden", "classifier", on="last"),
    Row("classifier.bias", "labels", "classifier", on="last"),
)
EUROBERT: Final = Family(
    name="eurobert",
    rows=_EUROBERT_ROWS,
    facts=build_biased_facts,
    classes={
        "EuroBertModel": ModelClass(),
        "EuroBertForMaskedLM": ModelClass("model", "mlm"),
        "EuroBertForSequenceClassification": ModelClass("model", "sentence classifier"),
        "EuroBertForTokenClassification": ModelClass("model", "classifier"),
    },
    prefixes=("model",),
    traits=LayerFeatures(activation=("hidden_act", "silu"), norm="rms"),
    assumed=assume_sizes(128256, 768, 3072, 12, 12),
)
