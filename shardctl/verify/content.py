"""Reads every element of checkpoints: digests, replicas, oddities, and comparison of any two layouts."""

from __future__ import annotations

import threading
from dataclasses import field
from itertools import starmap
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from shardctl.base.dtype import CASTABLE
from shardctl.base.value import state_class, value_class
from shardctl.base.workers import run_in_threads
from shardctl.tensors.bands import (
    BandBuffer,
    ChunkIndex,
    allocate_aligned,
    find_fastest_dim,
    split_tensor_bands,
    view_band,
)
from shardctl.tensors.box import Box, subtract_all
from shardctl.tensors.cast import cast_elements
from shardctl.tensors.copyplan import cover_tensor
from shardctl.tensors.manifest import ConstantFill, first_byte, name_block, sort_naturally
from shardctl.tensors.small_tensors import TensorRun, locate_small_tensor, split_runs
from shardctl.tensors.turns import compute_band_sums, unfold_tensors
from shardctl.verify.cast_losses import CastLosses
from shardctl.verify.content_table import ContentTable, TensorContent, count_odd_values
from shardctl.verify.value_distance import DistanceSums, measure_distance
from shardctl.verify.value_statistics import COUNTABLE, ValueSums, compute_root, measure_values

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from numpy.typing import NDArray

    from shardctl.base.workers import ExecutionOptions
    from shardctl.tensors.bands import ByteReader
    from shardctl.tensors.manifest import Chunk, Tensor
    from shardctl.verify.value_distance import ValueDistance

    _PairHandler = Callable[["_ContentTask", NDArray[np.uint8], NDArray[np.uint8]], None]


@value_class
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
    distance: ValueDistance | None = None
    """None for types that are not floating-point numbers."""


@value_class
class _ContentTask:
    tensor: Tensor
    ours: ChunkIndex
    theirs: ChunkIndex
    box: Box
    number: int = 0
    """The tensor's place in a list."""


@state_class
class _DifferenceTally:
    """What several threads found of one tensor."""

    counts: dict[str, int] = field(default_factory=dict)
    firsts: dict[str, tuple[tuple[int, ...], str, str]] = field(default_factory=dict)
    sums: dict[str, DistanceSums] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(
        self, tensor: str, count: int, first: tuple[int, ...], files: tuple[str, str], sums: DistanceSums | None
    ) -> None:
        with self.lock:
            if sums is not None:
                self.sums[tensor] = self.sums.get(tensor, DistanceSums()).plus(sums)
            self.counts[tensor] = self.counts.get(tensor, 0) + count
            self.firsts[tensor] = min(self.firsts.get(tensor, (first, *files)), (first, *files))

    def differences(self) -> list[TensorDifference]:
        found = []
        for name, count in self.counts.items():
            first, file, other = self.firsts[name]
            distance = self.sums[name].divide() if name in self.sums else None
            found.append(TensorDifference(name, count, Box(first, (1,) * len(first)), file, other, distance))
        return found


@value_class
class LayerChange:
    """By how much the floating-point weights of a layer changed, or of a module that is outside of layers."""

    layer: str
    relative: float
    """The norm of the differences by that of the first checkpoint's values; infinite if those are all zero."""
    change: float
    """The norm of the differences of the values that are finite in both."""
    norm: float
    """The norm of the first checkpoint's finite values, in the type in which the two were compared."""
    tensors: int
    changed: int
    """Tensors of these in which a value differs."""
    not_finite: int
    """Elements that differ and are NaN or infinite in one of the two: no norm counts them."""


