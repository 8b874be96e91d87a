"""Describes Qwen3.8-Flash-Next (`qwen4_exp`): Qwen3.5's layers around streams, an indexer, and tables of n-grams.

Names and shapes follow the Hub, where a table of n-grams is in many parts; transformers 5 joins them
(`models/qwen4_exp/modeling_qwen4_exp.py`, and `qwen4_exp_text` in `conversion_mapping.py`), and its plan cuts their
columns. What mixes the streams, and the indexer, are whole on every tp rank. There is no norm before the head but that
of the last mixer. The layers that predict, `mtp`, are on the Hub only (TensorRT-LLM reads them).
"""

from __future__ import annotations

from itertools import count, islice
from math import isqrt
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.models.families.qwen3_5 import QWEN3_5_MOE_TEXT
from shardctl.models.families.qwen3_next import GATED_ATTENTION, MTP_LAYER
from shardctl.models.families.qwen_moe import SHARED
from shardctl.models.families.vision_towers import QWEN3_EYES, build_qwen3_vision_facts
from shardctl.models.submodels.towers import ModelTower, build_tower_classes, build_tower_family
from shardctl.models.tables.decoder import EMBEDDING, HEADS, LAYER
from shardctl.models.tables.experts import (
    ROUTER,
    add_condition,
    build_expert_rows,
    build_fused_experts,
    build_predicting_rows,
)
from shardctl.models.tables.family import Family, FusedArray, LogicalDim, ModelClass, Row, RowIndex
from shardctl.models.tables.layer_features import FurtherTensor, LayerFeatures

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_LINEAR_ATTENTION_ROWS: Final = tuple(
    row for row in QWEN3_5_MOE_TEXT.rows if ".layers.{layer}.linear_attn." in row.name
)
_INDEXER_ROWS: Final = (
    Row(f"{LAYER}.self_attn.indexer.index_qk_proj.weight", "index_q+index hidden", when="indexer"),
    Row(f"{LAYER}.self_attn.indexer.q_layernorm.weight", "index", when="indexer"),
    Row(f"{LAYER}.self_attn.indexer.k_layernorm.weight", "index", when="indexer"),
)


def _build_mixer_rows(module: str) -> tuple[Row, ...]:
    """Build what reads one state of each token out of its streams."""
    return (
        Row(f"{module}.hc_norm.weight", "streams"),
        Row(f"{module}.input_mix_weight_down.weight", "low_rank streams"),
        Row(f"{module}.input_mix_weight_up.weight", "streams low_rank"),
    )


_RESIDUAL_STREAM_ROWS: Final = tuple(
    row
    for half in ("attn", "mlp")
    for row in (
        *_build_mixer_rows(f"{LAYER}.{half}_hyper_connection"),
        Row(f"{LAYER}.{half}_hyper_connection.block_inject_weight.weight", "count streams"),
    )
)
_NGRAM_TABLE_PREFIX: Final = f"{LAYER}.ple.ple_embedding"
_NGRAM_SHARD_NAME: Final = f"{_NGRAM_TABLE_PREFIX}.ngram_embedding.shard_{{part}}.weight"
_NGRAM_ROWS: Final = (
    Row(f"{_NGRAM_TABLE_PREFIX}.layer_multipliers", "ngram", when="ple", dtype="I64"),
    Row(f"{_NGRAM_TABLE_PREFIX}.ngram_heads_vocab_sizes", "ngram_heads", when="ple", dtype="I64"),
    Row(f"{_NGRAM_TABLE_PREFIX}.ngram_heads_offsets", "ngram_heads", when="ple", dtype="I64"),
    Row(_NGRAM_SHARD_NAME, "ngrams ngram_width", when="ple"),
    Row(f"{LAYER}.ple.key_proj.weight", "streams ngram_hidden", when="ple"),
    Row(f"{LAYER}.ple.value_proj.weight", "hidden ngram_hidden", when="ple"),
    Row(f"{LAYER}.ple.norm_key.weight", "streams", when="ple"),
    Row(f"{LAYER}.ple.norm_query.weight", "streams", when="ple"),
    Row(f"{LAYER}.ple.norm_conv.weight", "streams", when="ple"),
    Row(f"{LAYER}.ple.conv1d.weight", "streams 1 ngram_window", when="ple"),
)
"""A table in which hashes of the last tokens find what is added to the streams (per-layer embedding)."""
_MOE_ROWS: Final = (ROUTER, *build_expert_rows(), *SHARED)
_MTP_LAYER_ROWS: Final = (
    *add_condition((*GATED_ATTENTION, *_INDEXER_ROWS), "attention"),
    *_MOE_ROWS,
    *_RESIDUAL_STREAM_ROWS,
)
_MTP_MODULE_ROWS: Final = (
    *build_predicting_rows(_MTP_LAYER_ROWS, MTP_LAYER, "attention moe shared"),
    *(
        Row(f"mtp.{name}.weight", dims, on="last", optional=True)
        for name, dims in (
            ("fc_embedding", "hidden hidden"),
            ("fc_hidden", "hidden hidden"),
            ("pre_fc_norm_embedding", "hidden"),
            ("pre_fc_norm_hidden", "streams"),
        )
    ),
    *build_predicting_rows(_build_mixer_rows("mtp.hyper_connection_mixer"), MTP_LAYER, ""),
)


