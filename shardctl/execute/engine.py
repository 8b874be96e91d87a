"""Carries out a copy plan: every band is read once, digested, cast if asked, and written wherever it is wanted.

>>> from pathlib import Path
>>> from tempfile import TemporaryDirectory
>>> from shardctl.copyplan import join_manifests
>>> from shardctl.dtype import BY_NAME
>>> from shardctl.execute.budget import divide_host_memory
>>> from shardctl.manifest import CheckpointFile, Chunk, Manifest, Region, Tensor
>>> from shardctl.storage.local import LocalSource, LocalTarget
>>> def store(file: str, offset: int) -> Manifest:  # four numbers, somewhere in a file
...     chunk = Chunk(Box((0,), (4,)), BY_NAME["F32"], Region(file, offset, (4,)))
...     tensors = {"w": Tensor("w", BY_NAME["F32"], (4,), (chunk,))}
...     return Manifest("safetensors", tensors, {file: CheckpointFile(file, offset + 16)})
>>> plan = join_manifests(store("old", 8), store("new", 0))
>>> budget = divide_host_memory(plan, limit=1 << 30, threads=1)
>>> with TemporaryDirectory() as folder:
...     _ = Path(folder, "old").write_bytes(b"a headerof four numbers.")
...     outcome = execute_plan(plan, LocalSource(Path(folder)), LocalTarget(Path(folder)), budget)
...     print(outcome.written_bytes, Path(folder, "new").read_bytes())
16 b'of four numbers.'
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from math import prod
from typing import TYPE_CHECKING, Final

import numpy as np

from shardctl.bands import (
    PAGE,
    BandBuffer,
    ChunkIndex,
    allocate_aligned,
    find_fastest_dim,
    find_page_shift,
    split_bands,
)
from shardctl.box import Box
from shardctl.cast import cast_elements
from shardctl.digest import DigestSums, compute_box_sums
from shardctl.execute.journal import JournalEntry
from shardctl.execute.provenance import Provenance
from shardctl.manifest import ConstantFill, first_byte
from shardctl.shares import WorkerPortion
from shardctl.storage.crc_tracker import CrcReader
from shardctl.value import value_class
from shardctl.workers import NullWatcher, StopRequest, run_in_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from shardctl.bands import ByteReader
    from shardctl.copyplan import CopyPlan, TensorCopy
    from shardctl.dtype import DType
    from shardctl.execute.budget import HostMemoryBudget
    from shardctl.execute.journal import BandJournal, Key
    from shardctl.storage import Source, WriteTarget
    from shardctl.storage.crc_tracker import CrcTracker
    from shardctl.workers import ProgressWatcher

SYNC_BYTES: Final = 1 << 30
"""How many written bytes may be lost to a kill: after so many, files are synced and the journal grows."""

GAP: Final = 32 << 10
"""Where a worker wants some columns of a matrix, so many bytes between two rows of them are read along: each row by
itself would be a call and, on a cold file, a small read from the disk, which takes longer than this many bytes."""


@dataclass(slots=True)
class CopyOutcome:
    """What a copy did."""

    source_sums: dict[str, DigestSums] = field(default_factory=dict)
    """Digest sums of each tensor as it was read."""
    output_sums: dict[str, DigestSums] = field(default_factory=dict)
    """Digest sums of each tensor as it was written; the same unless it was cast."""
    whole_sums: dict[str, DigestSums] = field(default_factory=dict)
    """Digest sums of each tensor of which every element was read, though others count some of them."""
    overflowed: dict[str, int] = field(default_factory=dict)
    """Finite elements that a cast turned into infinities, by tensor."""
    kept_bytes: int = 0
    """Output bytes that an earlier run had written and that were found intact."""
    written_bytes: int = 0
    """Output bytes written by this run."""
    read_whole: frozenset[str] = frozenset()
    """Files of the source that must have the hash that is promised of them for the result to be right."""


def execute_plan(
    plan: CopyPlan,
    source: Source,
    target: WriteTarget,
    budget: HostMemoryBudget,
    *,
    tracker: CrcTracker | None = None,
    portions: Mapping[str, tuple[WorkerPortion, ...]] | None = None,
    journal: BandJournal | None = None,
    progress: ProgressWatcher | None = None,
    stop: StopRequest | None = None,
    allow_unverified: bool = False,
) -> CopyOutcome:
    """Copy; on return every file of the plan is complete and synced.

    `portions` are the boxes to move of the tensors that are not moved whole; the digest sums are then those of what
    counts (`Share`). `tracker` is told of all that is read of the source, also by an earlier run. With
    `allow_unverified` bands of an earlier run are kept though nothing proves what it read.
    Raises Interrupted if `stop` was set, else the first error of any thread; either way what is done is journalled.
    """
    provenance = Provenance(source, journal, allow_unverified=allow_unverified)
    run = _CopyRun(
        plan, source, target, journal, progress or NullWatcher(), budget, portions or {}, tracker, provenance
    )
    run.prepare()
    stop = StopRequest() if stop is None else stop
    try:
        run_in_threads(run.tasks(), run.worker, budget.threads, stop)
    finally:
        run.settle()
    run.prove()
    return run.outcome


@value_class
class _BandTask:
    key: Key
    copy: TensorCopy
    reads: ChunkIndex
    writes: ChunkIndex
    box: Box
    counted: bool


_Batch = tuple[list[tuple["Key", JournalEntry]], list[str]]
"""Journal rows, and the files to sync before they may be written."""


class _CopyRun:
    """The state that the threads of one copy share; `_lock` guards all of it."""

    def __init__(
        self,
        plan: CopyPlan,
        source: Source,
        target: WriteTarget,
        journal: BandJournal | None,
        progress: ProgressWatcher,
        budget: HostMemoryBudget,
        portions: Mapping[str, tuple[WorkerPortion, ...]],
        tracker: CrcTracker | None,
        provenance: Provenance,
    ) -> None:
        self._plan, self._source, self._target, self._provenance = plan, source, target, provenance
        self._journal, self._progress, self._budget = journal, progress, budget
        self._portions = portions
        self._tracker = tracker
        self._lock = threading.Lock()
        self._numbers = count()
        self._missing = _count_payload_bytes(plan)
        self._unsynced: set[str] = set()
        self._unjournalled: list[tuple[Key, JournalEntry]] = []
        self._unsynced_bytes = 0
        self._settling = 0
        """Threads that have taken rows which are not in the journal yet."""
        self._sync_failed = False
        self._elements: Counter[str] = Counter()
        self.outcome = CopyOutcome()

    def prepare(self) -> None:
        files = self._plan.want.files
        self._progress.begin(sum(file.size for file in files.values()), len(files))
        for path, file in files.items():
            self._target.create(path, file.size)
            for offset, data in file.literals:
                self._target.write_at(path, offset, data)
                self._progress.advance(len(data))
        for path, missing in self._missing.items():
            if not missing:
                self._complete(path)
        copies = ((copy, ChunkIndex(copy.reads)) for copy in self._plan.copies)
        self._provenance.expect((reads, each.box) for copy, reads in copies for each in self._portions_of(copy))

    def tasks(self) -> Iterator[_BandTask]:
        """Yield every band of every tensor, in the order of the source's bytes."""
        for number, copy in enumerate(self._plan.copies):
            reads, writes = ChunkIndex(copy.reads), ChunkIndex(copy.target.chunks)
            tile = find_fastest_dim([*copy.reads, *copy.target.chunks])
            bands = count()
            for portion in self._portions_of(copy):
                shape, origin = portion.box.shape, portion.box.origin
                for box in split_bands(shape, copy.source.dtype, self._budget.block, fastest=tile, origin=origin):
                    yield _BandTask((number, next(bands)), copy, reads, writes, box, portion.counted)

    def _portions_of(self, copy: TensorCopy) -> tuple[WorkerPortion, ...]:
        return self._portions.get(copy.source.name) or (WorkerPortion(Box.whole(copy.source.shape), counted=True),)

    def worker(self) -> Callable[[_BandTask], None]:
        """Return one thread's way of handling a band: keep it if an earlier run left it intact, else move it."""
        with self._lock:
            hands = _BandMover(self._budget, next(self._numbers), GAP if self._portions else 0)
        tracker = self._tracker
        reader = CrcReader(self._source.read_at, tracker, keep=True) if tracker is not None else None

        def handle(task: _BandTask) -> None:
            self._progress.work_on(first_byte(task.copy.source)[0])
            entry = self._journal.find(task.key) if self._journal else None
            believed = entry is not None and self._provenance.believes(task.reads, task.box)
            if entry and believed and hands.intact(task, self._target, entry.written):
                if tracker is not None:
                    tracker.add_pieces(entry.crcs)
                self._record(task, entry, hands.output_bytes(task), kept=True)
            else:
                moved = hands.move(task, reader or self._source, self._target)
                if reader is not None:
                    moved = moved._replace(crcs=reader.take_pieces())
                self._record(task, moved, hands.written)

        return handle

    def _record(self, task: _BandTask, entry: JournalEntry, written: Counter[str], *, kept: bool = False) -> None:
        """Add a band's digests and bytes; sync and journal when enough has gathered."""
        name, nbytes = task.copy.source.name, written.total()
        done: list[str] = []
        batch: _Batch = ([], [])
        with self._lock:
            self._elements[name] += task.box.size
            if name in self._portions:
                _accumulate_sums(self.outcome.whole_sums, name, entry.read)
            self._provenance.take(task.reads, task.box, kept=kept)
            if task.counted:
                _accumulate_sums(self.outcome.source_sums, name, entry.read)
                _accumulate_sums(self.outcome.output_sums, name, entry.written)
            if task.counted and entry.overflowed:
                self.outcome.overflowed[name] = self.outcome.overflowed.get(name, 0) + entry.overflowed
            for path, count in written.items():
                self._missing[path] -= count
                if not self._missing[path]:
                    done.append(path)
            if kept:
                self.outcome.kept_bytes += nbytes
            else:
                self.outcome.written_bytes += nbytes
                self._unsynced.update(written)
                self._unjournalled.append((task.key, entry))
                self._unsynced_bytes += nbytes
                if self._unsynced_bytes >= SYNC_BYTES:
                    batch = self._take()
        self._progress.advance(nbytes, kept=kept)
        self._settle(*batch)
        for path in done:
            self._complete(path)

    def _take(self) -> _Batch:
        rows, paths = self._unjournalled, sorted(self._unsynced)
        self._unjournalled, self._unsynced, self._unsynced_bytes = [], set(), 0
        self._settling += bool(rows)
        self._provenance.close()
        return rows, paths

    def _settle(self, rows: list[tuple[Key, JournalEntry]], paths: list[str]) -> None:
        for path in paths:
            self._sync(path)
        if not rows:
            return
        if self._journal:
            self._journal.append(rows)
        with self._lock:
            self._settling -= 1
            proved = self._provenance.settled() if not self._settling else []
        if proved and self._journal:
            self._journal.append_proofs(proved)

    def _complete(self, path: str) -> None:
        self._sync(path)
        self._progress.file_done(path)

    def _sync(self, path: str) -> None:
        try:
            self._target.sync(path)
        except BaseException:
            self._sync_failed = True  # a second fsync would report success over pages that are gone
            raise

    def settle(self) -> None:
        """Sync and journal what is left, so that a run that failed can go on from here."""
        if not self._sync_failed:
            self._settle(*self._take())

    def prove(self) -> None:
        """Count again: every byte of every file was written, and every element of every tensor seen."""
        for path, missing in self._missing.items():
            assert missing == 0, f"{path}: {missing} bytes were not written"  # noqa: S101 - our own second count
        for copy in self._plan.copies:
            sums = DigestSums.zero(copy.source.dtype)
            self.outcome.source_sums.setdefault(copy.source.name, sums)
            self.outcome.output_sums.setdefault(copy.source.name, DigestSums.zero(copy.target.dtype))
            seen = self._elements[copy.source.name]
            wanted = sum(portion.box.size for portion in self._portions_of(copy))
            assert seen == wanted, f"{copy.source.name}: {seen} elements seen"  # noqa: S101
            if wanted < prod(copy.source.shape):
                self.outcome.whole_sums.pop(copy.source.name, None)
        self.outcome.read_whole = frozenset(self._provenance.moved)


