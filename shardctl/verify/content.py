"""Reads every element of checkpoints: digests, replicas, oddities, and comparison of any two layouts."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardctl.bands import Band, ChunkIndex, band_view, fastest_dim, split
from shardctl.box import Box, subtract_all
from shardctl.cast import cast
from shardctl.copyplan import cover
from shardctl.digest import Sums, partial
from shardctl.manifest import Fill
from shardctl.workers import spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardctl.bands import Reader
    from shardctl.dtype import DType
    from shardctl.manifest import Chunk, Tensor
    from shardctl.workers import Effort

_EXPONENT: Final = {"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F800000, "F64": 0x7FF0000000000000}
"""The exponent bits of each float type: all set means NaN or infinity."""
_MANTISSA: Final = {"F16": 0x03FF, "BF16": 0x007F, "F32": 0x007FFFFF, "F64": 0x000FFFFFFFFFFFFF}


@dataclass(slots=True)
class Content:
    """What the elements of one tensor are."""

    sums: Sums
    nans: int = 0
    infinities: int = 0
    zero: bool = True
    """Whether every byte is zero."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How two storages of one tensor, or two tensors, differ."""

    tensor: str
    count: int
    """Elements that differ."""
    first: Box
    """The first of them, in row-major order."""
    file: str = ""
    """The file in which it lies."""
    other: str = ""
    """The file of the copy, or of the other tensor, that it differs from."""


@dataclass(frozen=True, slots=True)
class _Task:
    tensor: Tensor
    ours: ChunkIndex
    theirs: ChunkIndex
    box: Box


@dataclass(slots=True)
class _Tally:
    """What several threads found of one tensor."""

    counts: dict[str, int] = field(default_factory=dict)
    firsts: dict[str, tuple[tuple[int, ...], str, str]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, tensor: str, count: int, first: tuple[int, ...], files: tuple[str, str]) -> None:
        with self.lock:
            self.counts[tensor] = self.counts.get(tensor, 0) + count
            self.firsts[tensor] = min(self.firsts.get(tensor, (first, *files)), (first, *files))

    def differences(self) -> list[Difference]:
        found = []
        for name, count in self.counts.items():
            first, file, other = self.firsts[name]
            found.append(Difference(name, count, Box(first, (1,) * len(first)), file, other))
        return found


def measure(tensors: Sequence[Tensor], reader: Reader, effort: Effort) -> dict[str, Content]:
    """Read every element once: digest sums, NaNs, infinities, zeros.

    Raises CoverageError for a tensor with holes.
    """
    found = {tensor.name: Content(Sums.zero(tensor.dtype)) for tensor in tensors}
    lock = threading.Lock()

    def tasks() -> Iterator[_Task]:
        for tensor in tensors:
            index = ChunkIndex(cover(tensor))
            for box in split(tensor.shape, tensor.dtype, effort.block, fastest=fastest_dim(index.chunks)):
                yield _Task(tensor, index, index, box)

    def worker() -> Callable[[_Task], None]:
        band, buffer = Band(effort.block), np.empty(effort.block, np.uint8)

        def handle(task: _Task) -> None:
            tensor, nbytes = task.tensor, task.tensor.dtype.nbytes(task.box.shape)
            band.read(reader, task.ours, task.box, buffer)
            sums = partial(buffer[:nbytes], tensor.dtype, task.box, tensor.shape)
            nans, infinities = _odd(buffer[:nbytes], tensor.dtype)
            zero = not buffer[:nbytes].any()
            with lock:
                content = found[tensor.name]
                content.sums += sums
                content.nans += nans
                content.infinities += infinities
                content.zero &= zero
            effort.watcher.advance(nbytes)

        return handle

    spread(tasks(), worker, effort.threads, effort.stop)
    return found


def replicas(tensors: Sequence[Tensor], reader: Reader, effort: Effort) -> list[Difference]:
    """Compare every further copy of an element with its first; returns the tensors whose copies differ."""

    def tasks() -> Iterator[_Task]:
        for tensor in tensors:
            for further, first in redundant(tensor):
                ours, theirs, of = ChunkIndex([further]), ChunkIndex(first), further.box
                tile = fastest_dim([further])
                for box in split(of.shape, tensor.dtype, effort.block, fastest=tile, origin=of.origin):
                    yield _Task(tensor, ours, theirs, box)

    return _compare(tasks(), reader, reader, effort)


