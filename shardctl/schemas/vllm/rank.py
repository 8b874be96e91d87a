"""What one of vLLM's tensor-parallel ranks takes of a tensor, by the kind of layer that the tensor belongs to.

The cuts are those of vLLM 0.25.1, `model_executor/layers/linear.py` (`ColumnParallelLinear`, `RowParallelLinear`,
`QKVParallelLinear`), `vocab_parallel_embedding.py` and `fused_moe/` (`expert_map_manager.py` divides experts).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from shardctl.dtype import BY_NAME
from shardctl.errors import CutError
from shardctl.schemas import schema
from shardctl.schemas.composite import Composite, Entry, Piece, constant, join, multiple, stack

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardctl.dtype import DType

VOCABULARY_UNIT: Final = 64
"""`DEFAULT_VOCAB_PADDING_SIZE` of vocab_parallel_embedding.py: rows of a vocabulary are a multiple of it."""
SCALES: Final = ("_k_scale", "_prob_scale", "_q_scale", "_v_scale")
"""What every attention layer of 0.25 has for a cache in 8 bits, 1 where it is not."""
EXPERT_MAPS: Final = ("_expert_map", "expert_map")
"""What 0.25 and 0.11 call the list that says of every expert its number on this rank, or -1."""
_ONE: Final = struct.pack("<f", 1.0)
_KINDS: Final = ("weight", "bias")


@dataclass(frozen=True, slots=True)
class Run:
    """Heads that lie one behind another in runs of as many rows; one run, or the same part of several groups."""

    groups: tuple[Composite, ...]
    """Arrays of whole heads, as many in each."""
    rows: int
    """Of a head."""

    def __len__(self) -> int:
        return sum(group.shape[0] for group in self.groups) // self.rows

    def between(self, start: int, stop: int) -> Composite:
        """The heads from `start` to `stop`."""
        each = self.groups[0].shape[0] // self.rows
        parts = []
        for number in range(start // each, -(-stop // each)):
            first, last = max(start - number * each, 0), min(stop - number * each, each)
            parts.append(self.groups[number].part(0, first * self.rows, last * self.rows))
        return join(parts)


@dataclass(frozen=True, slots=True)
class Heads:
    """The rows of a projection to queries, keys and values."""

    queries: Run
    keys: Run
    values: Run


@dataclass(frozen=True, slots=True)
class Rank(schema.Rank):
    """One rank, while its arrays are named."""

    whole_experts: bool
    """Whether each expert is on one rank, whole; else each rank has a slice of all."""
    modern: bool
    """Whether the arrays are those of 0.25; else those of 0.11."""
    latent: bool
    """Whether attention that can be latent is (`MLAAttention`); else it is done with whole heads."""
    vocabulary_dtype: DType
    """Of an embedding, where a rank has nothing but zeros of it."""
    bias_dtype: DType
    """Of biases that all ranks but the first have zeros of."""

    def vocabulary(self, name: str, new: str = "") -> Entry:
        """This rank's rows of an embedding or a head, zeros behind the last token."""
        whole = self[name]
        padded = multiple(whole.shape[0], VOCABULARY_UNIT)
        if padded % self.tp:
            raise CutError(
                f"{name}: vLLM pads {whole.shape[0]:,} rows to {padded:,}, which tp={self.tp} does not divide",
                hint="use a power of two for --tp",
            )
        rows = whole.padded(padded).share(0, self.index, self.tp)
        return Entry(new or name, rows) if rows.pieces else zeros(new or name, rows.shape, self.vocabulary_dtype)

    def same(self, *names: str) -> Iterator[Entry]:
        """Tensors of which every rank has the whole, under the same names; those that the model has not, left out."""
        for name in names:
            if name in self:
                yield Entry(name, self[name])

    def merged(self, new: str, parts: Sequence[str]) -> Iterator[Entry]:
        """Layers whose outputs are cut, as one: this rank's rows of the first, then of the next."""
        for kind in _KINDS:
            if f"{parts[0]}.{kind}" in self:
                yield Entry(f"{new}.{kind}", join([self.rows(f"{part}.{kind}") for part in parts]))

    def attention(self, new: str, heads: Heads) -> Entry:
        """This rank's heads: queries, then keys, then values.

        Where there are fewer heads of keys and values than ranks, neighbours have the same one.
        """
        count, shared = len(heads.queries), len(heads.keys)
        if count % self.tp:
            raise CutError(f"{new}: {count} attention heads cannot be divided over tp={self.tp}")
        if shared % self.tp and self.tp % shared:
            raise CutError(
                f"{new}: {shared} key/value heads can neither be divided over tp={self.tp} nor repeated evenly"
            )
        first, last = self.index * count // self.tp, (self.index + 1) * count // self.tp
        start = self.index * shared // self.tp
        stop = start + max(shared // self.tp, 1)
        shares = (
            heads.queries.between(first, last),
            heads.keys.between(start, stop),
            heads.values.between(start, stop),
        )
        return Entry(new, behind(shares))

    def scales(self, module: str) -> Iterator[Entry]:
        """The factors of an attention layer's cache."""
        if self.modern:
            for name in SCALES:
                yield constant(f"{module}.{name}", (), BY_NAME["F32"], _ONE)

    def held(self, experts: int) -> range:
        """The experts of which this rank has something: a run of whole ones, the first ranks one more, or all."""
        if not self.whole_experts:
            return range(experts)
        each, over = divmod(experts, self.tp)
        first = self.index * each + min(self.index, over)
        return range(first, first + each + (self.index < over))

    def inside(self, expert: Composite, dim: int) -> Composite:
        """This rank's part of an expert, which is cut along a dim if experts are not divided whole."""
        return expert if self.whole_experts else expert.share(dim, self.index, self.tp)

    def routed(self, module: str) -> str:
        """The module that has the arrays of the experts of `module`."""
        return f"{module}.routed_experts" if self.modern else module

    def experts(self, new: str, names: Sequence[str], parts: tuple[str, str, str]) -> Iterator[Entry]:
        """The experts called `names`, whose gate, up and down projections are called `parts`."""
        gate, up, down = (f"{part}.weight" for part in parts)
        held = [names[number] for number in self.held(len(names))]
        if not held:
            raise CutError(f"{new}: {len(names)} experts are too few for ep={self.tp}")
        shapes = tuple(self[f"{names[0]}.{part}"].shape for part in (gate, up, down))
        share = (0, 1) if self.whole_experts else (self.index, self.tp)
        both, narrow = _stacked(shapes, len(held), *share)
        yield Entry(f"{self.routed(new)}.w13_weight", _named(both, [f"{e}.{w}" for e in held for w in (gate, up)]))
        yield Entry(f"{self.routed(new)}.w2_weight", _named(narrow, [f"{e}.{down}" for e in held]))
        yield from self.expert_map(new, len(names))

    def expert_map(self, new: str, experts: int) -> Iterator[Entry]:
        """Which expert is which of this rank's."""
        if self.whole_experts and self.tp > 1:
            held = self.held(experts)
            local = [number - held.start if number in held else -1 for number in range(experts)]
            data = struct.pack(f"<{experts}i", *local)
            name = EXPERT_MAPS[0 if self.modern else 1]
            yield constant(f"{self.routed(new)}.{name}", (experts,), BY_NAME["I32"], data)


def behind(parts: Sequence[Composite]) -> Composite:
    """Arrays one behind another along dim 0, their pieces apart.

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
    return Composite((start, *parts[0].shape[1:]), tuple(pieces))


@lru_cache(maxsize=64)  # the layers of a model are alike, and each may have hundreds of experts
def _stacked(shapes: tuple[tuple[int, ...], ...], count: int, index: int, ranks: int) -> tuple[Composite, Composite]:
    """The arrays of `count` experts, of share `index` of `ranks` of each, whose projections have these shapes.

    Tensors are called by their numbers: the gate and up projection of each expert in turn, and the down projections.
    """
    gate, up, down = shapes
    both = [
        join(
            [Composite.whole(str(2 * n + turn), shape).share(0, index, ranks) for turn, shape in enumerate((gate, up))]
        )
        for n in range(count)
    ]
    return stack(both), stack([Composite.whole(str(n), down).share(1, index, ranks) for n in range(count)])


def _named(pattern: Composite, names: Sequence[str]) -> Composite:
    """A composite whose tensors are numbers, with those that are called `names` in their place."""
    return Composite(pattern.shape, tuple(Piece(names[int(p.tensor)], p.box, p.view) for p in pattern.pieces))


def zeros(name: str, shape: tuple[int, ...], dtype: DType) -> Entry:
    """An array that is made of no tensor."""
    return constant(name, shape, dtype, _zeros(dtype.nbytes(shape)))


@lru_cache(maxsize=16)
def _zeros(size: int) -> bytes:
    """Bytes that all layers share: of a large model they would be hundreds of megabytes."""
    return bytes(size)
