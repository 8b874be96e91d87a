"""Describes the arrays of Megatron-LM's directories: what each `mp_rank_TT_PPP_EEE` holds of a model.

Every rank has its part of its stage's layers, which are counted anew on each stage and in each chunk of a virtual
pipeline (`get_transformer_layer_offset` of `megatron/core/transformer/transformer_layer.py`); the embedding is padded
along the vocabulary (`_vocab_size_with_padding` of `megatron/training/tokenizer`), and a tied one stands on the last
stage a second time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import PartitionError, SourceError
from shardctl.base.value import value_class
from shardctl.libraries.arrays.composite import CompositeArray, SchemaEntry, stack_arrays
from shardctl.libraries.arrays.schema import Schema
from shardctl.libraries.megatron import further_layers, hybrid_layers, layers
from shardctl.libraries.megatron.layers import BY_GROUP, LayerVariant
from shardctl.libraries.megatron.ranks import TITLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.libraries.arrays.schema import ModelParts
    from shardctl.libraries.megatron.whole_array import WholeArray
    from shardctl.models import Model
    from shardctl.tensors.mesh import Mesh
    from shardctl.tensors.naming_scheme import NamingScheme

NAME: Final = "megatron"
LAYERS: Final = "layers"
"""The fact that says how many layers each chunk of each stage has, in the order in which they follow each other."""
VOCABULARY: Final = "vocabulary"
"""The fact that says to how many rows the vocabulary is padded."""
LAST_ROW: Final = "last_row"
"""The fact that says whether the padding repeats the last token's row (`tools/checkpoint`); else it is zeros."""
ROWS: Final = "rows"
"""The fact that says how rows of queries, keys and values follow each other, as `Variant.rows`."""
LATENTS_CUT: Final = "latents_cut"
"""The fact that `Variant.latents_cut` is."""
GROUPED: Final = "grouped"
"""The fact that says whether all of a rank's experts are in two arrays (`GroupedMLP` of core up to 0.16)."""
DTYPE: Final = "dtype"
"""The fact that says what the vocabulary's padding is written in, where a rank has nothing else."""


@value_class
class _RankShare:
    """Which part of an array a rank has."""

    index: int
    count: int


def count_chunks(dialect: NamingScheme) -> int:
    """Count chunks of layers on each stage: more than one in a virtual pipeline."""
    return len(dialect.numbers(LAYERS)) // dialect.mesh.degree("pp")


def format_chunk_prefix(chunk: int, chunks: int) -> str:
    """Format what stands before the names of a chunk's arrays, where there are several chunks."""
    return f"model{chunk}/" if chunks > 1 else ""


def _list_entries(model: Model, dialect: NamingScheme, rank: int) -> Iterator[SchemaEntry]:
    counts, stages = dialect.numbers(LAYERS), dialect.mesh.degree("pp")
    if sum(counts) != model.layers:
        raise PartitionError(f"the stages have {sum(counts)} layers, but the model has {model.layers}")
    parts, chunks = layers.build_model_parts(model, dialect), count_chunks(dialect)
    if layers.is_hybrid(model):
        hybrid_layers.check_mamba_degree(parts, dialect.mesh.degree("tp"))
    stage = dialect.mesh.coordinate(rank)["pp"]
    for chunk in range(chunks):
        turn = chunk * stages + stage
        prefix, first = format_chunk_prefix(chunk, chunks), sum(counts[:turn])
        yield from _list_chunk_entries(parts, dialect, rank, range(first, first + counts[turn]), prefix)


def _list_chunk_entries(
    parts: ModelParts, dialect: NamingScheme, rank: int, numbers: range, prefix: str
) -> Iterator[SchemaEntry]:
    """List the arrays of layers of some numbers and of what is before and behind them, with `prefix` in their names."""
    at, mesh = dialect.mesh.coordinate(rank), dialect.mesh
    shared = _RankShare(at["tp"], mesh.degree("tp"))
    variant = LayerVariant(dialect.text(ROWS, BY_GROUP), dialect.read_flag(LATENTS_CUT))
    if numbers.start == 0:
        (name, tokens), *others = layers.list_embeddings(parts)
        yield _build_vocabulary_entry(prefix + name, tokens, dialect, shared)
        for name, content in others:
            yield SchemaEntry(prefix + name, content)
    held = _find_held_experts(parts.model, mesh, at["ep"])
    for number in numbers:
        arrays = layers.list_layer_arrays(parts, number, variant, held)
        new = f"{prefix}decoder.layers.{number - numbers.start}."
        yield from _list_layer_entries(arrays, new, dialect, shared, _RankShare(at["etp"], mesh.etp))
    if numbers.stop == parts.model.layers:
        for whole in layers.list_last_norm(parts):
            yield SchemaEntry(prefix + whole.name, whole.content)
        if not layers.is_tied(parts.model) or mesh.degree("pp") > 1:
            yield _build_vocabulary_entry(
                f"{prefix}output_layer.weight", layers.get_output_layer(parts), dialect, shared
            )
        yield from _list_further_entries(parts, dialect, rank, prefix, copied=numbers.start > 0)


