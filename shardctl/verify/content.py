"""Reads every element of checkpoints: digests, replicas, oddities, and comparison of any two layouts."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardctl.bands import BandBuffer, ChunkIndex, find_fastest_dim, split_bands, view_band
from shardctl.box import Box, subtract_all
from shardctl.cast import cast_elements
from shardctl.copyplan import cover_tensor
from shardctl.digest import DigestSums, compute_box_sums
from shardctl.manifest import ConstantFill
from shardctl.workers import run_in_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardctl.bands import ByteReader
    from shardctl.dtype import DType
    from shardctl.manifest import Chunk, Tensor
    from shardctl.workers import ExecutionOptions

_EXPONENT: Final = {"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F800000, "F64": 0x7FF0000000000000}
"""The exponent bits of each float type: all set means NaN or infinity."""
_MANTISSA: Final = {"F16": 0x03FF, "BF16": 0x007F, "F32": 0x007FFFFF, "F64": 0x000FFFFFFFFFFFFF}


@dataclass(slots=True)
class TensorContent:
    """What the elements of one tensor are."""

    sums: DigestSums
    nans: int = 0
    infinities: int = 0
    zero: bool = True
    """Whether every byte is zero."""


@dataclass(frozen=True, slots=True)
class TensorDifference:
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
class _ContentTask:
    tensor: Tensor
    ours: ChunkIndex
    theirs: ChunkIndex
    box: Box


@dataclass(slots=True)
class _DifferenceTally:
    """What several threads found of one tensor."""

    counts: dict[str, int] = field(default_factory=dict)
    firsts: dict[str, tuple[tuple[int, ...], str, str]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, tensor: str, count: int, first: tuple[int, ...], files: tuple[str, str]) -> None:
        with self.lock:
            self.counts[tensor] = self.counts.get(tensor, 0) + count
            self.firsts[tensor] = min(self.firsts.get(tensor, (first, *files)), (first, *files))

    def differences(self) -> list[TensorDifference]:
        found = []
        for name, count in self.counts.items():
            first, file, other = self.firsts[name]
            found.append(TensorDifference(name, count, Box(first, (1,) * len(first)), file, other))
        return found


def measure_content(
    tensors: Sequence[Tensor], reader: ByteReader, effort: ExecutionOptions
) -> dict[str, TensorContent]:
    """Read every element once: digest sums, NaNs, infinities, zeros.

    Raises CoverageError for a tensor with holes.
    """
    found = {tensor.name: TensorContent(DigestSums.zero(tensor.dtype)) for tensor in tensors}
    lock = threading.Lock()

    def tasks() -> Iterator[_ContentTask]:
        for tensor in tensors:
            index = ChunkIndex(cover_tensor(tensor))
            for box in split_bands(tensor.shape, tensor.dtype, effort.block, fastest=find_fastest_dim(index.chunks)):
                yield _ContentTask(tensor, index, index, box)

    def worker() -> Callable[[_ContentTask], None]:
        band, buffer = BandBuffer(effort.block), np.empty(effort.block, np.uint8)

        def handle(task: _ContentTask) -> None:
            tensor, nbytes = task.tensor, task.tensor.dtype.nbytes(task.box.shape)
            band.read(reader, task.ours, task.box, buffer)
            sums = compute_box_sums(buffer[:nbytes], tensor.dtype, task.box, tensor.shape)
            nans, infinities = _count_nonfinite(buffer[:nbytes], tensor.dtype)
            zero = not buffer[:nbytes].any()
            with lock:
                content = found[tensor.name]
                content.sums += sums
                content.nans += nans
                content.infinities += infinities
                content.zero &= zero
            effort.watcher.advance(nbytes)

        return handle

    run_in_threads(tasks(), worker, effort.threads, effort.stop)
    return found


def compare_replicas(tensors: Sequence[Tensor], reader: ByteReader, effort: ExecutionOptions) -> list[TensorDifference]:
    """Compare every further copy of an element with its first; returns the tensors whose copies differ."""

    def tasks() -> Iterator[_ContentTask]:
        for tensor in tensors:
            for further, first in list_redundant_chunks(tensor):
                ours, theirs, of = ChunkIndex([further]), ChunkIndex(first), further.box
                tile = find_fastest_dim([further])
                for box in split_bands(of.shape, tensor.dtype, effort.block, fastest=tile, origin=of.origin):
                    yield _ContentTask(tensor, ours, theirs, box)

    return _compare_tasks(tasks(), reader, reader, effort)


def list_redundant_chunks(tensor: Tensor) -> Iterator[tuple[Chunk, tuple[Chunk, ...]]]:
    """List every chunk that stores again what an earlier one stores, with the first copies."""
    if len(tensor.chunks) < 2:  # noqa: PLR2004 - one chunk has no replica
        return
    first = cover_tensor(tensor)
    owned = {(c.box, c.where) for c in first}
    for chunk in tensor.chunks:
        if isinstance(chunk.where, ConstantFill) or (chunk.box, chunk.where) in owned or not chunk.box.size:
            continue
        mine = [c.box for c in first if not isinstance(c.where, ConstantFill) and _is_same_array(c, chunk)]
        if subtract_all(chunk.box, mine):
            yield chunk, first


def _is_same_array(part: Chunk, chunk: Chunk) -> bool:
    if isinstance(part.where, ConstantFill) or isinstance(chunk.where, ConstantFill):
        return False
    return part.where.file == chunk.where.file and part.name == chunk.name and chunk.box.contains(part.box)


def compare_tensors(
    pairs: Sequence[tuple[Tensor, Tensor]],
    ours: ByteReader,
    theirs: ByteReader,
    effort: ExecutionOptions,
) -> list[TensorDifference]:
    """Compare tensors element by element, bits as bits, whatever their layouts.

    Where the types differ, `theirs` is cast to the type of `ours` first, as `reshard --dtype` would.
    """

    def tasks() -> Iterator[_ContentTask]:
        for mine, other in pairs:
            a, b = ChunkIndex(cover_tensor(mine)), ChunkIndex(cover_tensor(other))
            tile = find_fastest_dim([*a.chunks, *b.chunks])
            wide = max(mine.dtype.bits, other.dtype.bits) / mine.dtype.bits
            for box in split_bands(mine.shape, mine.dtype, int(effort.block / wide), fastest=tile):
                yield _ContentTask(mine, a, b, box)

    return _compare_tasks(tasks(), ours, theirs, effort)


def _compare_tasks(
    tasks: Iterator[_ContentTask], ours: ByteReader, theirs: ByteReader, effort: ExecutionOptions
) -> list[TensorDifference]:
    tally = _DifferenceTally()

    def worker() -> Callable[[_ContentTask], None]:
        band = BandBuffer(effort.block)
        first, second, third = (np.empty(effort.block, np.uint8) for _ in range(3))

        def handle(task: _ContentTask) -> None:
            dtype, other = task.tensor.dtype, task.theirs.chunks[0].dtype
            nbytes = dtype.nbytes(task.box.shape)
            band.read(ours, task.ours, task.box, first)
            band.read(theirs, task.theirs, task.box, second)
            right = second[:nbytes]
            if other != dtype:
                cast_elements(second[: other.nbytes(task.box.shape)], other, dtype, third[:nbytes])
                right = third[:nbytes]
            if not np.array_equal(first[:nbytes], right):
                _note_difference(tally, task, first[:nbytes], right)
            effort.watcher.advance(nbytes)

        return handle

    run_in_threads(tasks, worker, effort.threads, effort.stop)
    return tally.differences()


def _note_difference(
    tally: _DifferenceTally, task: _ContentTask, left: NDArray[np.uint8], right: NDArray[np.uint8]
) -> None:
    dtype = task.tensor.dtype
    different: Any = view_band(left, dtype, task.box) != view_band(right, dtype, task.box)
    position = np.unravel_index(int(np.argmax(different)), different.shape)
    per = dtype.unit_elements
    at = [int(p) for p in position]
    if at:
        at[-1] *= per
    first = tuple(o + p for o, p in zip(task.box.origin, at, strict=True))
    unit = Box(first, (*(1 for _ in first[:-1]), per) if first else ())
    tally.add(
        task.tensor.name, int(different.sum()), first, (_find_file(task.ours, unit), _find_file(task.theirs, unit))
    )


def _find_file(chunks: ChunkIndex, unit: Box) -> str:
    where = next(chunks.within(unit)).where
    return "" if isinstance(where, ConstantFill) else where.file


def _count_nonfinite(data: NDArray[np.uint8], dtype: DType) -> tuple[int, int]:
    """Count how many NaNs and infinities there are; 0 for types that are not IEEE-like floats."""
    if dtype.name not in _EXPONENT or not prod(data.shape):
        return 0, 0
    words = data.view(f"<u{dtype.unit_bytes}")
    special = (words & _EXPONENT[dtype.name]) == _EXPONENT[dtype.name]
    if not special.any():
        return 0, 0
    nans = int(np.count_nonzero(words[special] & _MANTISSA[dtype.name]))
    return nans, int(np.count_nonzero(special)) - nans