def _build_facts(config: ModelConfig) -> ModelDims:
    facts = QWEN3_5_MOE_TEXT.facts(config)
    hidden, streams = facts.size("hidden"), config.size("hc_count", 4)
    heads, width = config.count("indexer_n_heads", 0), config.size("indexer_head_dim", 128)
    ngram, per_ngram = config.size("ngram_size", 3), config.size("heads_per_ngram", 8)
    joined, hashes = config.size("ple_embed_dim", hidden), (ngram - 1) * per_ngram
    if not hashes or joined % hashes:
        raise SourceError(f"config.json has ple_embed_dim = {joined}, which {hashes} heads of n-grams do not divide")
    return facts.extend_dims(
        dims={
            "streams": LogicalDim(streams * hidden),
            "count": LogicalDim(streams),
            "others": LogicalDim(streams - 1),
            "history": LogicalDim(ngram - 1),
            "padding": LogicalDim((config.size("ple_conv_kernel_size", 4) - 1) * ngram),
            "low_rank": LogicalDim(config.size("hc_lowrank", 320)),
            "index": LogicalDim(width),
            "index_q": LogicalDim(heads * width),
            "index_heads": LogicalDim(heads),
            "chosen": LogicalDim(config.size("indexer_budget", 2048)),
            "pool": LogicalDim(config.size("indexer_compress_ratio", 4)),
            "ngram": LogicalDim(ngram),
            "ngram_heads": LogicalDim(hashes),
            "ngrams": LogicalDim(_count_ngram_rows(config, hashes)),
            "ngram_width": LogicalDim(joined // hashes, axis="tp", even=False),
            "ngram_hidden": LogicalDim(joined),
            "ngram_window": LogicalDim(config.size("ple_conv_kernel_size", 4)),
        },
        indices={"part": RowIndex(range(config.size("split_ngram_parts", 512)))},
        flags={
            "attention": _list_attention_layers(config),
            "indexer": heads > 0,
            "sigmoid_gate": config.values.get("output_gate_type") == "sigmoid",
            "ple": _list_ngram_layers(config),
        },
    )


def _list_attention_layers(config: ModelConfig) -> frozenset[int]:
    """List the layers with full attention, whatever a config calls it."""
    layers, kinds = config.size("num_hidden_layers"), config.entries("layer_types")
    if kinds is None:
        interval = config.size("full_attention_interval", 4)
        return frozenset(range(interval - 1, layers, interval))
    return frozenset(n for n, kind in enumerate(kinds) if kind != "linear_attention")


def _list_ngram_layers(config: ModelConfig) -> frozenset[int]:
    """List the layers with a table of n-grams, which a config counts from one; raises SourceError for others."""
    said, layers = config.entries("ple_layer_ids") or [], config.size("num_hidden_layers")
    if not {*range(1, layers + 1)}.issuperset(said):
        raise SourceError(f"config.json has ple_layer_ids = {said!r} where layers from 1 to {layers} are expected")
    return frozenset(n - 1 for n in said)


def _count_ngram_rows(config: ModelConfig, heads: int) -> int:
    """Count the rows of each part of a table: one for each hash of each head, of which a prime number is possible.

    Raises SourceError for rows that the parts do not divide, UnsupportedError where tables differ in size.
    """
    tables = max(len(_list_ngram_layers(config)), 1)
    even, parts = config.size("make_ngram_vocab_size_divisible_by", 128), config.size("split_ngram_parts", 512)
    primes = [*islice(_list_primes(config.size("ngram_vocab_size_base", 20_000_000)), tables * heads)]
    sums = [sum(primes[n * heads : (n + 1) * heads]) for n in range(tables)]
    rows = {-(-total // even) * even for total in sums}
    if len(rows) > 1:
        raise UnsupportedError(
            "config.json gives tables of n-grams of several sizes to its layers",
            hint="models with one layer in ple_layer_ids are known; say how such tables are cut with --rules FILE",
        )
    (size,) = rows
    if size % parts:
        raise SourceError(f"config.json has split_ngram_parts = {parts}, which does not divide {size} rows")
    return size // parts


def _list_primes(start: int) -> Iterator[int]:
    return (n for n in count(start) if n > 1 and all(n % d for d in range(2, isqrt(n) + 1)))


_EXTRA_SAVED_ACTIVATIONS: Final = (
    FurtherTensor("fp32 copies of further streams that are normed before each half, and normed", "norms", "others", 8),
    FurtherTensor("statistics of their norms", "norm_rows", "others", 4),
    *(
        one
        for half in ("attention", "the MLP")
        for one in (
            FurtherTensor(f"all streams normed, before {half}", dims="streams"),
            FurtherTensor(f"shares of the streams in the input of {half}", dims="streams"),
            FurtherTensor(f"those in their latent, before {half}", dims="low_rank"),
            FurtherTensor(f"the same, activated, before {half}", dims="low_rank"),
            FurtherTensor(f"shares of the streams in the result of {half}", dims="count"),
            FurtherTensor(f"the same, doubled, behind {half}", dims="count"),
            FurtherTensor(f"result of {half}, before the streams", "hidden"),
        )
    ),
    FurtherTensor("numbers of the n-grams", dims="ngram_heads", width=8, when="ple"),
    FurtherTensor("those before a sequence", "sequences", "history ngram_heads", 8, when="ple"),
    FurtherTensor("what the table has of the n-grams", dims="ngram_hidden", when="ple"),
    FurtherTensor("keys of the n-grams, normed", dims="streams", when="ple"),
    FurtherTensor("queries of the streams, normed", dims="streams", when="ple"),
    FurtherTensor("values of the n-grams", "hidden", when="ple"),
    *(
        FurtherTensor(f"the gate of the n-grams, {step}", dims="count", when="ple")
        for step in ("as it is", "without its sign", "its root", "its sign", "activated")
    ),
    FurtherTensor("input of the convolution of n-grams", dims="streams", when="ple"),
    FurtherTensor("what that is padded with", "sequences", "padding streams", when="ple"),
    FurtherTensor("results of the convolution of n-grams", dims="streams", when="ple"),
    FurtherTensor("mask of the tokens that an indexer chose", "pairs", width=1, when="attention", given=("fused",)),
)
QWEN4_EXP_TEXT: Final = Family(
    name="qwen4_exp_text",
    rows=(
        *EMBEDDING,
        *_LINEAR_ATTENTION_ROWS,
        *add_condition((*GATED_ATTENTION, *_INDEXER_ROWS), "attention"),
        *_MOE_ROWS,
        *_NGRAM_ROWS,
        *_RESIDUAL_STREAM_ROWS,
        *(
            Row(row.name.replace(LAYER, ""), row.dims, on="last")
            for row in _build_mixer_rows(f"{LAYER}.hyper_connection_mixer")
        ),
        *(row for row in HEADS if row.when in ("", "lm")),
        *_MTP_MODULE_ROWS,
    ),
    facts=_build_facts,
    classes={"Qwen4ExpForCausalLM": ModelClass("model", "lm"), "Qwen4ExpTextModel": ModelClass()},
    prefixes=("model", "model.language_model"),
    fused=(
        FusedArray(f"{_NGRAM_TABLE_PREFIX}.ngram_embedding.weight", (_NGRAM_SHARD_NAME,), joined=True),
        *build_fused_experts(),
        *build_fused_experts(layer=MTP_LAYER),
    ),
    traits=LayerFeatures(
        activation=("hidden_act", "silu"),
        norm="rms32",
        experts_per_token=10,
        narrow_experts=True,
        further=_EXTRA_SAVED_ACTIVATIONS,
    ),
    aliases={"num_local_experts": "num_experts"},
    assumed={**QWEN3_5_MOE_TEXT.assumed, "num_experts": 512},
)
QWEN4_EXP: Final = build_tower_family(
    "qwen4_exp",
    build_tower_classes("Qwen4Exp"),
    QWEN4_EXP_TEXT,
    (ModelTower("vision_config", "visual", QWEN3_EYES, build_qwen3_vision_facts),),
)
