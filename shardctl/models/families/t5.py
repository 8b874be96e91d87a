"""Describes T5, its 1.1 kin, mT5, UMT5 and LongT5: an encoder and a decoder around one embedding.

Names and shapes follow transformers 5 (`models/t5/modeling_t5.py`). Its pipeline layers are the encoder's blocks and
then the decoder's. The embedding is on the first stage, on that of the first decoder block, and, as the head of a
tied model, on the last. The relative positions are those of the first block, which hands them on; in UMT5 each has its
own. LongT5's encoder attends to what is near, and perhaps to a summary of each block of tokens.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.models.tables.family import Family, LogicalDim, ModelClass, ModelDims, Row, RowIndex
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.models.tables.config import ModelConfig


def _build_attention_rows(block: str, attention: str, when: str) -> tuple[Row, ...]:
    return (
        Row(f"{block}.{attention}.q.weight", "q hidden", when),
        Row(f"{block}.{attention}.k.weight", "q hidden", when),
        Row(f"{block}.{attention}.v.weight", "q hidden", when),
        Row(f"{block}.{attention}.o.weight", "hidden q", when),
    )


def _build_position_rows(block: str, when: str) -> tuple[Row, ...]:
    return (
        Row(f"{block}.SelfAttention.relative_attention_bias.weight", "buckets heads", f"{when} first_block".strip()),
    )


def _build_feed_forward_rows(block: str, when: str) -> tuple[Row, ...]:
    return (
        Row(f"{block}.DenseReluDense.wi.weight", "ffn hidden", f"{when} !gated".strip()),
        Row(f"{block}.DenseReluDense.wi_0.weight", "ffn hidden", f"{when} gated".strip()),
        Row(f"{block}.DenseReluDense.wi_1.weight", "ffn hidden", f"{when} gated".strip()),
        Row(f"{block}.DenseReluDense.wo.weight", "hidden ffn", when),
        Row(f"{block}.layer_norm.weight", "hidden", when),
    )


_ENCODER_LAYER_PREFIX: Final = ".encoder.block.{encoder}.layer"
_DECODER_LAYER_PREFIX: Final = ".decoder.block.{decoder}.layer"
_SHARED_EMBEDDING_NAME: Final = ".shared.weight"

_T5_ROWS: Final = (
    Row(_SHARED_EMBEDDING_NAME, "vocab hidden", on="first"),
    Row(".encoder.embed_tokens.weight", "vocab hidden", on="first", tie=_SHARED_EMBEDDING_NAME, tied="always"),
    *_build_attention_rows(f"{_ENCODER_LAYER_PREFIX}.0", "SelfAttention", ""),
    *_build_position_rows(f"{_ENCODER_LAYER_PREFIX}.0", ""),
    Row(f"{_ENCODER_LAYER_PREFIX}.0.layer_norm.weight", "hidden"),
    *_build_feed_forward_rows(f"{_ENCODER_LAYER_PREFIX}.1", ""),
    Row(".encoder.final_layer_norm.weight", "hidden", on="encoder_end"),
    Row(
        ".decoder.embed_tokens.weight",
        "vocab hidden",
        "decoder",
        on="decoder_start",
        tie=_SHARED_EMBEDDING_NAME,
        tied="always",
    ),
    *_build_attention_rows(f"{_DECODER_LAYER_PREFIX}.0", "SelfAttention", "decoder"),
    *_build_position_rows(f"{_DECODER_LAYER_PREFIX}.0", "decoder"),
    Row(f"{_DECODER_LAYER_PREFIX}.0.layer_norm.weight", "hidden", "decoder"),
    *_build_attention_rows(f"{_DECODER_LAYER_PREFIX}.1", "EncDecAttention", "decoder"),
    Row(
        f"{_DECODER_LAYER_PREFIX}.1.EncDecAttention.relative_attention_bias.weight",
        "* *",
        "decoder first_block",
        buffer="F32",
    ),
    Row(f"{_DECODER_LAYER_PREFIX}.1.layer_norm.weight", "hidden", "decoder"),
    *_build_feed_forward_rows(f"{_DECODER_LAYER_PREFIX}.2", "decoder"),
    Row(".decoder.final_layer_norm.weight", "hidden", "decoder", on="last"),
    Row("lm_head.weight", "vocab hidden", "lm", on="last", tie=_SHARED_EMBEDDING_NAME),
    Row("classification_head.dense.weight", "hidden hidden", "sentence", on="last"),
    Row("classification_head.dense.bias", "hidden", "sentence", on="last"),
    Row("classification_head.out_proj.weight", "labels hidden", "sentence", on="last"),
    Row("classification_head.out_proj.bias", "labels", "sentence", on="last"),
    Row("classifier.weight", "labels hidden", "classifier", on="last"),
    Row("classifier.bias", "labels", "classifier", on="last"),
    Row("qa_outputs.weight", "labels hidden", "question", on="last"),
    Row("qa_outputs.bias", "labels", "question", on="last"),
)
"""The cross-attention's own relative positions are a leftover that early checkpoints (t5-small) store and no model
uses."""


def _build_long_rows(row: Row) -> tuple[Row, ...]:
    """Build what LongT5's encoder has in place of a row of T5, by what it attends to."""
    ours = f"{_ENCODER_LAYER_PREFIX}.0.SelfAttention"
    if not row.name.startswith(ours):
        return (replace(row, tied="always"),) if row.tie == _SHARED_EMBEDDING_NAME else (row,)
    return tuple(
        replace(
            row, name=row.name.replace(".SelfAttention", f".{kind}SelfAttention"), when=f"{row.when} {when}".strip()
        )
        for kind, when in (("Local", "!summary"), ("TransientGlobal", "summary"))
    )


