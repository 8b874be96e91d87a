"""Describes DeBERTa, also -v2 and -v3: BERT's blocks, whose attention also scores words against relative positions.

Names and shapes follow transformers 5 (`models/deberta`, `models/deberta_v2`). The first has queries, keys and values
in one matrix, head by head. The embedding of relative positions, which every layer uses, is on the first stage.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.models.families.bert import (
    BLOCK,
    BLOCK_INPUT,
    BLOCK_OUTPUT,
    ENCODER_TRAITS,
    POOLER,
    build_encoder_facts,
    build_norm_rows,
)
from shardctl.models.tables.decoder import assume_sizes
from shardctl.models.tables.family import Family, LogicalDim, ModelClass, Row
from shardctl.models.tables.layer_features import FurtherTensor

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_WORD_EMBEDDING_NAME: Final = ".embeddings.word_embeddings.weight"
_ATTENTION_PREFIX: Final = f"{BLOCK}.attention.self"
_LM_HEAD_PREFIX: Final = "lm_predictions.lm_head"
_EMBEDDING_ROWS: Final = (
    Row(".embeddings.position_ids", "1 *", on="first", buffer="I64"),
    Row(_WORD_EMBEDDING_NAME, "vocab embedding", "!borrowed", on="first"),
    Row(_WORD_EMBEDDING_NAME, "vocab embedding", "borrowed", on="ends"),
    Row(".embeddings.position_embeddings.weight", "positions embedding", "absolute", on="first"),
    Row(".embeddings.token_type_embeddings.weight", "types embedding", "typed", on="first"),
    Row(".embeddings.embed_proj.weight", "hidden embedding", "narrow", on="first"),
    *build_norm_rows(".embeddings.LayerNorm", "first"),
)
_AFTER_ATTENTION_ROWS: Final = (
    Row(f"{BLOCK}.attention.output.dense.weight", "hidden q"),
    Row(f"{BLOCK}.attention.output.dense.bias", "hidden"),
    *build_norm_rows(f"{BLOCK}.attention.output.LayerNorm"),
    *BLOCK_INPUT,
    *BLOCK_OUTPUT,
    *build_norm_rows(f"{BLOCK}.output.LayerNorm"),
    Row(".encoder.rel_embeddings.weight", "distances hidden", "relative", on="first"),
)
_HEAD_ROWS: Final = (
    Row("cls.predictions.bias", "vocab", "mlm legacy", on="last"),
    Row("cls.predictions.transform.dense.weight", "embedding hidden", "mlm legacy", on="last"),
    Row("cls.predictions.transform.dense.bias", "embedding", "mlm legacy", on="last"),
    Row("cls.predictions.transform.LayerNorm.weight", "embedding", "mlm legacy", on="last"),
    Row("cls.predictions.transform.LayerNorm.bias", "embedding", "mlm legacy", on="last"),
    Row("cls.predictions.decoder.weight", "vocab embedding", "mlm legacy", on="last", tie=_WORD_EMBEDDING_NAME),
    Row("cls.predictions.decoder.bias", "vocab", "mlm legacy", on="last", tie="cls.predictions.bias"),
    Row(f"{_LM_HEAD_PREFIX}.bias", "words", "mlm !legacy", on="last"),
    Row(f"{_LM_HEAD_PREFIX}.dense.weight", "hidden hidden", "mlm !legacy", on="last"),
    Row(f"{_LM_HEAD_PREFIX}.dense.bias", "hidden", "mlm !legacy", on="last"),
    *build_norm_rows(f"{_LM_HEAD_PREFIX}.LayerNorm", "last", "mlm !legacy"),
    *(replace(row, name=row.name.lstrip(".")) for row in POOLER),
    Row("classifier.weight", "labels hidden", "classifier", on="last"),
    Row("classifier.bias", "labels", "classifier", on="last"),
    Row("qa_outputs.weight", "labels hidden", "question", on="last"),
    Row("qa_outputs.bias", "labels", "question", on="last"),
)
_DEBERTA_V2: Final = (
    *_EMBEDDING_ROWS,
    Row(f"{_ATTENTION_PREFIX}.query_proj.weight", "q hidden"),
    Row(f"{_ATTENTION_PREFIX}.query_proj.bias", "q"),
    Row(f"{_ATTENTION_PREFIX}.key_proj.weight", "q hidden"),
    Row(f"{_ATTENTION_PREFIX}.key_proj.bias", "q"),
    Row(f"{_ATTENTION_PREFIX}.value_proj.weight", "q hidden"),
    Row(f"{_ATTENTION_PREFIX}.value_proj.bias", "q"),
    Row(f"{_ATTENTION_PREFIX}.pos_key_proj.weight", "q hidden", "own_keys"),
    Row(f"{_ATTENTION_PREFIX}.pos_key_proj.bias", "q", "own_keys"),
    Row(f"{_ATTENTION_PREFIX}.pos_query_proj.weight", "q hidden", "own_queries"),
    Row(f"{_ATTENTION_PREFIX}.pos_query_proj.bias", "q", "own_queries"),
    *_AFTER_ATTENTION_ROWS,
    *build_norm_rows(".encoder.LayerNorm", "first", "normed_distances"),
    Row(".encoder.conv.conv.weight", "hidden conv_group conv_window", "conv", on="first"),
    Row(".encoder.conv.conv.bias", "hidden", "conv", on="first"),
    *build_norm_rows(".encoder.conv.LayerNorm", "first", "conv"),
    *_HEAD_ROWS,
)
"""A convolution follows the first layer."""
_DEBERTA_ROWS: Final = (
    *_EMBEDDING_ROWS,
    Row(f"{_ATTENTION_PREFIX}.q_bias", "q"),
    Row(f"{_ATTENTION_PREFIX}.v_bias", "q"),
    Row(f"{_ATTENTION_PREFIX}.in_proj.weight", "qkv hidden"),
    Row(f"{_ATTENTION_PREFIX}.pos_proj.weight", "q hidden", "own_keys"),
    Row(f"{_ATTENTION_PREFIX}.pos_q_proj.weight", "q hidden", "own_queries"),
    Row(f"{_ATTENTION_PREFIX}.pos_q_proj.bias", "q", "own_queries"),
    *_AFTER_ATTENTION_ROWS,
    *_HEAD_ROWS,
)
"""The present head has no matrix for words, but computes with the embedding, which then is on the last stage, too: its
bias is whole on every rank."""


def _count_distances(config: ModelConfig) -> int:
    """Count the rows of the embedding of relative positions: those of each direction, or buckets of them."""
    for key in ("position_buckets", "max_relative_positions"):
        value = config.values.get(key)
        if isinstance(value, int) and value > 0:
            return 2 * config.size(key)
    return 2 * config.size("max_position_embeddings", 512)


def _list_scores(config: ModelConfig) -> frozenset[str]:
    """List what attention scores besides words against words: `c2p`, `p2c`; raises SourceError for another type."""
    said = config.values.get("pos_att_type") or ()
    if isinstance(said, str):
        said = [word.strip() for word in said.lower().split("|")]
    if not isinstance(said, list | tuple) or not all(isinstance(word, str) for word in said):
        raise SourceError(f"{config.file} has pos_att_type = {said!r} where names of scores are expected")
    return frozenset(said)


def _build_facts(config: ModelConfig) -> ModelDims:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    head = config.size("attention_head_size", config.divided("hidden_size", "num_attention_heads"))
    width = config.size("embedding_size", hidden)
    types, window = config.count("type_vocab_size", 0), config.count("conv_kernel_size", 0)
    relative, scores = config.read_flag("relative_attention", default=False), _list_scores(config)
    facts, legacy = build_encoder_facts(config.over({"type_vocab_size": 0})), config.read_flag("legacy", default=True)
    own = relative and not config.read_flag("share_att_key", default=False)
    return facts.extend_dims(
        dims={
            "q": LogicalDim(heads * head, head, "tp", noun="attention heads"),
            "words": LogicalDim(facts.size("vocab")),
            "embedding": LogicalDim(width),
            "types": LogicalDim(types),
            "distances": LogicalDim(_count_distances(config)),
            "conv_group": LogicalDim(hidden // config.size("conv_groups", 1)),
            "conv_window": LogicalDim(window),
        },
        flags={
            "tied": legacy and bool(facts.flags["tied"]),
            "absolute": config.read_flag("position_biased_input", default=True),
            "typed": types > 0,
            "narrow": width != hidden,
            "relative": relative,
            "to_positions": relative and "c2p" in scores,
            "of_positions": relative and "p2c" in scores,
            "own_keys": own and "c2p" in scores,
            "own_queries": own and "p2c" in scores,
            "normed_distances": "layer_norm" in config.text("norm_rel_ebd", "none").lower().split("|"),
            "conv": window > 0,
            "legacy": legacy,
            "borrowed": not legacy and config.architecture().endswith("ForMaskedLM"),
        },
    )


def _build_first_facts(config: ModelConfig) -> ModelDims:
    """Build the facts of the first DeBERTa, which keeps every distance up to the longest apart."""
    facts = _build_facts(replace(config, values={**config.values, "position_buckets": None}))
    width, head = facts.size("q"), config.divided("hidden_size", "num_attention_heads")
    return facts.extend_dims(dims={"qkv": LogicalDim(3 * width, 3 * head, "tp", noun="attention heads")})


_LAYER_FEATURES: Final = replace(
    ENCODER_TRAITS,
    unfused=True,
    further=(
        FurtherTensor("keys of positions, for each sequence", "sequences", dims="distances q", when="to_positions"),
        FurtherTensor("scores of words against positions", "rows", dims="distances", when="to_positions"),
        FurtherTensor("queries of positions, for each sequence", "sequences", dims="distances q", when="of_positions"),
        FurtherTensor("scores of positions against words", "rows", dims="distances", when="of_positions"),
        FurtherTensor("keys, before they are scaled", "keys", when="of_positions"),
        FurtherTensor("the mask", "pairs", width=1),
    ),
)
_FP32_SCORES_FEATURES: Final = replace(
    _LAYER_FEATURES, unmodelled="scores of relative positions that transformers computes in fp32 only"
)
DEBERTA: Final = Family(
    name="deberta",
    rows=_DEBERTA_ROWS,
    facts=_build_first_facts,
    classes={
        "DebertaModel": ModelClass(),
        "DebertaForMaskedLM": ModelClass("deberta", "mlm"),
        "DebertaForSequenceClassification": ModelClass("deberta", "pooler classifier"),
        "DebertaForTokenClassification": ModelClass("deberta", "classifier"),
        "DebertaForQuestionAnswering": ModelClass("deberta", "question"),
    },
    prefixes=("deberta",),
    traits=_FP32_SCORES_FEATURES,
    assumed=assume_sizes(50265, 768, 3072, 12, 12),
)
DEBERTA_V2: Final = Family(
    name="deberta-v2",
    rows=_DEBERTA_V2,
    facts=_build_facts,
    classes={
        "DebertaV2Model": ModelClass(),
        "DebertaV2ForMaskedLM": ModelClass("deberta", "mlm"),
        "DebertaV2ForSequenceClassification": ModelClass("deberta", "pooler classifier"),
        "DebertaV2ForMultipleChoice": ModelClass("deberta", "pooler classifier", labels=1),
        "DebertaV2ForTokenClassification": ModelClass("deberta", "classifier"),
        "DebertaV2ForQuestionAnswering": ModelClass("deberta", "question"),
    },
    prefixes=("deberta",),
    traits=_LAYER_FEATURES,
    assumed=assume_sizes(128100, 1536, 6144, 24, 24),
)
