"""Makes one result of the parts that several workers wrote: checks that all are there, writes the record, publishes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardctl.errors import Mismatch, SourceError, some
from shardctl.execute.crew import Crew
from shardctl.execute.interrupt import stopping
from shardctl.execute.part import require_one_source
from shardctl.execute.staging import Staging
from shardctl.execute.worker import Worker
from shardctl.record import RECORD, Record, load
from shardctl.storage.cloud import is_bucket
from shardctl.storage.places import check_destination
from shardctl.verbs.assembling import assembled
from shardctl.verbs.contribute import PATIENCE
from shardctl.verbs.frame import from_json, overflow_warnings
from shardctl.workers import Stop

if TYPE_CHECKING:
    from shardctl.execute.part import Part


@dataclass(frozen=True, slots=True)
class Finished:
    """What `finish` made, or found made."""

    destination: Path | str
    """A directory, or the address of a place in a bucket."""
    record: Record
    workers: int
    """How many wrote it; 0 if it had been finished before."""
    parts: tuple[Part, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """How a trainer's files were understood."""


def finish(destination: str | Path, *, patience: float = PATIENCE) -> Finished:
    """Publish what workers wrote to `destination`; a result that is finished already is left as it is.

    On return the result is complete and has its name, as if one machine had made it.

    Raises:
        UsageError: it is an address of a kind that is not written.
        Mismatch: workers are missing; it says which.
        SourceError: no worker has begun; workers read different elements of one tensor; or the elements of a source
            that shardctl wrote are not the ones it wrote.
        DestinationError: a worker is still at work, or the destination cannot be taken.
    """
    check_destination(destination)
    if is_bucket(destination):
        return _in_bucket(destination)
    destination = Path(destination)
    looked = Staging(destination, overwrite=True)  # whether it may be replaced is for the workers' plan to say
    if not looked.root.exists():
        return _finished_before(destination)
    overwrite = bool((Crew(looked).plan or {}).get("overwrite", True))
    with Staging(destination, overwrite=overwrite, patience=patience) as staging:
        if staging.published:
            return _finished_before(destination, staging.forget())
        header = Crew(staging).plan
        if header is None:
            return _finished_before(destination)
        return _published(staging, header)


def _in_bucket(destination: str) -> Finished:
    from shardctl.verbs.crew_in_bucket import publish_shares

    record, frame, parts, warnings = publish_shares(destination)
    if frame is None:
        return Finished(destination, record, 0, (), warnings)
    return Finished(
        destination=destination,
        record=record,
        workers=len(parts),
        parts=tuple(parts),
        warnings=(*frame.warnings, *overflow_warnings(frame, parts), *warnings),
        notes=frame.notes,
    )


def _finished_before(destination: Path, warnings: tuple[str, ...] = ()) -> Finished:
    try:
        record = load((destination / RECORD).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise SourceError(
            f"no worker has begun to write {destination}",
            hint="shardctl reshard SRC DST --worker 0/3 is the first of three",
        ) from None
    return Finished(destination, record, 0, (), warnings)


def _published(staging: Staging, header: dict[str, Any]) -> Finished:
    crew, count = Crew(staging), header["workers"]
    header = {key: value for key, value in header.items() if key != "schema"}
    workers = [Worker(number, count) for number in range(count)]
    crew.require_rest(count)
    found = {worker: crew.part(worker, {**header, "worker": worker.number}) for worker in workers}
    absent = [worker for worker, part in found.items() if part is None]
    if absent:
        raise Mismatch(
            f"{len(absent)} of {count} workers have not finished their part of {staging.destination}: "
            f"{some(absent, 8)}",
            hint=f"run them, in any order: the same reshard with --worker {absent[0]}",
        )
    require_one_source({f"worker {worker}": part[0] for worker, part in found.items() if part is not None})
    staging.proceed(header["tree"])
    parts = [part for part, _ in filter(None, found.values())]
    frame = from_json(next(frame for _, frame in filter(None, found.values()) if frame is not None))
    stop = Stop(kept=True)
    with stopping(stop):
        record, warnings = assembled(frame, parts, staging, stop, sha256=bool(header["sha256"]))
    return Finished(
        destination=staging.destination,
        record=record,
        workers=count,
        parts=tuple(parts),
        warnings=(*frame.warnings, *overflow_warnings(frame, parts), *warnings),
        notes=frame.notes,
    )
