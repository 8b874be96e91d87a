"""Reads what each rank holds of a checkpoint, from that rank's own files only."""

from __future__ import annotations

import zlib
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import CoverageError
from shardctl.base.value import state_class, value_class
from shardctl.running.forward.lazy_state_dict import LazyTensor, build_entries, read_box
from shardctl.running.forward.team import RankTeam
from shardctl.tensors.bands import ChunkIndex
from shardctl.tensors.box import Box, make_disjoint, subtract_all
from shardctl.tensors.manifest import Region, narrow_chunk
from shardctl.tensors.pieces import PlacedCheckpoint
from shardctl.verify.finding import CheckFinding
from shardctl.verify.rank_files import find_rank

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardctl.models import Model
    from shardctl.tensors.bands import ByteReader
    from shardctl.tensors.manifest import Manifest, Tensor
    from shardctl.tensors.mesh import Mesh

Array = Any


@value_class
class TensorShards:
    """What one rank is to hold of one tensor, and what its own files have of it."""

    rank: int
    boxes: tuple[Box, ...]
    """What the mesh and the rules give it."""
    own: ChunkIndex
    """What its files hold, each element once."""


class HeldTensor(LazyTensor):
    """A tensor put together from what each rank holds."""

    __slots__ = ("_compared", "_shards", "holdings")

    def __init__(self, name: str, tensor: Tensor, holdings: Sequence[TensorShards], shards: CheckpointShards) -> None:
        super().__init__(name, tensor.dtype, tensor.shape)
        self.holdings, self._shards = tuple(holdings), shards
        self._compared = False

    def read(self, box: Box) -> Array:
        """Return the elements of `box`; the first time that all are read, the copies of several ranks are compared.

        Raises CoverageError, naming the rank, if one lacks what it should hold.
        """
        if self._shards.index is not None:
            return self._read_own(box, self._shards.index)
        compare = not self._compared and box.size == Box.whole(self._shape).size
        self._compared |= compare
        return self.read_from(self.holdings, box, compare=compare)

    def _read_own(self, box: Box, index: int) -> Array:
        """Read the elements of `box`, from the ranks with one tp index if they hold them all."""
        mine = [h for h in self.holdings if self._shards.placed.mesh.coordinate(h.rank)["tp"] == index]
        rest = subtract_all(box, [held for holding in mine for held in holding.boxes])
        if rest:
            nbytes = sum(self.elements.nbytes(each.shape) for each in rest)
            self._shards.foreign[self.name] = self._shards.foreign.get(self.name, 0) + nbytes
        return self.read_from(self.holdings if rest else mine, box)

    def read_from(
        self,
        holdings: Iterable[TensorShards],
        box: Box,
        *,
        compare: bool = False,
        ranks: tuple[int, ...] | None = None,
    ) -> Array:
        """Read the elements of `box` from what some ranks hold, for `ranks` or for all."""
        import torch

        result = torch.empty(box.shape, dtype=self.dtype)
        missing, first = ([box] if box.size else []), -1
        for holding in holdings:
            for held in holding.boxes:
                common = held.intersect(box) if box.size else None
                if common is None:
                    continue
                new = any(common.intersect(each) for each in missing)
                if not new and not compare:
                    continue
                part = self._shards.team.held(holding.rank, partial(self._part, holding, common), ranks)
                place = result[common.slices(box.origin)]
                if new:
                    place.copy_(part)
                    missing = [piece for each in missing for piece in each.subtract(common)]
                    first = holding.rank if first < 0 else first
                elif not _has_same_bits(place, part):
                    self._shards.note_difference(self.name, holding.rank, first, common)
        if missing:
            raise CoverageError(f"{self.name}: no rank is to hold {missing[0]}")
        return result

    def read_copy(self, holdings: Sequence[TensorShards], ranks: tuple[int, ...], box: Box) -> Array:
        """Read the elements of `box` from what some of `ranks` hold, and note a sum of them to compare copies by."""
        result = self.read_from(holdings, box, compare=True, ranks=ranks)
        if box.size and holdings:
            found = zlib.crc32(result.contiguous().reshape(-1).view(_bytes()).numpy())
            self._shards.compare_copies({(self.name, box): (holdings[0].rank, found)})
        return result

    def _part(self, holding: TensorShards, box: Box) -> Array:
        if sum(chunk.box.size for chunk in holding.own.within(box)) != box.size:
            rest = subtract_all(box, [chunk.box for chunk in holding.own.chunks])
            at = self._shards.placed.mesh.label(holding.rank)
            raise CoverageError(f"rank {holding.rank} ({at}) is to hold {self.name} {rest[0]}, and its files do not")
        return read_box(self._shards.reader, holding.own, box)