def _list_further_entries(
    parts: ModelParts, dialect: NamingScheme, rank: int, prefix: str, *, copied: bool
) -> Iterator[SchemaEntry]:
    """List the arrays of layers that predict further tokens.

    They need the embedding of tokens, which is `copied` to where it is not anyway.
    """
    at, mesh = dialect.mesh.coordinate(rank), dialect.mesh
    shared, within = _RankShare(at["tp"], mesh.degree("tp")), _RankShare(at["etp"], mesh.etp)
    count = dialect.number(further_layers.COUNT)
    if count and copied:
        (name, tokens), *_ = layers.list_embeddings(parts)
        yield replace(_build_vocabulary_entry(prefix + name, tokens, dialect, shared), optional=True)
    variant = LayerVariant(dialect.text(ROWS, BY_GROUP), dialect.read_flag(LATENTS_CUT))
    held = _find_held_experts(parts.model, mesh, at["ep"])
    for index in range(count):
        for inner, arrays in further_layers.list_further_modules(parts, index, variant, held):
            yield from _list_layer_entries(arrays, f"{prefix}mtp.layers.{index}.{inner}", dialect, shared, within)


def _find_held_experts(model: Model, mesh: Mesh, group: int) -> range | None:
    """Find the experts of a place on the ep axis; None for a model without any."""
    count = layers.count_experts(model)
    if count % mesh.ep:
        raise PartitionError(f"{count} experts cannot be divided over ep={mesh.ep}")
    return range(group * count // mesh.ep, (group + 1) * count // mesh.ep) if count else None


def _list_layer_entries(
    arrays: Iterator[WholeArray], prefix: str, dialect: NamingScheme, shared: _RankShare, within: _RankShare
) -> Iterator[SchemaEntry]:
    """List a rank's part of a layer, `shared` of what all ranks of tp divide, `within` of each expert."""
    grouped: dict[str, list[CompositeArray]] = {}
    first = None
    for whole in arrays:
        if whole.expert is None:
            yield SchemaEntry(prefix + whole.name, whole.share(shared.index, shared.count), dtype=whole.dtype)
            continue
        first = whole.expert if first is None else first
        content = whole.share(within.index, within.count)
        if dialect.read_flag(GROUPED):
            grouped.setdefault(whole.name, []).append(content)
        else:
            local = f"experts.local_experts.{whole.expert - first}."
            yield SchemaEntry(prefix + whole.name.replace("experts.", local, 1), content)
    yield from _group_experts(grouped, prefix)


def _group_experts(mine: dict[str, list[CompositeArray]], prefix: str) -> Iterator[SchemaEntry]:
    """Yield the two arrays of `GroupedMLP`: transposed experts one behind another, in two dims by declaration alone.

    Core's own `sharded_state_dict` views `weight1` as ``[experts, hidden, gate and up]``, though it is declared
    ``[hidden, experts * (gate and up)]``.
    """
    for name, experts in mine.items():
        content = stack_arrays([expert.transposed for expert in experts])
        count, rows, columns = content.shape
        first = name.endswith("linear_fc1.weight")
        declared = (rows, count * columns) if first else (count * rows, columns)
        yield SchemaEntry(f"{prefix}mlp.experts.weight{1 if first else 2}", content, shape=declared)


def _build_vocabulary_entry(
    name: str, tokens: CompositeArray, dialect: NamingScheme, shared: _RankShare
) -> SchemaEntry:
    """Build a rank's rows of the vocabulary."""
    rows = dialect.number(VOCABULARY) or tokens.shape[0]
    if rows < tokens.shape[0]:
        raise SourceError(
            f"{name} has {rows:,} rows, but the model has {tokens.shape[0]:,} tokens",
            hint="the config, or --true-vocab, may belong to another model",
        )
    if rows % shared.count:
        raise PartitionError(f"a vocabulary of {rows} rows cannot be divided over tp={shared.count}")
    padded = tokens.padded_with_last(rows) if dialect.read_flag(LAST_ROW) else tokens.pad_rows(rows)
    content = padded.share(0, shared.index, shared.count)
    known = BY_NAME.get(dialect.text(DTYPE))
    return SchemaEntry(name, content, dtype=None if content.pieces else known)


SCHEMA: Final = Schema(
    NAME, TITLE, layers.check_model, _list_entries, layers.FURTHER_LAYERS, further_layers.LEFT_BEHIND
)
