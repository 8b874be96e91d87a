"""Writes one worker's part of a shared conversion; `finish` assembles the result from all parts."""

from __future__ import annotations

import time
from dataclasses import field, replace
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.amounts import format_duration, format_file_size, format_plural
from shardctl.base.errors import OccupiedDestinationError, UsageError
from shardctl.base.result_view import ResultView
from shardctl.base.value import value_class
from shardctl.base.version import __version__
from shardctl.base.workers import (
    ExecutionOptions,
    NullWatcher,
    ProgressWatcher,
    StopRequest,
    raise_if_stopped,
    run_in_threads,
)
from shardctl.conversion.assembling import hash_result_name
from shardctl.conversion.engine.interrupt import stop_on_signals
from shardctl.conversion.engine.journal import BandJournal
from shardctl.conversion.engine.part import WorkerPart, encode_part, is_touched
from shardctl.conversion.engine.staging import StagingArea
from shardctl.conversion.engine.worker import WorkerId
from shardctl.conversion.engine.worker_group import WorkerGroup
from shardctl.conversion.finished_result import find_finished_result
from shardctl.conversion.pending_record import draft_record, encode_record_draft, list_overflow_warnings
from shardctl.conversion.preparing import open_conversion
from shardctl.conversion.share_transfer import list_source_versions, move_share, repeat_while_touched
from shardctl.options import DestinationOptions
from shardctl.storage import FileProofs
from shardctl.storage.cloud import is_bucket
from shardctl.storage.hub import refuse_shared_hub
from shardctl.tensors.shares import build_share, divide_files

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from shardctl.conversion.conversion_plan import PlannedConversion
    from shardctl.conversion.plan_file import PlanFile
    from shardctl.conversion.share_transfer import Versions
    from shardctl.options import ReshardOptions, SourceOptions
    from shardctl.storage import Source
    from shardctl.tensors.shares import WorkerShare

PATIENCE: Final = 60
"""Seconds to wait while other workers join, one after another, or while a result is published."""

WHOLE: Final = 1 << 20
"""Bytes of a file that is sampled whole."""
_EDGE_SAMPLE_BYTES: Final = 64 << 10
"""Bytes at either end of a larger one: headers, and the directories of archives."""
_INNER_SAMPLE_BYTES: Final = 16 << 10
"""Bytes of each stretch between."""
_INNER_SAMPLE_COUNT: Final = 16


@value_class
class ContributeResult(ResultView):
    """What one worker did."""

    destination: Path | str
    """A directory, or the address of a place in a bucket."""
    worker: WorkerId
    part: WorkerPart
    done_before: bool
    """Whether an earlier run of this worker had done all of it."""
    missing: tuple[WorkerId, ...]
    """The workers that had not finished yet."""
    warnings: tuple[str, ...]
    proofs: FileProofs = field(default_factory=FileProofs)
    """Which files of the source have the hashes that their place promises: a part of a file cannot be hashed."""
    notes: tuple[str, ...] = ()
    """The same in words."""
    finished: bool = False
    """Whether the result had been published before, exactly as this conversion makes it; the part is empty then."""
    target: str = ""
    """The destination as the caller named it; `destination` is where links lead."""
    seconds: float = 0.0
    """How long the call took."""

    @property
    def verdict(self) -> str:
        """The answer in one line: which part this worker wrote, and whether `finish` can publish the result."""
        target, count = self.target or str(self.destination), self.worker.count
        if self.finished:
            return f"done before: {target} is finished, nothing was written"
        begin, spent = "done", format_duration(self.seconds)
        if self.done_before:
            begin, spent = "done before", "nothing was written"
        size = f"{format_file_size(sum(self.part.files.values()))}, {format_plural(len(self.part.files), 'file')}"
        there = count - len(self.missing)
        written = f"{there} of {format_plural(count, 'part')} {'is' if there == 1 else 'are'} written"
        return f"{begin}: part {self.worker} of {target} ({size}, {spent}); {written}"


