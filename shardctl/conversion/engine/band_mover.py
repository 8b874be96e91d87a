"""Moves bands, and runs of small tensors: what one thread reads, digests, casts and writes, and its buffers."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from shardctl.base.value import value_class
from shardctl.conversion.engine.journal import JournalEntry
from shardctl.conversion.engine.small_copies import move_run
from shardctl.tensors.bands import PAGE, BandBuffer, ChunkIndex, allocate_aligned, find_page_shift, find_whole_region
from shardctl.tensors.cast import cast_elements
from shardctl.tensors.digest import DigestSums, compute_box_sums
from shardctl.tensors.manifest import ConstantFill, first_byte
from shardctl.tensors.turns import compute_band_sums

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardctl.base.dtype import DType
    from shardctl.conversion.engine.block_sharing import BlockSharer
    from shardctl.conversion.engine.budget import HostMemoryBudget
    from shardctl.conversion.engine.journal import Key
    from shardctl.storage import WriteTarget
    from shardctl.tensors.bands import ByteReader, ByteWriter
    from shardctl.tensors.box import Box
    from shardctl.tensors.copyplan import TensorCopy
    from shardctl.tensors.manifest import Chunk
    from shardctl.tensors.small_tensors import TensorRun


@value_class
class BandTask:
    """A band of a tensor to move."""

    key: Key
    copy: TensorCopy
    reads: ChunkIndex
    writes: ChunkIndex
    box: Box
    counted: bool
    """Whether its digest sums count here, and not at another worker."""


class BandMover:
    """One thread's buffers, and what it does with them."""

    def __init__(
        self, budget: HostMemoryBudget, number: int, gap: int, target: WriteTarget, sharer: BlockSharer | None = None
    ) -> None:
        self._target, self._sharer = target, sharer
        self._writer: ByteWriter = target if sharer is None else sharer
        self._turn = number / budget.threads
        self._band = BandBuffer(budget.block, gap)
        self._data = self._read = allocate_aligned(budget.block)
        self._cast = np.empty(0, np.uint8)
        self._aside = np.empty(0, np.uint8)
        self._aside_key: tuple[Key, DType] | None = None
        self._lost = 0
        """Finite values of the band at hand that casts made infinite."""
        self.written: Counter[str] = Counter()

    def move(self, task: BandTask, source: ByteReader) -> JournalEntry:
        """Read a band and write it everywhere; leaves the bytes written by file in `written`."""
        tensor, wanted = task.copy.source, task.copy.target
        self._aside_key = None
        chunks = list(task.writes.within(task.box))
        shift = find_page_shift(chunks, task.box, wanted.dtype)
        cast = wanted.dtype != tensor.dtype
        begin = shift if shift and not cast else task.reads.find_shift(task.box)
        data = self._data[begin:][: tensor.dtype.nbytes(task.box.shape)]
        found = self._band.read(source, task.reads, task.box, data)
        assert found == task.box.size, f"{tensor.name} {task.box}: read {found} elements"  # noqa: S101
        if self._sharer is not None:
            self._follow_band(self._sharer, task, data)
        read_sums = compute_band_sums(data, tensor.dtype, task.box, tensor)
        sums, self._lost = read_sums, 0
        self._read = data
        if cast:
            nbytes = wanted.dtype.nbytes(task.box.shape)
            data = self._cast_buffer(nbytes)[shift:][:nbytes]
            self._lost = cast_elements(self._read, tensor.dtype, wanted.dtype, data).count_lost_values(tensor.name)
            sums = compute_band_sums(data, wanted.dtype, task.box, tensor)
        self.written = Counter()
        turn = int(self._turn * len(chunks))  # each thread begins with another file, so that they seldom meet
        for chunk in chunks[turn:] + chunks[:turn]:
            if not isinstance(chunk.where, ConstantFill):
                given = data if chunk.dtype == wanted.dtype else self._cast_aside(task, chunk.dtype)
                self.written[chunk.where.file] += self._band.write(self._writer, chunk, task.box, given)
        return JournalEntry(read_sums, sums, self._lost)

    @staticmethod
    def _follow_band(sharer: BlockSharer, task: BandTask, data: NDArray[np.uint8]) -> None:
        """Tell of which file memory has the bytes now, if a file has the whole band as it is."""
        found = list(task.reads.within(task.box))
        where = find_whole_region(found[0], task.box) if len(found) == 1 else None
        if where is None:
            sharer.forget()
        else:
            sharer.note_source_data(data, where.file, where.offset)

    def move_run(self, run: TensorRun, copies: Sequence[TensorCopy], source: ByteReader) -> list[DigestSums]:
        """Move small tensors, and return the sums of each; leaves the bytes written by file in `written`."""
        data, scratch = self._data, self._band.scratch
        if self._sharer is not None:
            self._sharer.note_source_data(data[: run.size], first_byte(copies[0].source)[0], run.offset)
        sums, self.written = move_run(run, copies, source, self._writer, data=data, scratch=scratch, turn=self._turn)
        return sums

    def _cast_aside(self, task: BandTask, dtype: DType) -> NDArray[np.uint8]:
        """Return the band in the type of a copy that is written aside; bands of one task share it."""
        key = (task.key, dtype)
        if self._aside_key != key:
            nbytes, have = dtype.nbytes(task.box.shape), task.copy.source.dtype
            if self._aside.nbytes < nbytes:
                self._aside = np.empty(0, np.uint8)
                self._aside = np.empty(nbytes, np.uint8)
            report = cast_elements(self._read, have, dtype, self._aside[:nbytes])
            self._lost += report.count_lost_values(task.copy.source.name)
            self._aside_key = key
        return self._aside

    def _cast_buffer(self, nbytes: int) -> NDArray[np.uint8]:
        """Return room for the output of a cast and a page more.

        It is made once, and made larger only for a cast that widens more.
        """
        if self._cast.nbytes < nbytes + PAGE:
            self._cast = np.empty(0, np.uint8)  # the old one goes before the new one comes
            self._cast = allocate_aligned(nbytes)
        return self._cast

    def take_shared(self) -> int:
        """Return how many bytes share the blocks of the source since this was last asked."""
        return self._sharer.take_shared() if self._sharer is not None else 0

    def sum_source(self, task: BandTask, source: ByteReader) -> DigestSums:
        """Read a band, and return its digest sums; writes nothing."""
        tensor = task.copy.source
        data = self._data[: tensor.dtype.nbytes(task.box.shape)]
        found = self._band.read(source, task.reads, task.box, data)
        assert found == task.box.size, f"{tensor.name} {task.box}: read {found} elements"  # noqa: S101
        return compute_band_sums(data, tensor.dtype, task.box, tensor)

    def intact(self, task: BandTask, expected: DigestSums) -> bool:
        """Return whether every copy of the band that an earlier run wrote still has the journal's digest."""
        by_box: dict[Box, list[DigestSums]] = {}
        parts: dict[Box, list[Chunk]] = {}
        dtype, wanted = task.copy.target.dtype, task.copy.target
        nbytes = dtype.nbytes(task.box.shape)
        buffer = self._data if nbytes <= self._data.nbytes else self._cast_buffer(nbytes)
        for chunk in task.writes.within(task.box):
            if isinstance(chunk.where, ConstantFill):
                continue
            if chunk.aside:
                return False  # the journal has no digest of it; copying again is always right
            if wanted.turns > 1:
                parts.setdefault(chunk.box, []).append(chunk)
                continue
            self._band.read(self._target, ChunkIndex([chunk]), chunk.box, buffer)
            sums = compute_box_sums(buffer[: dtype.nbytes(chunk.box.shape)], dtype, chunk.box, wanted.shape)
            by_box.setdefault(chunk.box, []).append(sums)
        if wanted.turns > 1:
            return self._has_intact_turns(task, expected, list(parts.values()), buffer)
        if sum(box.size for box in by_box) != task.box.size:
            return False  # boxes that overlap in part cannot be added up; copying again is always right
        total = DigestSums.zero(dtype)
        for replicas in by_box.values():
            if any(sums != replicas[0] for sums in replicas):
                return False
            total += replicas[0]
        return total == expected

    def _has_intact_turns(
        self,
        task: BandTask,
        expected: DigestSums,
        parts: list[list[Chunk]],
        buffer: NDArray[np.uint8],
    ) -> bool:
        """Return whether every copy of a band of parts that take turns, put together, has the journal's digest."""
        wanted = task.copy.target
        if sum(copies[0].box.size for copies in parts) != task.box.size:
            return False  # as above
        for number in range(max(map(len, parts))):
            chunks = ChunkIndex([copies[min(number, len(copies) - 1)] for copies in parts])
            self._band.read(self._target, chunks, task.box, buffer)
            data = buffer[: wanted.dtype.nbytes(task.box.shape)]
            if compute_band_sums(data, wanted.dtype, task.box, wanted) != expected:
                return False
        return True

    @staticmethod
    def output_bytes(task: BandTask) -> Counter[str]:
        """Return the bytes a band has in each file."""
        written: Counter[str] = Counter()
        for chunk in task.writes.within(task.box):
            if not isinstance(chunk.where, ConstantFill):
                written[chunk.where.file] += chunk.dtype.nbytes(chunk.box.shape)
        return written