@state_class
class WeightChanges:
    """By how much weights changed, which several threads add up exactly, in any order.

    The norm of a layer needs the bands that did not change, too, and only if another band of the layer did: those are
    noted here, and read again at the end, so that equal checkpoints are compared as fast as without.
    """

    weights: Collection[str]
    """The tensors that count, without optimizer states."""
    reversed: bool = False
    """Whether the second checkpoint is the one whose bands come first."""
    _sums: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """By tensor, the sums of the squares of the differences and of the first checkpoint's values, and what they lack:
    how many elements that differ are not finite."""
    _equal: list[tuple[Tensor, Box, ByteReader]] = field(default_factory=list)
    """Without an index of the chunks, which would take more memory than the rest of a comparison of small tensors."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, tensor: str, change: int, values: int, not_finite: int = 0) -> None:
        """Add the sums of squares over a band, and how many of the elements that differ are not finite."""
        with self._lock:
            before = self._sums.get(tensor, (0, 0, 0))
            self._sums[tensor] = before[0] + change, before[1] + values, before[2] + not_finite

    def add_equal(self, tensor: Tensor, box: Box, reader: ByteReader) -> None:
        """Note a band that is equal in both."""
        with self._lock:
            self._equal.append((tensor, box, reader))

    def summarize(self, effort: ExecutionOptions) -> tuple[LayerChange, ...]:
        """Return the layers in which a weight changed: those with values that are not finite, then by their change."""
        changed = frozenset(self._sums)
        layers = {name_block(name) for name in changed}
        rest = [each for each in self._equal if name_block(each[0].name) in layers]
        if rest:
            effort.watcher.begin(sum(t.dtype.nbytes(b.shape) for t, b, _ in rest), phase="norms of changed layers")

        def tasks() -> Iterator[tuple[_ContentTask, ByteReader]]:
            before: Tensor | None = None
            for tensor, box, reader in rest:
                if tensor is not before:
                    before, index = tensor, ChunkIndex(cover_tensor(tensor))
                yield _ContentTask(tensor, index, index, box), reader

        def worker() -> Callable[[tuple[_ContentTask, ByteReader]], None]:
            band, buffer = BandBuffer(effort.block), allocate_aligned(effort.block)

            def handle(noted: tuple[_ContentTask, ByteReader]) -> None:
                task, reader = noted
                dtype = task.tensor.dtype
                data = buffer[task.ours.find_shift(task.box) :][: dtype.nbytes(task.box.shape)]
                band.read(reader, task.ours, task.box, data)
                self.add(task.tensor.name, 0, measure_values(data, dtype).squares)
                effort.watcher.advance(data.size)

            return handle

        run_in_threads(tasks(), worker, effort.threads, effort.stop)
        found: dict[str, list[int]] = {}
        for name, (change, values, not_finite) in self._sums.items():
            sums = found.setdefault(name_block(name), [0, 0, 0, 0, 0])
            for place, number in enumerate((change, values, 1, name in changed, not_finite)):
                sums[place] += number
        rows = []
        for layer, (change, values, *counts) in found.items():
            apart, norm = compute_root(change), compute_root(values)
            rows.append(LayerChange(layer, apart / norm if norm else inf, apart, norm, *counts))
        return tuple(sorted(rows, key=lambda row: (not row.not_finite, -row.relative, sort_naturally(row.layer))))


def measure_content(
    tensors: Sequence[Tensor], reader: ByteReader, effort: ExecutionOptions, *, values: bool, phase: str = ""
) -> ContentTable:
    """Read every element once: digest sums and, with `values`, NaNs, infinities and zeros.

    Raises CoverageError for a tensor with holes.
    """
    found = ContentTable(tensors)

    def add_band(task: _ContentTask, data: NDArray[np.uint8]) -> None:
        dtype = task.tensor.dtype
        sums = compute_band_sums(data, dtype, task.box, task.tensor)
        found.add(task.number, TensorContent(sums, *(count_odd_values(data, dtype) if values else (0, 0, False))))

    def add_run(run: TensorRun, data: NDArray[np.uint8]) -> None:
        found.add_run(run, data, values=values)

    _read_tensors(tensors, reader, effort, phase, add_band, add_run)
    return found


def measure_statistics(
    tensors: Sequence[Tensor], reader: ByteReader, effort: ExecutionOptions, *, phase: str = ""
) -> list[ValueSums | None]:
    """Read every element once, and add up the values of each tensor; None for a type that is not `COUNTABLE`.

    Raises CoverageError for a tensor with holes.
    """
    found = [ValueSums() if tensor.dtype.name in COUNTABLE else None for tensor in tensors]
    lock = threading.Lock()

    def add(number: int, data: NDArray[np.uint8]) -> None:
        if found[number] is None:
            return
        sums = measure_values(data, tensors[number].dtype)
        with lock:
            before = found[number]
            found[number] = sums if before is None else before.plus(sums)

    def add_run(run: TensorRun, data: NDArray[np.uint8]) -> None:
        for number in run.numbers:
            begin = first_byte(tensors[number])[1] - run.offset
            add(number, data[begin : begin + tensors[number].nbytes])

    _read_tensors(tensors, reader, effort, phase, lambda task, data: add(task.number, data), add_run)
    return found


def _read_tensors(
    tensors: Sequence[Tensor],
    reader: ByteReader,
    effort: ExecutionOptions,
    phase: str,
    take_band: Callable[[_ContentTask, NDArray[np.uint8]], None],
    take_run: Callable[[TensorRun, NDArray[np.uint8]], None],
) -> None:
    """Read every element once, in threads, and hand on the bytes of bands and of runs of small tensors.

    Small tensors that lie next to each other, in the order in which they are given, are read together.
    """
    effort.watcher.begin(sum(tensor.nbytes for tensor in tensors), phase=phase)

    def tasks() -> Iterator[_ContentTask | TensorRun]:
        places = ((locate_small_tensor(tensor, tensor.chunks), tensor.nbytes) for tensor in tensors)
        for run in split_runs(places, effort.block):
            if run.size:
                yield run
                continue
            (tensor,) = unfold_tensors(tensors[run.numbers.start])
            index = ChunkIndex(cover_tensor(tensor))
            fastest = find_fastest_dim(index.chunks)
            for box in split_tensor_bands(tensor, tensor.dtype, effort.block, fastest=fastest):
                yield _ContentTask(tensor, index, index, box, run.numbers.start)

    def worker() -> Callable[[_ContentTask | TensorRun], None]:
        band, buffer = BandBuffer(effort.block), allocate_aligned(effort.block)

        def handle(task: _ContentTask | TensorRun) -> None:
            if isinstance(task, TensorRun):
                file, offset = first_byte(tensors[task.numbers.start])
                effort.watcher.work_on(file)
                reader.read_at(file, offset, buffer[: task.size].data)
                take_run(task, buffer[: task.size])
                effort.watcher.advance(task.payload)
                return
            nbytes = task.tensor.dtype.nbytes(task.box.shape)
            effort.watcher.work_on(first_byte(task.tensor)[0])
            data = buffer[task.ours.find_shift(task.box) :][:nbytes]
            band.read(reader, task.ours, task.box, data)
            take_band(task, data)
            effort.watcher.advance(nbytes)

        return handle

    run_in_threads(tasks(), worker, effort.threads, effort.stop)


def compare_replicas(tensors: Sequence[Tensor], reader: ByteReader, effort: ExecutionOptions) -> list[TensorDifference]:
    """Compare every further copy of an element with its first; returns the tensors whose copies differ."""
    unfolded = (each for tensor in tensors if len(tensor.chunks) > 1 for each in unfold_tensors(tensor))
    copies = [(tensor, *pair) for tensor in unfolded for pair in list_redundant_chunks(tensor)]
    if not copies:
        return []
    effort.watcher.begin(sum(tensor.dtype.nbytes(c.box.shape) for tensor, c, _ in copies), phase="copies")

    def tasks() -> Iterator[_ContentTask]:
        for tensor, further, first in copies:
            ours, theirs = ChunkIndex([further]), ChunkIndex(first)
            tile = find_fastest_dim([further])
            for box in split_tensor_bands(tensor, tensor.dtype, effort.block, fastest=tile, within=further.box):
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
    phase: str = "",
    losses: CastLosses | None = None,
    changes: WeightChanges | None = None,
) -> list[TensorDifference]:
    """Compare tensors element by element, bits as bits, whatever their layouts.

    Where the types differ, `theirs` is cast to the type of `ours` first, as `reshard --dtype` would; `losses` gets what
    that lost, and `changes` where the values changed.
    """
    if not pairs:
        return []
    effort.watcher.begin(sum(mine.nbytes for mine, _ in pairs), phase=phase)
    return _compare_tasks(_split_pairs(pairs, effort), ours, theirs, effort, losses, changes)


def measure_distances(
    pairs: Sequence[tuple[Tensor, Tensor]], ours: ByteReader, theirs: ByteReader, effort: ExecutionOptions, phase: str
) -> CastLosses:
    """Measure how far tensors are from others of the same shapes; both are floats."""
    losses = CastLosses()
    effort.watcher.begin(sum(mine.nbytes for mine, _ in pairs), phase=phase)

    def prepare() -> _PairHandler:
        def measure(task: _ContentTask, left: NDArray[np.uint8], right: NDArray[np.uint8]) -> None:
            losses.measure(task.tensor.name, left, task.tensor.dtype, right, task.theirs.chunks[0].dtype)

        return measure

    _read_pairs(_split_pairs(pairs, effort), ours, theirs, effort, prepare)
    return losses


def _split_pairs(pairs: Sequence[tuple[Tensor, Tensor]], effort: ExecutionOptions) -> Iterator[_ContentTask]:
    for mine, other in starmap(unfold_tensors, pairs):
        a, b = ChunkIndex(cover_tensor(mine)), ChunkIndex(cover_tensor(other))
        tile = find_fastest_dim([*a.chunks, *b.chunks])
        wide = max(mine.dtype.bits, other.dtype.bits) / mine.dtype.bits
        for box in split_tensor_bands(mine, mine.dtype, int(effort.block / wide), fastest=tile):
            yield _ContentTask(mine, a, b, box)


def _compare_tasks(
    tasks: Iterator[_ContentTask],
    ours: ByteReader,
    theirs: ByteReader,
    effort: ExecutionOptions,
    losses: CastLosses | None = None,
    changes: WeightChanges | None = None,
) -> list[TensorDifference]:
    tally = _DifferenceTally()

    def prepare() -> _PairHandler:
        third = np.empty(effort.block, np.uint8)

        def compare(task: _ContentTask, left: NDArray[np.uint8], right: NDArray[np.uint8]) -> None:
            name, dtype, other = task.tensor.name, task.tensor.dtype, task.theirs.chunks[0].dtype
            if other != dtype:
                cast = third[: left.size]
                report = cast_elements(right, other, dtype, cast)
                if losses is not None:
                    losses.note_overflow(name, report.count_lost_values(name))
                    losses.measure(name, left, dtype, right, other)
                right = cast
            equal = np.array_equal(left, right)
            sums = None if equal else _note_difference(tally, task, left, right)
            if changes is None or name not in changes.weights or dtype.name not in CASTABLE:
                return
            if sums is None:
                changes.add_equal(task.tensor, task.box, ours)
            else:
                values = measure_values(right if changes.reversed else left, dtype).squares
                changes.add(name, sums.squares, values, sums.nonfinite)

        return compare

    _read_pairs(tasks, ours, theirs, effort, prepare)
    return tally.differences()


def _read_pairs(
    tasks: Iterator[_ContentTask],
    ours: ByteReader,
    theirs: ByteReader,
    effort: ExecutionOptions,
    prepare: Callable[[], _PairHandler],
) -> None:
    """Read both sides of every task, and hand them to what `prepare` makes for each thread."""

    def worker() -> Callable[[_ContentTask], None]:
        band, use = BandBuffer(effort.block), prepare()
        ours_memory, theirs_memory = allocate_aligned(effort.block), allocate_aligned(effort.block)

        def handle(task: _ContentTask) -> None:
            dtype, other = task.tensor.dtype, task.theirs.chunks[0].dtype
            nbytes = dtype.nbytes(task.box.shape)
            effort.watcher.work_on(first_byte(task.tensor)[0])
            left = ours_memory[task.ours.find_shift(task.box) :][:nbytes]
            right = theirs_memory[task.theirs.find_shift(task.box) :][: other.nbytes(task.box.shape)]
            band.read(ours, task.ours, task.box, left)
            band.read(theirs, task.theirs, task.box, right)
            use(task, left, right)
            effort.watcher.advance(nbytes)

        return handle

    run_in_threads(tasks, worker, effort.threads, effort.stop)


def _note_difference(
    tally: _DifferenceTally, task: _ContentTask, left: NDArray[np.uint8], right: NDArray[np.uint8]
) -> DistanceSums | None:
    dtype = task.tensor.dtype
    different: Any = view_band(left, dtype, task.box) != view_band(right, dtype, task.box)
    position = np.unravel_index(int(np.argmax(different)), different.shape)
    per = dtype.unit_elements
    at = [int(p) for p in position]
    if at:
        at[-1] *= per
    first = tuple(o + p for o, p in zip(task.box.origin, at, strict=True))
    unit = Box(first, (*(1 for _ in first[:-1]), per) if first else ())
    files = _find_file(task.ours, unit), _find_file(task.theirs, unit)
    if task.tensor.turns > 1:
        first = (*first[:-2], first[-2] * task.tensor.turns + first[-1])
    sums = measure_distance(left, right, dtype, task.theirs.chunks[0].dtype)
    tally.add(task.tensor.name, int(different.sum()), first, files, sums)
    return sums


def _find_file(chunks: ChunkIndex, unit: Box) -> str:
    where = next(chunks.within(unit)).where
    return "" if isinstance(where, ConstantFill) else where.file
