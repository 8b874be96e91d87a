"""Describes ModernBERT and its decoder: rotary positions, windows in two of three layers, an MLP with a gate.

Names and shapes follow transformers 5 (`models/modernbert/modeling_modernbert.py`,
`models/modernbert_decoder/modeling_modernbert_decoder.py`). The first layer has no norm before attention, for the
embedding has one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import LAYER, assume_sizes
from shardctl.models.tables.family import Family, LogicalDim, ModelClass, ModelDims, Row, RowIndex
from shardctl.models.tables.layer_features import LayerFeatures
from shardctl.models.tables.windows import WindowRule

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig

_WORD_EMBEDDING_NAME: Final = ".embeddings.tok_embeddings.weight"


def _build_norm(name: str, on: str = "", when: str = "") -> tuple[Row, ...]:
    return (
        Row(f"{name}.weight", "hidden", when, on),
        Row(f"{name}.bias", "hidden", f"{when} norm_bias".strip(), on),
    )


def _build_linear(name: str, dims: str, flag: str, when: str = "", on: str = "") -> tuple[Row, ...]:
    """Build a matrix and its bias, which is there if `flag` holds."""
    return (
        Row(f"{name}.weight", dims, when, on),
        Row(f"{name}.bias", dims.split(maxsplit=1)[0], f"{when} {flag}".strip(), on),
    )


_EMBEDDING_ROWS: Final = (
    Row(_WORD_EMBEDDING_NAME, "vocab hidden", on="first"),
    *_build_norm(".embeddings.norm", "first"),
    *_build_norm(f"{LAYER}.attn_norm", when="later"),
)
_AFTER_ATTENTION_ROWS: Final = (
    *_build_linear(f"{LAYER}.attn.Wo", "hidden q", "qkv_bias"),
    *_build_norm(f"{LAYER}.mlp_norm"),
    *_build_linear(f"{LAYER}.mlp.Wi", "ffn+ffn hidden", "mlp_bias"),
    *_build_linear(f"{LAYER}.mlp.Wo", "hidden ffn", "mlp_bias"),
    *_build_norm(".final_norm", "last"),
)


def _build_head(name: str, when: str) -> tuple[Row, ...]:
    return (
        *_build_linear(f"{name}.dense", "hidden hidden", "head_bias", when, "last"),
        *_build_norm(f"{name}.norm", "last", when),
    )


def _build_word_rows(when: str) -> tuple[Row, ...]:
    return (
        Row("decoder.weight", "vocab hidden", when, "last", tie=_WORD_EMBEDDING_NAME),
        Row("decoder.bias", "vocab", f"{when} word_bias", "last"),
    )


_MODERNBERT_ROWS: Final = (
    *_EMBEDDING_ROWS,
    *_build_linear(f"{LAYER}.attn.Wqkv", "q+q+q hidden", "qkv_bias"),
    *_AFTER_ATTENTION_ROWS,
    *_build_head("head", "head"),
    *_build_word_rows("mlm"),
    Row("classifier.weight", "labels hidden", "classifier", on="last"),
    Row("classifier.bias", "labels", "classifier", on="last"),
)
_MODERNBERT_DECODER_ROWS: Final = (
    *_EMBEDDING_ROWS,
    *(row for name in "qkv" for row in _build_linear(f"{LAYER}.attn.{name}_proj", "q hidden", "qkv_bias")),
    *_AFTER_ATTENTION_ROWS,
    *_build_head("lm_head", "lm"),
    *_build_word_rows("lm"),
    *_build_head("head", "classifier"),
    *_build_linear("classifier", "labels hidden", "head_bias", "classifier", "last"),
)


def _build_facts(config: ModelConfig) -> ModelDims:
    hidden, layers = config.size("hidden_size"), config.size("num_hidden_layers")
    return ModelDims(
        dims={
            "vocab": LogicalDim(config.size("vocab_size"), axis="tp", even=False),
            "hidden": LogicalDim(hidden),
            "q": LogicalDim(hidden, config.divided("hidden_size", "num_attention_heads"), "tp", noun="attention heads"),
            "ffn": LogicalDim(config.size("intermediate_size"), axis="tp"),
            "labels": LogicalDim(config.labels(), loose=True),
        },
        indices={"layer": RowIndex(range(layers), layer=0)},
        flags={
            "tied": config.read_flag("tie_word_embeddings", default=True),
            "later": range(1, layers),
            "norm_bias": config.read_flag("norm_bias", default=False),
            "qkv_bias": config.read_flag("attention_bias", default=False),
            "mlp_bias": config.read_flag("mlp_bias", default=False),
            "head_bias": config.read_flag("classifier_bias", default=False),
            "word_bias": config.read_flag("decoder_bias", default=True),
        },
    )


_SLIDING_WINDOW_RULE: Final = WindowRule(
    128, "all but first of every n", period=3, key="local_attention", period_key="global_attn_every_n_layers"
)
_LAYER_FEATURES: Final = LayerFeatures(
    activation=("hidden_activation", "gelu"),
    norm="layer",
    dropout=("mlp_dropout", 0.0),
    window=_SLIDING_WINDOW_RULE,
)
_CONFIG_DEFAULTS: Final = assume_sizes(50368, 768, 1152, 22, 12)
MODERNBERT: Final = Family(
    name="modernbert",
    rows=_MODERNBERT_ROWS,
    facts=_build_facts,
    classes={
        "ModernBertModel": ModelClass(),
        "ModernBertForMaskedLM": ModelClass("model", "head mlm"),
        "ModernBertForSequenceClassification": ModelClass("model", "head classifier"),
        "ModernBertForMultipleChoice": ModelClass("model", "head classifier", labels=1),
        "ModernBertForTokenClassification": ModelClass("model", "head classifier"),
        "ModernBertForQuestionAnswering": ModelClass("model", "head classifier"),
    },
    prefixes=("model",),
    traits=replace(_LAYER_FEATURES, rotated_product=True),
    assumed=_CONFIG_DEFAULTS,
)
MODERNBERT_DECODER: Final = Family(
    name="modernbert-decoder",
    rows=_MODERNBERT_DECODER_ROWS,
    facts=_build_facts,
    classes={
        "ModernBertDecoderForCausalLM": ModelClass("model", "lm"),
        "ModernBertDecoderModel": ModelClass(),
        "ModernBertDecoderForSequenceClassification": ModelClass("model", "classifier"),
    },
    prefixes=("model",),
    traits=replace(_LAYER_FEATURES, window=replace(_SLIDING_WINDOW_RULE, sides=2)),
    assumed=_CONFIG_DEFAULTS,
)
