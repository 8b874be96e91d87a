"""Collects where the pieces of each tensor are, rank by rank, and puts them together into global tensors."""

from __future__ import annotations

from dataclasses import field, replace
from math import prod
from typing import TYPE_CHECKING

from shardctl.base.errors import CoverageError, SourceError
from shardctl.base.value import state_class, value_class
from shardctl.tensors.box import Box, list_flat_boxes
from shardctl.tensors.manifest import Chunk, ConstantFill, Region, Tensor, locate_dense_run, narrow_chunk

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardctl.base.dtype import DType
    from shardctl.libraries.deepspeed.geometry import ElementRun
    from shardctl.libraries.deepspeed.values import FileArray


@value_class
class TensorPartition:
    """Which boxes of a tensor each tensor-parallel rank has."""

    shape: tuple[int, ...]
    """That of the whole tensor."""
    parts: Mapping[int, tuple[tuple[Box, tuple[int, ...]], ...]]
    """By model-parallel rank: boxes of its own tensor, and where each begins in the whole."""


@state_class
class LocalTensor:
    """What one model-parallel rank has of a tensor, all data-parallel ranks together."""

    shape: tuple[int, ...]
    dtype: DType
    chunks: list[Chunk] = field(default_factory=list)
    """Boxes in this rank's own tensor."""
    runs: list[tuple[int, int, str]] = field(default_factory=list)
    """The stretches of its row-major elements that flat arrays hold, and in which file."""

    def check(self, name: str) -> None:
        """Raise CoverageError unless the stretches hold every element once."""
        free = 0
        for start, stop, file in sorted(self.runs):
            if start != free:
                what = "stored in no file" if start > free else "stored twice"
                box = list_flat_boxes(self.shape, min(start, free), max(start, free))[0]
                raise CoverageError(
                    f"{name} {list(self.shape)}: elements {box} are {what}",
                    hint=f"those that follow are in {file}; are the ranks' files of one save?",
                )
            free = stop
        if self.runs and free != prod(self.shape):
            box = list_flat_boxes(self.shape, free, prod(self.shape))[0]
            raise CoverageError(
                f"{name} {list(self.shape)}: elements {box} are stored in no file",
                hint=f"those before are in {max(self.runs)[2]}; is a rank's file of another save?",
            )


@state_class
class TensorPieces:
    """The pieces of several tensors, by name and model-parallel rank."""

    held: dict[str, dict[int, LocalTensor]] = field(default_factory=dict)

    def add_array(self, name: str, rank: int, array: FileArray) -> None:
        """Note that an array is all that `rank` has of a tensor."""
        local = self._local(name, rank, array.shape, array)
        local.chunks.append(Chunk(Box.whole(array.shape), array.dtype, _build_region(array), name))

    def add_run(self, name: str, rank: int, shape: tuple[int, ...], array: FileArray, run: ElementRun) -> None:
        """Note that a stretch of a flat array is one of the tensor, which is `shape` on `rank`.

        Raises CoverageError if the array ends before it.
        """
        local = self._local(name, rank, shape, array)
        if run.at + run.stop - run.start > array.size:
            box = list_flat_boxes(shape, run.start, run.stop)[0]
            raise CoverageError(
                f"{name} {list(shape)}: elements {box} should be in {array.file}, whose flat array has "
                f"{array.size:,} elements and not {run.at + run.stop - run.start:,}",
                hint="states that were offloaded to a disk are not in the checkpoint's own files",
            )
        local.runs.append((run.start, run.stop, array.file))
        strides, places = locate_dense_run(array.dtype, shape, run.start, run.stop)
        offset = array.offset + run.at * array.dtype.unit_bytes
        for box, first in places:
            local.chunks.append(Chunk(box, array.dtype, Region(array.file, offset + first, strides), name))

    def add_fill(self, name: str, rank: int, dtype: DType, content: bytes) -> None:
        """Note that a tensor of one element has this value."""
        local = self.held.setdefault(name, {}).setdefault(rank, LocalTensor((), dtype))
        local.chunks.append(Chunk(Box.whole(()), dtype, ConstantFill(content), name))

    def _local(self, name: str, rank: int, shape: tuple[int, ...], array: FileArray) -> LocalTensor:
        by_rank = self.held.get(name)
        if by_rank is None:
            by_rank = self.held[name] = {}
        local = by_rank.get(rank)
        if local is None:
            local = by_rank[rank] = LocalTensor(shape, array.dtype)
        elif local.shape != shape or local.dtype != array.dtype:
            before = f"{local.dtype} {list(local.shape)}"
            raise SourceError(f"{array.file}: {name!r} is {array.dtype} {list(shape)}, but {before} elsewhere")
        return local

    def empty(self, name: str, rank: int, shape: tuple[int, ...], dtype: DType) -> None:
        """Note a tensor that has no elements."""
        local = self.held.setdefault(name, {}).setdefault(rank, LocalTensor(shape, dtype))
        if not local.chunks:
            local.chunks.append(Chunk(Box.whole(shape), dtype, ConstantFill(bytes(dtype.unit_bytes)), name))

    def shapes(self, name: str) -> dict[int, tuple[int, ...]]:
        """Return the shape that each model-parallel rank has of a tensor."""
        return {rank: local.shape for rank, local in self.held[name].items()}

    def rank_tensor(self, name: str, rank: int, called: str) -> Tensor:
        """Return what one model-parallel rank has of a tensor, as a tensor of its own under the name `called`."""
        local = self.held[name][rank]
        local.check(name)
        return Tensor(called, local.dtype, local.shape, tuple(local.chunks))

    def tensor(self, name: str, called: str, cut: TensorPartition | None = None, ties: tuple[str, ...] = ()) -> Tensor:
        """Return the whole tensor, under the name `called`; without a cut there is one rank's, or all have the same."""
        by_rank = self.held[name]
        first = next(iter(by_rank.values()))
        for local in by_rank.values():
            local.check(name)
        if any(local.dtype != first.dtype for local in by_rank.values()):
            raise SourceError(
                f"{name!r} is of several types: {', '.join(sorted({str(p.dtype) for p in by_rank.values()}))}"
            )
        if cut is None:
            if any(local.shape != first.shape for local in by_rank.values()):
                raise SourceError(f"{name!r} has another shape on every rank")
            chunks = tuple(chunk for local in by_rank.values() for chunk in local.chunks)
            return Tensor(called, first.dtype, first.shape, chunks, ties=ties)
        chunks = tuple(
            moved
            for rank, local in by_rank.items()
            for chunk in local.chunks
            for moved in _move_chunk(chunk, cut, rank)
        )
        return Tensor(called, first.dtype, cut.shape, chunks, ties=ties)


def _move_chunk(chunk: Chunk, cut: TensorPartition, rank: int) -> Iterator[Chunk]:
    """Yield a chunk of one rank's tensor as chunks of the whole."""
    for box, origin in cut.parts[rank]:
        common = chunk.box.intersect(box)
        if common is not None:
            place = tuple(a - b + o for a, b, o in zip(common.origin, box.origin, origin, strict=True))
            whole = Box(place, common.shape)
            inside = whole.intersect(Box.whole(cut.shape))  # a vocabulary may be padded
            if inside is not None:
                begin = tuple(i - w + c for i, w, c in zip(inside.origin, place, common.origin, strict=True))
                yield replace(narrow_chunk(chunk, Box(begin, inside.shape)), box=inside)


def _build_region(array: FileArray) -> Region:
    return Region(array.file, array.offset, array.strides)