def _bytes() -> Any:  # noqa: ANN401 - a torch.dtype
    import torch

    return torch.uint8


def _has_same_bits(one: Array, other: Array) -> bool:
    import torch

    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)


@state_class
class CheckpointShards:
    """A checkpoint that a mesh holds."""

    manifest: Manifest
    """Bound to the names of `model`."""
    reader: ByteReader
    model: Model
    placed: PlacedCheckpoint
    team: RankTeam = field(default_factory=RankTeam)
    index: int | None = None
    """Of a rank along tp that reads for itself: where its files have what it asks for, they alone are read."""
    foreign: dict[str, int] = field(default_factory=dict)
    """Bytes, by name, that this rank asked for and others hold."""
    findings: list[CheckFinding] = field(default_factory=list)
    """Copies that differ, and what ranks lack, found while reading."""
    sums: dict[tuple[str, Box], tuple[int, int]] = field(default_factory=dict)
    """By name and box, the first rank that was read and a sum of what it has."""
    _holdings: dict[str, list[tuple[TensorShards, tuple[str, ...]]]] = field(default_factory=dict)
    """By tensor name, each with the names that the rank has it by."""

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        reader: ByteReader,
        model: Model,
        mesh: Mesh,
        stages: tuple[int, ...],
        team: RankTeam | None = None,
    ) -> CheckpointShards:
        """Return the shards of `manifest` on `mesh`, whose pipeline stages have so many layers."""
        specs = {name: model.tensors[name].spec for name in manifest.tensors}
        placed = PlacedCheckpoint(tuple(manifest.tensors.values()), specs, mesh, stages or (model.layers,))
        shards = cls(manifest, reader, model, placed, team or RankTeam())
        own = {name: _group_by_rank(tensor) for name, tensor in manifest.tensors.items()}
        for rank, held in shards.placed.ranks():
            for piece in held:
                name = piece.tensor.name
                holding = TensorShards(rank, piece.boxes, own[name].get(rank, _EMPTY_CHUNK_INDEX))
                shards._holdings.setdefault(name, []).append((holding, piece.names))
        return shards

    def note_difference(self, name: str, rank: int, first: int, box: Box) -> None:
        """Note that a rank's copy is another than that of the first rank."""
        at = self.placed.mesh.label(rank)
        message = f"rank {rank} ({at}) has another copy of {name} {box} than rank {first}"
        self.findings.append(CheckFinding("error", "replicas", message, name, box=str(box)))

    def note_missing(self, error: CoverageError) -> None:
        """Note that a rank lacks what it should hold."""
        self.findings.append(CheckFinding("error", "forward", error.message))

    def compare_copies(self, sums: Mapping[tuple[str, Box], tuple[int, int]]) -> None:
        """Compare sums of what ranks have of tensors, by name and box, with those of the first rank that has it."""
        for (name, box), (rank, found) in sums.items():
            first, expected = self.sums.setdefault((name, box), (rank, found))
            if found != expected:
                self.note_difference(name, rank, first, box)

    def entries(self) -> dict[str, LazyTensor]:
        """Return the state dict of transformers' class, put together from the ranks, and tensors that it lacks."""
        return build_entries(self.manifest, self.model, self.tensor)

    def tensor(self, name: str, called: str) -> HeldTensor:
        """Return a tensor from the ranks that have it by the name `called`, and from their arrays of that name."""
        tensor, found = self.manifest.tensors[name], self._holdings.get(name, [])
        if tensor.ties:
            found = [each for each in found if called in each[1]] or found
        holdings = [holding for holding, _ in found]
        if tensor.ties and all(any(c.name == called for c in h.own.chunks) for h in holdings):
            holdings = [replace(h, own=ChunkIndex([c for c in h.own.chunks if c.name == called])) for h in holdings]
        return HeldTensor(called, tensor, [replace(h, own=_drop_duplicates(h.own)) for h in holdings], self)


_EMPTY_CHUNK_INDEX: Final = ChunkIndex([])


def _group_by_rank(tensor: Tensor) -> dict[int, ChunkIndex]:
    found: dict[int, list[Any]] = {}
    for chunk in tensor.chunks:
        rank = find_rank(chunk.where.file) if isinstance(chunk.where, Region) else None
        if rank is not None:
            found.setdefault(rank, []).append(chunk)
    return {rank: ChunkIndex(chunks) for rank, chunks in found.items()}


def _drop_duplicates(own: ChunkIndex) -> ChunkIndex:
    """Return the same chunks without what they hold twice."""
    boxes = [chunk.box for chunk in own.chunks]
    if len(boxes) == 1:
        return own
    return ChunkIndex([narrow_chunk(own.chunks[at], box) for at, box in make_disjoint(boxes)])