def redundant(tensor: Tensor) -> Iterator[tuple[Chunk, tuple[Chunk, ...]]]:
    """Every chunk that stores again what an earlier one stores, with the first copies."""
    if len(tensor.chunks) < 2:  # noqa: PLR2004 - one chunk has no replica
        return
    first = cover(tensor)
    owned = {(c.box, c.where) for c in first}
    for chunk in tensor.chunks:
        if isinstance(chunk.where, Fill) or (chunk.box, chunk.where) in owned or not chunk.box.size:
            continue
        mine = [c.box for c in first if not isinstance(c.where, Fill) and _same_array(c, chunk)]
        if subtract_all(chunk.box, mine):
            yield chunk, first


def _same_array(part: Chunk, chunk: Chunk) -> bool:
    if isinstance(part.where, Fill) or isinstance(chunk.where, Fill):
        return False
    return part.where.file == chunk.where.file and part.name == chunk.name and chunk.box.contains(part.box)


def compare(
    pairs: Sequence[tuple[Tensor, Tensor]],
    ours: Reader,
    theirs: Reader,
    effort: Effort,
) -> list[Difference]:
    """Compare tensors element by element, bits as bits, whatever their layouts.

    Where the types differ, `theirs` is cast to the type of `ours` first, as `reshard --dtype` would.
    """

    def tasks() -> Iterator[_Task]:
        for mine, other in pairs:
            a, b = ChunkIndex(cover(mine)), ChunkIndex(cover(other))
            tile = fastest_dim([*a.chunks, *b.chunks])
            wide = max(mine.dtype.bits, other.dtype.bits) / mine.dtype.bits
            for box in split(mine.shape, mine.dtype, int(effort.block / wide), fastest=tile):
                yield _Task(mine, a, b, box)

    return _compare(tasks(), ours, theirs, effort)


def _compare(tasks: Iterator[_Task], ours: Reader, theirs: Reader, effort: Effort) -> list[Difference]:
    tally = _Tally()

    def worker() -> Callable[[_Task], None]:
        band = Band(effort.block)
        first, second, third = (np.empty(effort.block, np.uint8) for _ in range(3))

        def handle(task: _Task) -> None:
            dtype, other = task.tensor.dtype, task.theirs.chunks[0].dtype
            nbytes = dtype.nbytes(task.box.shape)
            band.read(ours, task.ours, task.box, first)
            band.read(theirs, task.theirs, task.box, second)
            right = second[:nbytes]
            if other != dtype:
                cast(second[: other.nbytes(task.box.shape)], other, dtype, third[:nbytes])
                right = third[:nbytes]
            if not np.array_equal(first[:nbytes], right):
                _note(tally, task, first[:nbytes], right)
            effort.watcher.advance(nbytes)

        return handle

    spread(tasks, worker, effort.threads, effort.stop)
    return tally.differences()


def _note(tally: _Tally, task: _Task, left: NDArray[np.uint8], right: NDArray[np.uint8]) -> None:
    dtype = task.tensor.dtype
    different: Any = band_view(left, dtype, task.box) != band_view(right, dtype, task.box)
    position = np.unravel_index(int(np.argmax(different)), different.shape)
    per = dtype.unit_elements
    at = [int(p) for p in position]
    if at:
        at[-1] *= per
    first = tuple(o + p for o, p in zip(task.box.origin, at, strict=True))
    unit = Box(first, (*(1 for _ in first[:-1]), per) if first else ())
    tally.add(task.tensor.name, int(different.sum()), first, (_file(task.ours, unit), _file(task.theirs, unit)))


def _file(chunks: ChunkIndex, unit: Box) -> str:
    where = next(chunks.within(unit)).where
    return "" if isinstance(where, Fill) else where.file


def _odd(data: NDArray[np.uint8], dtype: DType) -> tuple[int, int]:
    """How many NaNs and infinities there are; 0 for types that are not IEEE-like floats."""
    if dtype.name not in _EXPONENT or not prod(data.shape):
        return 0, 0
    words = data.view(f"<u{dtype.unit_bytes}")
    special = (words & _EXPONENT[dtype.name]) == _EXPONENT[dtype.name]
    if not special.any():
        return 0, 0
    nans = int(np.count_nonzero(words[special] & _MANTISSA[dtype.name]))
    return nans, int(np.count_nonzero(special)) - nans
