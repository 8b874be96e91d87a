"""Assembles the parts of several workers: checks that all are complete, writes the record, publishes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardctl.base.amounts import format_duration, format_plural
from shardctl.base.errors import Mismatch, SourceError, format_first_few
from shardctl.base.result_view import ResultView
from shardctl.base.value import value_class
from shardctl.base.workers import StopRequest
from shardctl.conversion.assembling import assemble_result
from shardctl.conversion.engine.interrupt import stop_on_signals
from shardctl.conversion.engine.part import require_one_source
from shardctl.conversion.engine.staging import StagingArea
from shardctl.conversion.engine.worker import WorkerId
from shardctl.conversion.engine.worker_group import WorkerGroup
from shardctl.conversion.pending_record import list_overflow_warnings, parse_record_draft
from shardctl.conversion.worker_part import PATIENCE
from shardctl.storage.addresses import check_destination
from shardctl.storage.bounded_text import RECORD_TEXT, read_file
from shardctl.storage.cloud import is_bucket
from shardctl.storage.hub import refuse_shared_hub
from shardctl.tensors.record import RECORD, CheckpointRecord, parse_record

if TYPE_CHECKING:
    from shardctl.conversion.engine.part import WorkerPart


@value_class
class FinishResult(ResultView):
    """What `finish` made, or found made."""

    destination: Path | str
    """A directory, or the address of a place in a bucket."""
    record: CheckpointRecord
    workers: int
    """How many wrote it; 0 if it had been finished before."""
    parts: tuple[WorkerPart, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """How a trainer's files were understood."""
    target: str = ""
    """The destination as the caller named it; `destination` is where links lead."""
    seconds: float = 0.0
    """How long the call took."""

    @property
    def verdict(self) -> str:
        """The answer in one line: what the destination now holds, in which layout, and how many workers wrote it."""
        record, target = self.record, self.target or str(self.destination)
        workers = f"written by {format_plural(self.workers, 'worker')}, assembled in {format_duration(self.seconds)}"
        begin, spent = ("done", workers) if self.workers else ("done before", "nothing was written")
        held = format_plural(len(record.tensors), "tensor")
        return f"{begin}: {target} holds {held}, {record.describe_layout()} ({record.describe_size()}, {spent})"


def finish(destination: str | Path, *, patience: float = PATIENCE) -> FinishResult:
    """Publish what workers wrote to `destination`; a result that is finished already is left as it is.

    On return the result is complete and has its name, as if one machine had made it.

    Raises:
        UsageError: it is an address of a kind that is not written.
        Mismatch: workers are missing; it says which.
        SourceError: no worker has begun; workers read different elements of one tensor; or the elements of a source
            that shardctl wrote are not the ones it wrote.
        DestinationError: a worker is still at work, or the destination cannot be taken.
    """
    began = time.monotonic()
    done = _finish(destination, patience)
    return replace(done, target=str(destination), seconds=time.monotonic() - began)


def _finish(destination: str | Path, patience: float) -> FinishResult:
    check_destination(destination)
    refuse_shared_hub(destination)
    if is_bucket(destination):
        return _in_bucket(destination)
    destination = Path(destination)
    looked = StagingArea(destination, overwrite=True)  # whether it may be replaced is for the workers' plan to say
    if not looked.root.exists():
        return _read_finished_result(destination)
    overwrite = bool((WorkerGroup(looked).plan or {}).get("overwrite", True))
    with StagingArea(destination, overwrite=overwrite, patience=patience) as staging:
        if staging.published:
            return _read_finished_result(destination, staging.forget())
        header = WorkerGroup(staging).plan
        if header is None:
            return _read_finished_result(destination)
        return _publish_parts(staging, header)


def _in_bucket(destination: str) -> FinishResult:
    from shardctl.conversion.bucket_worker_group import publish_shares

    record, frame, parts, warnings = publish_shares(destination)
    if frame is None:
        return FinishResult(destination, record, 0, (), warnings)
    return FinishResult(
        destination=destination,
        record=record,
        workers=len(parts),
        parts=tuple(parts),
        warnings=(*frame.warnings, *list_overflow_warnings(frame, parts), *warnings),
        notes=frame.notes,
    )


def _read_finished_result(destination: Path, warnings: tuple[str, ...] = ()) -> FinishResult:
    try:
        record = parse_record(read_file(destination / RECORD, RECORD_TEXT))
    except (FileNotFoundError, NotADirectoryError):
        raise SourceError(
            f"no worker has begun to write {destination}",
            hint="shardctl reshard SRC DST --worker 0/3 is the first of three",
        ) from None
    return FinishResult(destination, record, 0, (), warnings)


def _publish_parts(staging: StagingArea, header: dict[str, Any]) -> FinishResult:
    crew, count = WorkerGroup(staging), header["workers"]
    header = {key: value for key, value in header.items() if key != "schema"}
    workers = [WorkerId(number, count) for number in range(count)]
    crew.require_rest(count)
    found = {worker: crew.part(worker, {**header, "worker": worker.number}) for worker in workers}
    absent = [worker for worker, part in found.items() if part is None]
    if absent:
        raise Mismatch(
            f"{len(absent)} of {count} workers have not finished their part of {staging.destination}: "
            f"{format_first_few(absent, 8)}",
            hint=f"run them, in any order: the same reshard with --worker {absent[0]}",
        )
    require_one_source({f"worker {worker}": part[0] for worker, part in found.items() if part is not None})
    staging.resume_tree(header["tree"])
    parts = [part for part, _ in filter(None, found.values())]
    frame = parse_record_draft(next(frame for _, frame in filter(None, found.values()) if frame is not None))
    stop = StopRequest(kept=True)
    with stop_on_signals(stop):
        record, warnings = assemble_result(frame, parts, staging, stop, sha256=bool(header["sha256"]))
    return FinishResult(
        destination=staging.destination,
        record=record,
        workers=count,
        parts=tuple(parts),
        warnings=(*frame.warnings, *list_overflow_warnings(frame, parts), *warnings),
        notes=frame.notes,
    )
