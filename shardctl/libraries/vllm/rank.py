"""Computes what a tensor-parallel rank of vLLM takes of a tensor, by the kind of its layer.

The cuts are those of vLLM 0.25.1, `model_executor/layers/linear.py` (`ColumnParallelLinear`, `RowParallelLinear`,
`QKVParallelLinear`), `vocab_parallel_embedding.py` and `fused_moe/` (`expert_map_manager.py` divides experts).
"""

from __future__ import annotations

import struct
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import PartitionError
from shardctl.base.value import value_class
from shardctl.libraries.arrays import schema
from shardctl.libraries.arrays.composite import (
    CompositeArray,
    Piece,
    SchemaEntry,
    build_constant_entry,
    join_arrays,
    round_up_to_multiple,
    stack_arrays,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardctl.base.dtype import DType

VOCABULARY_UNIT: Final = 64
"""`DEFAULT_VOCAB_PADDING_SIZE` of vocab_parallel_embedding.py: rows of a vocabulary are a multiple of it."""
SCALES: Final = ("_k_scale", "_prob_scale", "_q_scale", "_v_scale")
"""What every attention layer of 0.25 has for a cache in 8 bits, 1 where it is not."""
EXPERT_MAPS: Final = ("_expert_map", "expert_map")
"""What 0.25 and 0.11 call the list that says of every expert its number on this rank, or -1."""
SGLANG: Final = "sglang"
"""The profile whose arrays are SGLang's, as 0.5.23 has them, and not those of a version of vLLM."""
_FP32_ONE_BYTES: Final = struct.pack("<f", 1.0)
_PARAMETER_NAMES: Final = ("weight", "bias")


@value_class
class HeadRun:
    """Heads that lie one behind another in runs of as many rows; one run, or the same part of several groups."""

    groups: tuple[CompositeArray, ...]
    """Arrays of whole heads, as many in each."""
    rows: int
    """Of a head."""

    def __len__(self) -> int:
        return sum(group.shape[0] for group in self.groups) // self.rows

    def slice_heads(self, start: int, stop: int) -> CompositeArray:
        """Return the heads from `start` to `stop`."""
        each = self.groups[0].shape[0] // self.rows
        parts = []
        for number in range(start // each, -(-stop // each)):
            first, last = max(start - number * each, 0), min(stop - number * each, each)
            parts.append(self.groups[number].part(0, first * self.rows, last * self.rows))
        return join_arrays(parts)


@value_class
class QkvRows:
    """The rows of a projection to queries, keys and values."""

    queries: HeadRun
    keys: HeadRun
    values: HeadRun


@value_class
class VllmRank(schema.SchemaRank):
    """One rank, while its arrays are named."""

    layers: range
    """Those of its stage."""
    begins: bool
    """Whether its stage has the embedding, as the first does."""
    ends: bool
    """Whether its stage has the last norm, as the last does."""
    asks: bool
    """Whether its stage has the head, as the last does."""
    whole_experts: bool
    """Whether each expert is on one rank, whole; else each rank has a slice of all."""
    profile: str
    """Whose arrays these are, one of `arrays.PROFILES` or `SGLANG`."""
    latent: bool
    """Whether attention that can be latent is (`MLAAttention`); else it is done with whole heads."""
    vocabulary_dtype: DType
    """Of an embedding, where a rank has nothing but zeros of it."""
    bias_dtype: DType
    """Of biases that all ranks but the first have zeros of."""
    shared_last: bool
    """Whether the expert that all tokens share lies behind the others, in their arrays, as SGLang may have it."""

    @property
    def modern(self) -> bool:
        """Whether the arrays are those of 0.25 or later."""
        return self.profile != "0.11" and not self.for_sglang

    @property
    def for_sglang(self) -> bool:
        """Whether the arrays are SGLang's."""
        return self.profile == SGLANG

    @property
    def latest(self) -> bool:
        """Whether the arrays are those of 0.32."""
        return self.modern and self.profile != "0.25"

    def vocabulary(self, name: str, new: str = "") -> SchemaEntry:
        """Return this rank's rows of an embedding or a head, zeros behind the last token."""
        whole = self[name]
        padded = round_up_to_multiple(whole.shape[0], VOCABULARY_UNIT)
        if padded % self.tp:
            raise PartitionError(
                f"{name}: vLLM pads {whole.shape[0]:,} rows to {padded:,}, which tp={self.tp} does not divide",
                hint="use a power of two for --tp",
            )
        rows = whole.pad_rows(padded).share(0, self.index, self.tp)
        return (
            SchemaEntry(new or name, rows)
            if rows.pieces
            else build_zero_entry(new or name, rows.shape, self.vocabulary_dtype)
        )

    def same(self, *names: str) -> Iterator[SchemaEntry]:
        """Yield tensors of which every rank has the whole, under the same names.

        Those that the model has not, left out.
        """
        for name in names:
            if name in self:
                yield SchemaEntry(name, self[name])

    def sections(self, name: str, dim: int = 0) -> Iterator[tuple[CompositeArray, int]]:
        """Yield the sections of a dim of a tensor, in their order, and the elements of a head in each."""
        whole, start = self[name], 0
        for section in self.parts.model.tensors[self.parts.resolve(name)].spec.cuts[dim][0].sections:
            yield whole.part(dim, start, start + section.size), section.unit
            start += section.size

    def merged(self, new: str, parts: Sequence[str]) -> Iterator[SchemaEntry]:
        """Yield layers whose outputs are cut, as one: this rank's rows of the first, then of the next."""
        for kind in _PARAMETER_NAMES:
            if f"{parts[0]}.{kind}" in self:
                yield SchemaEntry(f"{new}.{kind}", join_arrays([self.rows(f"{part}.{kind}") for part in parts]))

    def attention(self, new: str, heads: QkvRows) -> SchemaEntry:
        """Return this rank's heads: queries, then keys, then values.

        Where there are fewer heads of keys and values than ranks, neighbours have the same one.
        """
        count, shared = len(heads.queries), len(heads.keys)
        if count % self.tp:
            raise PartitionError(f"{new}: {count} attention heads cannot be divided over tp={self.tp}")
        if shared % self.tp and self.tp % shared:
            raise PartitionError(
                f"{new}: {shared} key/value heads can neither be divided over tp={self.tp} nor repeated evenly"
            )
        first, last = self.index * count // self.tp, (self.index + 1) * count // self.tp
        start = self.index * shared // self.tp
        stop = start + max(shared // self.tp, 1)
        shares = (
            heads.queries.slice_heads(first, last),
            heads.keys.slice_heads(start, stop),
            heads.values.slice_heads(start, stop),
        )
        return SchemaEntry(new, concatenate_arrays(shares))

    def scales(self, module: str) -> Iterator[SchemaEntry]:
        """Yield the factors of an attention layer's cache."""
        if self.modern:
            for name in SCALES:
                yield build_constant_entry(f"{module}.{name}", (), BY_NAME["F32"], _FP32_ONE_BYTES)

    def held(self, experts: int) -> range:
        """Return the experts of which this rank has something: a run of whole ones, or all."""
        if not self.whole_experts:
            return range(experts)
        each, over = divmod(experts, self.tp)
        first = self.index * each + min(self.index, over)
        return range(first, first + each + (self.index < over))

    def inside(self, expert: CompositeArray, dim: int) -> CompositeArray:
        """Return this rank's part of an expert, which is cut along a dim if experts are not divided whole."""
        return expert if self.whole_experts else expert.share(dim, self.index, self.tp)

    def routed(self, module: str) -> str:
        """Return the module that has the arrays of the experts of `module`."""
        return f"{module}.routed_experts" if self.modern else module

    def experts(self, new: str, names: Sequence[str], parts: tuple[str, str, str]) -> Iterator[SchemaEntry]:
        """Yield the experts called `names`, whose gate, up and down projections are called `parts`."""
        gate, up, down = (f"{part}.weight" for part in parts)
        held = [names[number] for number in self.held(len(names))]
        if not held:
            raise PartitionError(f"{new}: {len(names)} experts are too few for ep={self.tp}")
        shapes = tuple(self[f"{names[0]}.{part}"].shape for part in (gate, up, down))
        share = (0, 1) if self.whole_experts else (self.index, self.tp)
        both, narrow = _stack_experts(shapes, len(held), *share)
        rows = [self.parts.resolve(f"{e}.{w}") for e in held for w in (gate, up)]
        columns = [self.parts.resolve(f"{e}.{down}") for e in held]
        yield SchemaEntry(f"{self.routed(new)}.w13_weight", _name_tensors(both, rows))
        yield SchemaEntry(f"{self.routed(new)}.w2_weight", _name_tensors(narrow, columns))
        yield from self.expert_map(new, len(names))

    def expert_map(self, new: str, experts: int) -> Iterator[SchemaEntry]:
        """Yield which expert is which of this rank's; later versions work it out (not a buffer since 0.28)."""
        if self.whole_experts and self.tp > 1 and not self.latest:
            held = self.held(experts)
            local = [number - held.start if number in held else -1 for number in range(experts)]
            data = struct.pack(f"<{experts}i", *local)
            name = EXPERT_MAPS[0 if self.modern else 1]
            yield build_constant_entry(f"{self.routed(new)}.{name}", (experts,), BY_NAME["I32"], data)


def concatenate_arrays(parts: Sequence[CompositeArray]) -> CompositeArray:
    """Return arrays one behind another along dim 0, their pieces apart.

    A rank's last query and its first key can be neighbours in the file. As one piece they would overlap what another
    rank has of the same key.
    """
    pieces: list[Piece] = []
    start = 0
    for part in parts:
        for piece in part.pieces:
            origin = (piece.view.origin[0] + start, *piece.view.origin[1:])
            pieces.append(replace(piece, view=replace(piece.view, origin=origin)))
        start += part.shape[0]
    return CompositeArray((start, *parts[0].shape[1:]), tuple(pieces))


@lru_cache(maxsize=64)  # the layers of a model are alike, and each may have hundreds of experts
def _stack_experts(
    shapes: tuple[tuple[int, ...], ...], count: int, index: int, ranks: int
) -> tuple[CompositeArray, CompositeArray]:
    """Return the arrays of `count` experts, of share `index` of `ranks` of each, whose projections have these shapes.

    Tensors are called by their numbers: the gate and up projection of each expert in turn, and the down projections.
    """
    gate, up, down = shapes
    both = [
        join_arrays(
            [
                CompositeArray.whole(str(2 * n + turn), shape).share(0, index, ranks)
                for turn, shape in enumerate((gate, up))
            ]
        )
        for n in range(count)
    ]
    return stack_arrays(both), stack_arrays(
        [CompositeArray.whole(str(n), down).share(1, index, ranks) for n in range(count)]
    )


def _name_tensors(pattern: CompositeArray, names: Sequence[str]) -> CompositeArray:
    """Return a composite whose tensors are numbers, with those that are called `names` in their place."""
    return CompositeArray(pattern.shape, tuple(Piece(names[int(p.tensor)], p.box, p.view) for p in pattern.pieces))


def build_zero_entry(name: str, shape: tuple[int, ...], dtype: DType) -> SchemaEntry:
    """Build an array that is made of no tensor."""
    return build_constant_entry(name, shape, dtype, _make_zero_bytes(dtype.nbytes(shape)))


@lru_cache(maxsize=16)
def _make_zero_bytes(size: int) -> bytes:
    """Return bytes that all layers share: of a large model they would be hundreds of megabytes."""
    return bytes(size)