def contribute(
    path: str | Path,
    destination: str | Path,
    reshard_options: ReshardOptions | None = None,
    *,
    worker: WorkerId,
    source_options: SourceOptions | None = None,
    destination_options: DestinationOptions | None = None,
    progress: ProgressWatcher | None = None,
    plan: PlanFile | None = None,
    run: str = "",
) -> ContributeResult:
    """Write the files of one worker of a conversion into the staging area of `destination`, which all workers see.

    Into a bucket they go under their own names, but what makes a checkpoint of them.

    All workers are given the same arguments but for `worker`, memory and threads. Each output file has one writer. On
    return every byte of this part is right and on stable storage; on any error, the same call finishes it. `run` names
    what starts workers anew after it has seen them die.
    """
    options = destination_options or DestinationOptions()
    require_no_proof(options)
    progress = progress or NullWatcher()
    refuse_shared_hub(destination)

    def contribute_once() -> ContributeResult:
        with open_conversion(
            path, destination, reshard_options, source_options, plan, allow_overflow=options.allow_overflow
        ) as work:
            try:
                return _contribute_part(work, destination, worker, options, progress, run)
            except OccupiedDestinationError:
                stop = StopRequest()
                with stop_on_signals(stop):
                    record = find_finished_result(work, destination, options, progress, stop, worker=worker)
                if record is None:
                    raise
                everybody = [WorkerId(number, worker.count) for number in range(worker.count)]
                nothing = WorkerPart({}, {}, {}, {}, {}, {})
                done = _build_contribution(work, destination, worker, nothing, everybody, before=True)
                return replace(done, finished=True)

    began = time.monotonic()
    done = repeat_while_touched(contribute_once, progress)
    return replace(done, target=str(destination), seconds=time.monotonic() - began)


def _contribute_part(
    work: PlannedConversion,
    destination: str | Path,
    worker: WorkerId,
    options: DestinationOptions,
    progress: ProgressWatcher,
    run: str,
) -> ContributeResult:
    identity, versions = work.identity(), list_source_versions(work)
    header = {
        "plan": identity,
        "source": {name: [size, _normalise_version(str(version))] for name, (size, version) in versions.items()},
        "sample": sample_source(work.checkpoint.source, versions, ExecutionOptions(work.budget.threads)),
        "sha256": options.sha256,
        "workers": worker.count,
        "overwrite": options.overwrite,
        "version": __version__,
    }
    if is_bucket(destination):
        from shardctl.conversion.bucket_worker_group import send_share

        part, before, done = send_share(
            work, destination, worker, header, versions, resume=not options.no_resume, progress=progress
        )
        return _build_contribution(work, destination, worker, part, done, before=before)
    tree = hash_result_name(identity, header["source"], header["sample"], options.sha256)
    with StagingArea(Path(destination), overwrite=options.overwrite, patience=PATIENCE) as staging:
        crew = WorkerGroup(staging)
        crew.join(tree, header)
        lock = crew.lock(worker, run)
        lock.acquire(PATIENCE if run else 0)
    try:
        desk = _WorkerRun(work, staging, crew, worker, {**header, "tree": tree, "worker": worker.number})
        return desk.run(versions, resume=not options.no_resume, progress=progress)
    finally:
        lock.release()


def require_no_proof(options: DestinationOptions) -> None:
    """Raise UsageError if a result that several processes write is to be proved."""
    if options.prove:
        raise UsageError(
            "--prove is for a result that one process writes",
            hint="leave it out, and run shardctl verify DST --forward",
        )


def _build_contribution(
    work: PlannedConversion,
    destination: Path | str,
    worker: WorkerId,
    part: WorkerPart,
    done: Collection[WorkerId],
    *,
    before: bool,
) -> ContributeResult:
    """Build what a worker did, `done` being those who say that they have finished."""
    workers = (WorkerId(number, worker.count) for number in range(worker.count))
    overflow = tuple(list_overflow_warnings(draft_record(work, ""), [part])) if part.overflowed else ()
    return ContributeResult(
        destination=destination,
        worker=worker,
        part=part,
        done_before=before,
        missing=tuple(each for each in workers if each not in done),
        warnings=(*work.have.warnings, *overflow),
        proofs=work.checkpoint.source.proofs(),
        notes=work.checkpoint.source.notes(),
    )


def _normalise_version(version: str) -> str:
    """Return a file's version as other machines see it: they may number its inode differently, but not its change."""
    inode, colon, modified = version.partition(":")
    return modified if colon and inode.isdigit() and modified.isdigit() else version


