"""Carries out a copy plan: every band is read once, digested, cast if asked, and written wherever it is wanted.

>>> from pathlib import Path
>>> from tempfile import TemporaryDirectory
>>> from shardctl.tensors.copyplan import join_manifests
>>> from shardctl.base.dtype import BY_NAME
>>> from shardctl.conversion.engine.budget import divide_host_memory
>>> from shardctl.tensors.manifest import CheckpointFile, Chunk, Manifest, Region, Tensor
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
from dataclasses import field
from itertools import count
from typing import TYPE_CHECKING, Final

from shardctl.base.value import state_class
from shardctl.base.workers import NullWatcher, StopRequest, run_in_threads
from shardctl.conversion.engine.band_mover import BandMover, BandTask
from shardctl.conversion.engine.journal import JournalEntry
from shardctl.conversion.engine.provenance import Provenance
from shardctl.conversion.engine.small_copies import locate_small_copy
from shardctl.storage.crc_tracker import CrcReader
from shardctl.tensors.bands import ChunkIndex, find_fastest_dim, split_tensor_bands
from shardctl.tensors.box import Box
from shardctl.tensors.cast import build_overflow_error
from shardctl.tensors.digest import DigestSums
from shardctl.tensors.manifest import Region, first_byte
from shardctl.tensors.shares import WorkerPortion
from shardctl.tensors.small_tensors import TensorRun, split_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardctl.base.workers import ProgressWatcher
    from shardctl.conversion.engine.block_sharing import BlockSharer
    from shardctl.conversion.engine.budget import HostMemoryBudget
    from shardctl.conversion.engine.journal import BandJournal, Key
    from shardctl.storage import Source, WriteTarget
    from shardctl.storage.crc_tracker import CrcTracker
    from shardctl.tensors.copyplan import CopyPlan, TensorCopy

SYNC_BYTES: Final = 1 << 30
"""How many written bytes may be lost to a kill: after so many, files are synced and the journal grows."""

GAP: Final = 32 << 10
"""Where a worker wants some columns of a matrix, so many bytes between two rows of them are read along: each row by
itself would be a call and, on a cold file, a small read from the disk, which takes longer than this many bytes."""

RECHECK_PHASE: Final = "re-checking"
"""The phase of progress in which the output of an interrupted run is read again. Its rate is that of reading one file
system, so it says nothing about the copy that follows."""


@state_class
class CopyOutcome:
    """What a copy did."""

    source_sums: dict[str, DigestSums] = field(default_factory=dict)
    """Digest sums of each tensor as it was read."""
    output_sums: dict[str, DigestSums] = field(default_factory=dict)
    """Digest sums of each tensor as it was written; the same unless it was cast."""
    whole_sums: dict[str, DigestSums] = field(default_factory=dict)
    """Digest sums of each tensor of which every element was read, though others count some of them."""
    overflowed: dict[str, int] = field(default_factory=dict)
    """Finite elements that a cast turned into infinities, by tensor; those of masks do not count."""
    kept_bytes: int = 0
    """Output bytes that an earlier run had written and that were found intact."""
    written_bytes: int = 0
    """Output bytes written by this run."""
    shared_bytes: int = 0
    """Those of them that share blocks with the source's files, which is how they were written."""
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
    sharer: Callable[[], BlockSharer] | None = None,
    take_overflow: Callable[[], int] | None = None,
    refuse_overflow: bool = False,
) -> CopyOutcome:
    """Copy; on return every file of the plan is complete and synced.

    `portions` are the boxes to move of the tensors that are not moved whole; the digest sums are then those of what
    counts (`Share`). `tracker` is told of all that is read of the source, also by an earlier run. With
    `allow_unverified` bands of an earlier run are kept though nothing proves what it read. `sharer` makes for a thread
    what shares blocks with the source's files. `take_overflow` returns how many finite values became infinite while
    this thread computed what it has read since the last call.
    Raises Interrupted if `stop` was set, else the first error of any thread; either way what is done is journalled.
    With `refuse_overflow`, raises SourceError once a finite value has become infinite, in this run or an earlier one.
    """
    provenance = Provenance(source, journal, allow_unverified=allow_unverified)
    run = _CopyRun(
        plan,
        source,
        target,
        journal,
        progress or NullWatcher(),
        budget,
        portions or {},
        tracker,
        provenance,
        sharer,
        take_overflow,
        refuse_overflow,
    )
    run.prepare()
    stop = StopRequest() if stop is None else stop
    try:
        run.recheck(stop)
        run.begin_moving()
        run_in_threads(run.tasks(), run.worker, budget.threads, stop)
    finally:
        run.flush_journal()
    run.prove()
    return run.outcome


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
        sharer: Callable[[], BlockSharer] | None,
        take_overflow: Callable[[], int] | None,
        refuse_overflow: bool,  # noqa: FBT001 - the one caller has the same names
    ) -> None:
        self._take_overflow, self._refuse_overflow = take_overflow, refuse_overflow
        self._plan, self._source, self._target, self._provenance = plan, source, target, provenance
        self._journal, self._progress, self._budget = journal, progress, budget
        self._portions = portions
        self._tracker, self._sharer = tracker, sharer
        self._lock = threading.Lock()
        self._numbers = count()
        self._changed: set[Key] = set()
        """Bands in the journal that are not as an earlier run wrote them, so that they are moved again."""
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
        for path, file in self._plan.want.files.items():
            self._target.create(path, file.size)
            for offset, data in file.literals:
                self._target.write_at(path, offset, data)
        copies = ((copy, ChunkIndex(copy.reads)) for copy in self._plan.copies)
        self._provenance.expect((reads, each.box) for copy, reads in copies for each in self._portions_of(copy))

    def recheck(self, stop: StopRequest) -> None:
        """Compare what an earlier run wrote with its journal, in a phase of progress of its own."""
        if self._journal is None or not len(self._journal):
            return
        size = sum(BandMover.output_bytes(task).total() for task in self._list_journalled())
        self._progress.begin(size, phase=RECHECK_PHASE)
        run_in_threads(self._list_journalled(), self._rechecker, self._budget.threads, stop)
        self._numbers = count()

    def begin_moving(self) -> None:
        """Begin the phase in which bands are moved, with what is in place already."""
        files = self._plan.want.files
        self._progress.begin(sum(file.size for file in files.values()), len(files))
        self._progress.advance(sum(len(data) for file in files.values() for _, data in file.literals))
        if self.outcome.kept_bytes:
            self._progress.advance(self.outcome.kept_bytes, kept=True)
        for path, missing in self._missing.items():
            if not missing:
                self._complete_file(path)

    def tasks(self) -> Iterator[BandTask | TensorRun]:
        """Yield what is to be moved: bands of tensors and runs of small tensors, in the order of the source's bytes."""
        for task in self._list_tasks():
            if isinstance(task, TensorRun) or not self._is_journalled(task) or task.key in self._changed:
                yield task

    def _list_journalled(self) -> Iterator[BandTask]:
        for task in self._list_tasks():
            if isinstance(task, BandTask) and self._is_journalled(task):
                yield task

    def _is_journalled(self, task: BandTask) -> bool:
        return self._journal is not None and task.key in self._journal

    def _list_tasks(self) -> Iterator[BandTask | TensorRun]:
        places = ((self._locate_small_copy(copy), copy.source.nbytes) for copy in self._plan.copies)
        for run in split_runs(places, self._budget.block):
            if run.size:
                yield run
                continue
            number, copy = run.numbers.start, self._plan.copies[run.numbers.start]
            reads, writes = ChunkIndex(copy.reads), ChunkIndex(copy.target.chunks)
            tile = find_fastest_dim([*copy.reads, *copy.target.chunks])
            bands = count()
            for portion in self._portions_of(copy):
                tensor, block = copy.source, self._budget.block
                for box in split_tensor_bands(tensor, tensor.dtype, block, fastest=tile, within=portion.box):
                    yield BandTask((number, next(bands)), copy, reads, writes, box, portion.counted)

    def _locate_small_copy(self, copy: TensorCopy) -> Region | None:
        """Return where a tensor is read from that may be moved with its neighbours.

        None where what was read is proved band by band, or where an earlier run has left bands.
        """
        if self._journal is not None and len(self._journal):
            return None
        if copy.source.name in self._portions or self._source.promised:
            return None
        where = locate_small_copy(copy)
        return None if where is None or (self._tracker is not None and self._tracker.heeds(where.file)) else where

    def _portions_of(self, copy: TensorCopy) -> tuple[WorkerPortion, ...]:
        return self._portions.get(copy.source.name) or (WorkerPortion(Box.whole(copy.source.shape), counted=True),)

    def _build_mover(self) -> BandMover:
        with self._lock:
            sharer = self._sharer() if self._sharer is not None else None
            return BandMover(self._budget, next(self._numbers), GAP if self._portions else 0, self._target, sharer)

    def _rechecker(self) -> Callable[[BandTask], None]:
        """Return one thread's way of checking a band that an earlier run wrote."""
        hands = self._build_mover()

        def handle(task: BandTask) -> None:
            self._progress.work_on(first_byte(task.copy.target)[0])
            kept, written = self._find_kept(task, hands), hands.output_bytes(task)
            if kept is None:
                with self._lock:
                    self._changed.add(task.key)
            else:
                entry, again = kept
                if self._tracker is not None:
                    self._tracker.add_pieces(entry.crcs)
                self._record_band(task, entry, written, kept=True, again=again)
            self._progress.advance(written.total())

        return handle

    def worker(self) -> Callable[[BandTask | TensorRun], None]:
        """Return one thread's way of moving a band."""
        hands = self._build_mover()
        tracker = self._tracker
        reader = CrcReader(self._source.read_at, tracker, keep=True) if tracker is not None else None

        def handle(task: BandTask | TensorRun) -> None:
            if isinstance(task, TensorRun):
                copies = self._plan.copies[task.numbers.start : task.numbers.stop]
                self._progress.work_on(first_byte(copies[0].source)[0])
                sums = hands.move_run(task, copies, self._source)
                self._count_shared(hands.take_shared())
                self._record_run(task, copies, sums, hands.written)
                return
            self._progress.work_on(first_byte(task.copy.source)[0])
            moved = hands.move(task, reader or self._source)
            if self._take_overflow is not None:
                moved = moved._replace(overflowed=moved.overflowed + self._take_overflow())
            self._count_shared(hands.take_shared())
            if reader is not None:
                moved = moved._replace(crcs=reader.take_pieces())
            self._record_band(task, moved, hands.written)

        return handle

    def _find_kept(self, task: BandTask, hands: BandMover) -> tuple[JournalEntry, bool] | None:
        """Return what an earlier run noted of a band that is as it would be now, and whether to note it again.

        It is noted again if a file that it was read from was touched since, and still has the same elements.
        """
        entry = self._journal.find(task.key) if self._journal else None
        if self._journal is None or entry is None:
            return None
        if not self._provenance.trusts_band(task.reads, task.box) or not hands.intact(task, entry.written):
            return None
        files = {chunk.where.file for chunk in task.reads.within(task.box) if isinstance(chunk.where, Region)}
        touched = self._journal.predates_touch(task.key, files)
        return None if touched and hands.sum_source(task, self._source) != entry.read else (entry, touched)

    def _count_shared(self, nbytes: int) -> None:
        with self._lock:
            self.outcome.shared_bytes += nbytes

    def _record_band(
        self, task: BandTask, entry: JournalEntry, written: Counter[str], *, kept: bool = False, again: bool = False
    ) -> None:
        """Add a band's digests and bytes; sync and journal when enough has gathered.

        A band that was kept is in the journal, unless it is to be noted `again`.
        """
        name = task.copy.source.name
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
            rows = [(task.key, entry)] if again or not kept else []
            done, batch = self._count_written(rows, written, kept=kept)
        if kept:
            self._commit_batch(*batch)  # the phase that follows counts its bytes and its files
        else:
            self._report_progress(done, batch, written.total())
        if entry.overflowed and self._refuse_overflow:
            raise build_overflow_error(name, entry.overflowed, task.copy.target.dtype)

    def _record_run(
        self, run: TensorRun, copies: Sequence[TensorCopy], sums: Sequence[DigestSums], written: Counter[str]
    ) -> None:
        """Add the digests and bytes of small tensors, each of which is one band."""
        found = {copy.source.name: each for copy, each in zip(copies, sums, strict=True)}
        rows = [((number, 0), JournalEntry(each, each)) for number, each in zip(run.numbers, sums, strict=True)]
        with self._lock:
            self._elements.update({copy.source.name: copy.source.size for copy in copies})
            self.outcome.source_sums.update(found)
            self.outcome.output_sums.update(found)
            done, batch = self._count_written(rows, written)
        self._report_progress(done, batch, written.total())

    def _count_written(
        self, rows: list[tuple[Key, JournalEntry]], written: Counter[str], *, kept: bool = False
    ) -> tuple[list[str], _Batch]:
        """Count bytes that are there, and `rows` for the journal; returns complete files and what to sync."""
        done: list[str] = []
        for path, size in written.items():
            self._missing[path] -= size
            if not self._missing[path]:
                done.append(path)
        if kept:
            self.outcome.kept_bytes += written.total()
        else:
            self.outcome.written_bytes += written.total()
            self._unsynced.update(written)
        if not rows:
            return done, ([], [])
        self._unjournalled += rows
        self._unsynced_bytes += written.total()
        return done, self._take() if self._unsynced_bytes >= SYNC_BYTES else ([], [])

    def _report_progress(self, done: list[str], batch: _Batch, nbytes: int) -> None:
        self._progress.advance(nbytes)
        self._commit_batch(*batch)
        for path in done:
            self._complete_file(path)

    def _take(self) -> _Batch:
        rows, paths = self._unjournalled, sorted(self._unsynced)
        self._unjournalled, self._unsynced, self._unsynced_bytes = [], set(), 0
        self._settling += bool(rows)
        self._provenance.close()
        return rows, paths

    def _commit_batch(self, rows: list[tuple[Key, JournalEntry]], paths: list[str]) -> None:
        for path in paths:
            self._sync_file(path)
        if not rows:
            return
        if self._journal:
            self._journal.append(rows)
        with self._lock:
            self._settling -= 1
            proved = self._provenance.list_hashed_files() if not self._settling else []
        if proved and self._journal:
            self._journal.append_proofs(proved)

    def _complete_file(self, path: str) -> None:
        self._sync_file(path)
        self._progress.file_done(path)

    def _sync_file(self, path: str) -> None:
        try:
            self._target.sync(path)
        except BaseException:
            self._sync_failed = True  # a second fsync would report success over pages that are gone
            raise

    def flush_journal(self) -> None:
        """Sync and journal what is left, so that a run that failed can go on from here."""
        if not self._sync_failed:
            self._commit_batch(*self._take())

    def prove(self) -> None:
        """Count again: every byte of every file was written, and every element of every tensor seen."""
        for path, missing in self._missing.items():
            assert missing == 0, f"{path}: {missing} bytes were not written"  # noqa: S101 - our own second count
        for copy in self._plan.copies:
            name = copy.source.name
            if name not in self.outcome.source_sums:
                self.outcome.source_sums[name] = DigestSums.zero(copy.source.dtype)
                self.outcome.output_sums[name] = DigestSums.zero(copy.target.dtype)
            size = copy.source.size
            wanted = sum(each.box.size for each in self._portions_of(copy)) if name in self._portions else size
            assert self._elements[name] == wanted, f"{name}: {self._elements[name]} elements seen"  # noqa: S101
            if wanted < size:
                self.outcome.whole_sums.pop(name, None)
        self.outcome.read_whole = frozenset(self._provenance.moved)


def _count_payload_bytes(plan: CopyPlan) -> Counter[str]:
    """Count the bytes that tensors have in each file; together with the literals they must be all of it."""
    payload: Counter[str] = Counter(dict.fromkeys(plan.want.files, 0))
    places = [(c.where.file, c.dtype, c.box.shape) for _, c in plan.want.arrays() if isinstance(c.where, Region)]
    for (path, dtype, shape), times in Counter(places).items():
        payload[path] += times * dtype.nbytes(shape)
    return payload


def _accumulate_sums(into: dict[str, DigestSums], name: str, sums: DigestSums) -> None:
    into[name] = into[name] + sums if name in into else sums