_TRANSIENT_GLOBAL_PREFIX: Final = f"{_ENCODER_LAYER_PREFIX}.0.TransientGlobalSelfAttention"
_LONG_T5_ROWS: Final = tuple(
    each
    for row in _T5_ROWS
    if not {"sentence", "classifier", "question"} & {*row.when.split()} and not row.buffer
    for each in (
        *_build_long_rows(row),
        *(
            (
                Row(
                    f"{_TRANSIENT_GLOBAL_PREFIX}.global_relative_attention_bias.weight",
                    "buckets heads",
                    "summary first_block",
                ),
                Row(f"{_TRANSIENT_GLOBAL_PREFIX}.global_input_layer_norm.weight", "hidden", "summary"),
            )
            if row.name.startswith(_ENCODER_LAYER_PREFIX) and "relative_attention_bias" in row.name
            else ()
        ),
    )
)


def _build_facts(config: ModelConfig) -> ModelDims:
    heads, head = config.size("num_heads"), config.size("d_kv")
    encoder = config.size("num_layers")
    decoder = config.size("num_decoder_layers", encoder)
    return ModelDims(
        dims={
            "vocab": LogicalDim(config.size("vocab_size"), axis="tp", even=False),
            "hidden": LogicalDim(config.size("d_model")),
            "q": LogicalDim(heads * head, head, "tp", noun="attention heads"),
            "heads": LogicalDim(heads, axis="tp", noun="attention heads"),
            "buckets": LogicalDim(config.size("relative_attention_num_buckets", 32)),
            "ffn": LogicalDim(config.size("d_ff"), axis="tp"),
            "labels": LogicalDim(config.labels(), loose=True),
        },
        indices={"encoder": RowIndex(range(encoder), layer=0), "decoder": RowIndex(range(decoder), layer=encoder)},
        flags={
            "tied": config.read_flag("tie_word_embeddings", default=True),
            "gated": config.text("feed_forward_proj", "relu").startswith("gated-"),
            "first_block": range(1),
        },
        stages={"encoder_end": ("layer", encoder - 1), "decoder_start": ("layer", encoder)},
    )


def _build_gated_facts(config: ModelConfig, *, own_positions: bool) -> ModelDims:
    """Build the facts of mT5's kin, whose MLPs have a gate where a config is silent."""
    facts = _build_facts(config.over({"feed_forward_proj": "gated-gelu"}))
    return facts.extend_dims(flags={"first_block": True}) if own_positions else facts


def _build_long_facts(config: ModelConfig) -> ModelDims:
    """Build the facts of LongT5, whose checkpoints have one embedding for all, whatever the config says."""
    kind = config.text("encoder_attention_type", "local")
    if kind not in {"local", "transient-global"}:
        raise SourceError(f"config.json has encoder_attention_type = {kind!r} where local or transient-global is known")
    return _build_facts(config).extend_dims(flags={"tied": True, "summary": kind != "local"})


def _build_classes(stem: str) -> Mapping[str, ModelClass]:
    return {
        f"{stem}ForConditionalGeneration": ModelClass("", "decoder lm"),
        f"{stem}Model": ModelClass("", "decoder"),
        f"{stem}EncoderModel": ModelClass(),
        f"{stem}ForSequenceClassification": ModelClass("transformer", "decoder sentence"),
        f"{stem}ForTokenClassification": ModelClass("transformer", "classifier"),
        f"{stem}ForQuestionAnswering": ModelClass("", "decoder question"),
    }


_LAYER_FEATURES: Final = LayerFeatures(
    activation=("feed_forward_proj", "relu"),
    norm="rms16",
    dropout=("dropout_rate", 0.1),
    inner_dropout=("dropout_rate", 0.1),
    narrow_softmax=True,
    attention_dropout=("dropout_rate", 0.1),
    position_biases=True,
)
T5: Final = Family(
    name="t5",
    rows=_T5_ROWS,
    facts=_build_facts,
    classes=_build_classes("T5"),
    prefixes=("transformer",),
    renamed={"T5WithLMHeadModel": "T5ForConditionalGeneration"},
    traits=_LAYER_FEATURES,
    aliases={
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    },
    assumed={"vocab_size": 32128, "d_ff": 2048, "d_kv": 64, "d_model": 512, "num_heads": 8, "num_layers": 6},
)
_GATED_T5_FAMILY: Final = replace(
    T5,
    traits=replace(_LAYER_FEATURES, activation=("feed_forward_proj", "gated-gelu")),
    renamed={},
    assumed={"vocab_size": 250112, "d_ff": 1024, "d_kv": 64, "d_model": 512, "num_heads": 6, "num_layers": 8},
)
MT5: Final = replace(
    _GATED_T5_FAMILY, name="mt5", facts=partial(_build_gated_facts, own_positions=False), classes=_build_classes("MT5")
)
UMT5: Final = replace(
    _GATED_T5_FAMILY, name="umt5", facts=partial(_build_gated_facts, own_positions=True), classes=_build_classes("UMT5")
)
LONG_T5: Final = replace(
    T5,
    name="longt5",
    rows=_LONG_T5_ROWS,
    facts=_build_long_facts,
    classes={
        name: one for name, one in _build_classes("LongT5").items() if name.endswith(("Generation", "5Model", "rModel"))
    },
    renamed={},
    traits=replace(_LAYER_FEATURES, unfused=True, unmodelled="attention to what is near and to summaries of blocks"),
)