class _BandMover:
    """One thread's buffers, and what it does with them."""

    def __init__(self, budget: HostMemoryBudget, number: int, gap: int) -> None:
        self._turn = number / budget.threads
        self._band = BandBuffer(budget.block, gap)
        self._data = self._read = allocate_aligned(budget.block)
        self._cast = np.empty(0, np.uint8)
        self._aside = np.empty(0, np.uint8)
        self._aside_key: tuple[Key, DType] | None = None
        self.written: Counter[str] = Counter()

    def move(self, task: _BandTask, source: ByteReader, target: WriteTarget) -> JournalEntry:
        """Read a band and write it everywhere; leaves the bytes written by file in `written`."""
        tensor, wanted = task.copy.source, task.copy.target
        self._aside_key = None
        chunks = list(task.writes.within(task.box))
        shift = find_page_shift(chunks, task.box, wanted.dtype)
        cast = wanted.dtype != tensor.dtype
        data = self._data[0 if cast else shift :][: tensor.dtype.nbytes(task.box.shape)]
        found = self._band.read(source, task.reads, task.box, data)
        assert found == task.box.size, f"{tensor.name} {task.box}: read {found} elements"  # noqa: S101
        read_sums = compute_box_sums(data, tensor.dtype, task.box, tensor.shape)
        sums, overflowed = read_sums, 0
        self._read = data
        if cast:
            nbytes = wanted.dtype.nbytes(task.box.shape)
            data = self._cast_buffer(nbytes)[shift:][:nbytes]
            overflowed = cast_elements(self._read, tensor.dtype, wanted.dtype, data).overflowed
            sums = compute_box_sums(data, wanted.dtype, task.box, tensor.shape)
        self.written = Counter()
        turn = int(self._turn * len(chunks))  # each thread begins with another file, so that they seldom meet
        for chunk in chunks[turn:] + chunks[:turn]:
            if not isinstance(chunk.where, ConstantFill):
                given = data if chunk.dtype == wanted.dtype else self._cast_aside(task, chunk.dtype)
                self.written[chunk.where.file] += self._band.write(target, chunk, task.box, given)
        return JournalEntry(read_sums, sums, overflowed)

    def _cast_aside(self, task: _BandTask, dtype: DType) -> NDArray[np.uint8]:
        """Return the band in the type of a copy that is written aside; bands of one task share it."""
        key = (task.key, dtype)
        if self._aside_key != key:
            nbytes, have = dtype.nbytes(task.box.shape), task.copy.source.dtype
            if self._aside.nbytes < nbytes:
                self._aside = np.empty(0, np.uint8)
                self._aside = np.empty(nbytes, np.uint8)
            cast_elements(self._read, have, dtype, self._aside[:nbytes])
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

    def intact(self, task: _BandTask, target: WriteTarget, expected: DigestSums) -> bool:
        """Return whether every copy of the band that an earlier run wrote still has the journal's digest."""
        by_box: dict[Box, list[DigestSums]] = {}
        dtype, shape = task.copy.target.dtype, task.copy.target.shape
        nbytes = dtype.nbytes(task.box.shape)
        buffer = self._data if nbytes <= self._data.nbytes else self._cast_buffer(nbytes)
        for chunk in task.writes.within(task.box):
            if isinstance(chunk.where, ConstantFill):
                continue
            if chunk.aside:
                return False  # the journal has no digest of it; copying again is always right
            self._band.read(target, ChunkIndex([chunk]), chunk.box, buffer)
            sums = compute_box_sums(buffer[: dtype.nbytes(chunk.box.shape)], dtype, chunk.box, shape)
            by_box.setdefault(chunk.box, []).append(sums)
        if sum(box.size for box in by_box) != task.box.size:
            return False  # boxes that overlap in part cannot be added up; copying again is always right
        total = DigestSums.zero(dtype)
        for replicas in by_box.values():
            if any(sums != replicas[0] for sums in replicas):
                return False
            total += replicas[0]
        return total == expected

    @staticmethod
    def output_bytes(task: _BandTask) -> Counter[str]:
        """Return the bytes a band has in each file."""
        written: Counter[str] = Counter()
        for chunk in task.writes.within(task.box):
            if not isinstance(chunk.where, ConstantFill):
                written[chunk.where.file] += chunk.dtype.nbytes(chunk.box.shape)
        return written


def _count_payload_bytes(plan: CopyPlan) -> Counter[str]:
    """Count the bytes that tensors have in each file; together with the literals they must be all of it."""
    payload: Counter[str] = Counter(dict.fromkeys(plan.want.files, 0))
    for _, chunk in plan.want.arrays():
        if not isinstance(chunk.where, ConstantFill):
            payload[chunk.where.file] += chunk.dtype.nbytes(chunk.box.shape)
    return payload


def _accumulate_sums(into: dict[str, DigestSums], name: str, sums: DigestSums) -> None:
    into[name] = into[name] + sums if name in into else sums