@value_class
class _WorkerRun:
    """Where one worker works."""

    work: PlannedConversion
    staging: StagingArea
    crew: WorkerGroup
    worker: WorkerId
    header: dict[str, Any]

    def run(self, versions: Versions, *, resume: bool, progress: ProgressWatcher) -> ContributeResult:
        found = self.crew.part(self.worker, self.header) if resume else None
        if found and is_touched(found[0], self.work.checkpoint.source.files()):
            found = None  # its journal is still there, so it is compared, band by band
        part = found[0] if found else self._made(versions, resume=resume, progress=progress)
        workers = (WorkerId(number, self.worker.count) for number in range(self.worker.count))
        done = {worker for worker in workers if self.crew.part_exists(worker)}
        return _build_contribution(
            self.work, self.staging.destination, self.worker, part, done, before=found is not None
        )

    def _made(self, versions: Versions, *, resume: bool, progress: ProgressWatcher) -> WorkerPart:
        work, mine = self.work, self._share()
        path = self.crew.locate_journal(self.worker)
        header: dict[str, Any] = {**self.header, "source": versions}
        block = BandJournal.block(path, header) if resume else None
        if block is not None:
            work = replace(work, budget=work.budget.with_block(block))
        else:
            self.crew.forget_part(self.worker)
        self.staging.require_space(work.required_space)
        stop = StopRequest(kept=True)
        progress.warn(work.have.warnings)
        with stop_on_signals(stop):
            part = move_share(
                work,
                mine,
                work.carried if self.worker.number == 0 else (),
                self.staging.data,
                (path, {**header, "block": work.budget.block}),
                versions=versions,
                discard=lambda: self.crew.forget_part(self.worker),
                sha256=bool(self.header["sha256"]),
                progress=progress,
                stop=stop,
            )
            frame = encode_record_draft(draft_record(work, self.header["plan"])) if self.worker.number == 0 else None
            raise_if_stopped(stop)
            self.crew.note_part(self.worker, encode_part(part, self.header, frame))
        return part

    def _share(self) -> WorkerShare:
        return build_share(self.work.plan, divide_files(self.work.plan, self.worker.count), self.worker.number)


def sample_source(source: Source, versions: Versions, effort: ExecutionOptions) -> dict[str, str]:
    """Return a hash of a sample of each file whose content its version does not tell; empty if all versions do.

    Everybody samples the same bytes of a file of one name and size: all of it up to 1 MiB, of a larger one 64 KiB at
    either end and 16 stretches of 16 KiB between.
    """
    folder = source.folder
    if folder is None:  # ETags and commits are of the content
        return {}
    paths = [path for path in versions if (folder / path).is_file()]
    if len(paths) < len(versions):  # arrays of a library's own format: of them its files are sampled
        paths = [path for path in source.files() if (folder / path).is_file()]
    found: dict[str, str] = {}

    def worker() -> Callable[[str], None]:
        buffer = memoryview(bytearray(WHOLE))

        def handle(path: str) -> None:
            found[path] = _read_sample(source, path, source.files()[path].size, buffer)

        return handle

    run_in_threads(iter(paths), worker, effort.threads, effort.stop)
    return dict(sorted(found.items()))


def _read_sample(source: Source, path: str, size: int, buffer: memoryview) -> str:
    state = blake2b(digest_size=16)
    for start, length in _list_stretches(path, size):
        source.read_at(path, start, buffer[:length])
        state.update(buffer[:length])
    return state.hexdigest()


def _list_stretches(path: str, size: int) -> Iterator[tuple[int, int]]:
    if size <= WHOLE:
        yield 0, size
        return
    yield 0, _EDGE_SAMPLE_BYTES
    random = Random(f"{path} {size}")  # noqa: S311 - the same everywhere is what is wanted
    for start in sorted(
        random.sample(range(_EDGE_SAMPLE_BYTES, size - _EDGE_SAMPLE_BYTES - _INNER_SAMPLE_BYTES), _INNER_SAMPLE_COUNT)
    ):
        yield start, _INNER_SAMPLE_BYTES
    yield size - _EDGE_SAMPLE_BYTES, _EDGE_SAMPLE_BYTES
