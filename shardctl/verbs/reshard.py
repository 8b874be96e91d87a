"""Moves the bytes: a checkpoint into another layout, in bounded memory, resumable, digested on the way."""

from __future__ import annotations

import hashlib
import json
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING

from shardctl.errors import DestinationError
from shardctl.execute.interrupt import stopping
from shardctl.execute.journal import Journal
from shardctl.execute.progress import Progress, Silent
from shardctl.execute.staging import Staging
from shardctl.options import ReshardOptions, SourceOptions
from shardctl.record import RECORD, SUMS, Record, dump, load
from shardctl.shares import whole
from shardctl.storage import FileProofs
from shardctl.storage.cloud import is_bucket
from shardctl.storage.durable import told
from shardctl.storage.local import LocalSource
from shardctl.storage.places import check_destination
from shardctl.verbs.drafting import Draft, draft
from shardctl.verbs.frame import PendingRecord, completed, framed, overflow_warnings, sums_file, with_sums
from shardctl.verbs.moving import move, versions_of
from shardctl.verbs.opening import opened
from shardctl.workers import Stop, heed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardctl.execute.part import Part
    from shardctl.verbs.opening import Checkpoint
    from shardctl.verbs.plan_file import PlanFile


@dataclass(frozen=True, slots=True)
class Resharded:
    """What `reshard` did."""

    destination: Path | str
    """A directory, or the address of a place in a bucket."""
    record: Record
    warnings: tuple[str, ...]
    read_bytes: int
    written_bytes: int
    """Output bytes that this run wrote."""
    kept_bytes: int
    """Output bytes that an interrupted run had written, found intact."""
    projected_memory_bytes: int
    proofs: FileProofs = field(default_factory=FileProofs)
    """Which files of the source have the hashes that their place promises."""
    notes: tuple[str, ...] = ()
    """How a trainer's files were understood, such as which copy of the weights was read; what was proved of others."""


def reshard(
    path: str | Path,
    destination: str | Path,
    wish: ReshardOptions | None = None,
    *,
    reading: SourceOptions | None = None,
    overwrite: bool = False,
    resume: bool = True,
    sha256: bool = False,
    progress: Progress | None = None,
    plan: PlanFile | None = None,
) -> Resharded:
    """Convert the checkpoint at `path` into a new directory `destination`.

    With a `plan`, what it says is done, or nothing; `wish`, if given, may then differ from the plan's in memory and
    threads only.
    On return every byte is right and on stable storage. On any error the source and what stood at the destination are
    untouched, and the same call finishes the job.
    """
    progress = progress or Silent()
    with worked_out(path, destination, wish, reading, plan) as work:
        if is_bucket(destination):
            from shardctl.verbs.into_bucket import into_bucket

            record, parts, warnings = into_bucket(
                work, destination, overwrite=overwrite, resume=resume, sha256=sha256, progress=progress
            )
            return _result(work, destination, record, parts, warnings)
        with Staging(Path(destination), overwrite=overwrite) as staging:
            return _run(work, staging, resume=resume, sha256=sha256, progress=progress)


def _run(work: Draft, staging: Staging, *, resume: bool, sha256: bool, progress: Progress) -> Resharded:
    identity = work.identity()
    versions = versions_of(work)
    header: dict[str, object] = {"plan": identity, "source": versions, "sha256": sha256}
    block = Journal.block(staging.journal, header) if resume else None
    if block is not None and staging.published:
        record = load((staging.destination / RECORD).read_bytes())
        return _result(work, staging.destination, record, None, staging.forget())
    if block is not None:
        work = replace(work, budget=work.budget.with_block(block))
    staging.begin(result_name(identity, versions, sha256), keep=block is not None)
    staging.require_space(work.write_bytes)
    stop = Stop(kept=True)
    with stopping(stop):
        part = move(
            work,
            whole(work.plan),
            work.carried,
            staging.data,
            (staging.journal, {**header, "block": work.budget.block}),
            versions=versions,
            discard=staging.discard,
            sha256=sha256,
            progress=progress,
            stop=stop,
        )
        frame = framed(work, identity)
        record, warnings = assembled(frame, [part], staging, stop, sha256=sha256)
    return _result(work, staging.destination, record, [part], (*overflow_warnings(frame, [part]), *warnings))


def result_name(*result: object) -> str:
    """A name that two results share only if their bytes are the same."""
    return hashlib.sha256(json.dumps(result).encode()).hexdigest()[:16]


def assembled(
    frame: PendingRecord, parts: Sequence[Part], staging: Staging, stop: Stop, *, sha256: bool
) -> tuple[Record, tuple[str, ...]]:
    """Make a result of parts that are all there: its record, which is written last, and its name; returns warnings."""
    record = completed(frame, parts)
    if sha256:
        content = sums_file(parts)
        staging.write(SUMS, content)
        record = with_sums(record, content)
    content = dump(record)
    staging.write(RECORD, content)
    heed(stop)
    return record, staging.publish({**record.files, RECORD: len(content)})


@contextmanager
def worked_out(
    path: str | Path,
    destination: str | Path,
    wish: ReshardOptions | None,
    reading: SourceOptions | None,
    plan: PlanFile | None,
) -> Iterator[Draft]:
    """A conversion of a source that is open for the length of a `with` block: as a plan file has it, or as is wished.

    Raises UsageError for a destination of a kind that is not written, before anything is read, and DestinationError if
    writing it would touch the source.
    """
    check_destination(destination)
    with opened(path, reading or (plan.reading if plan else None)) as checkpoint:
        _check_apart(checkpoint, destination)
        work = plan.drafted(checkpoint, wish or plan.wish) if plan else draft(checkpoint, wish or ReshardOptions())
        if is_bucket(destination):
            from shardctl.verbs.into_bucket import with_sending

            work = with_sending(work)
        yield work


def _check_apart(checkpoint: Checkpoint, destination: str | Path) -> None:
    """Raise DestinationError if writing `destination` would touch the source, or a later scan of the source see it."""
    source: PurePath
    wanted: PurePath
    if is_bucket(destination):
        source, wanted = PurePosixPath(checkpoint.source.location), PurePosixPath(destination)
        same = source == wanted
    elif isinstance(checkpoint.source, LocalSource):
        source, wanted = here, there = checkpoint.source.path.resolve(), Path(destination).resolve()
        with told(destination, "looking at"):
            same = there.exists() and there.samefile(here)  # under another name, as bind mounts give
    else:
        return
    if same or wanted.is_relative_to(source):
        raise DestinationError(f"{destination} is the source itself or inside it", hint="write to another directory")
    if source.is_relative_to(wanted):
        raise DestinationError(f"{destination} contains the source", hint="write to another directory")


def _result(
    work: Draft, destination: Path | str, record: Record, parts: Sequence[Part] | None, warnings: tuple[str, ...]
) -> Resharded:
    """What was done; without parts, an earlier run had done all of it."""
    training = work.checkpoint.stored.training
    tensor_bytes = sum(copy.write_bytes for copy in work.plan.copies)
    return Resharded(
        destination=destination,
        record=record,
        warnings=(*work.have.warnings, *warnings),
        read_bytes=work.plan.read_bytes if parts is None else sum(part.read_bytes for part in parts),
        written_bytes=sum(part.written_bytes for part in parts or ()),
        kept_bytes=sum(part.kept_bytes for part in parts) if parts is not None else tensor_bytes,
        projected_memory_bytes=work.budget.projected,
        proofs=work.checkpoint.source.proofs(),
        notes=(*(training.notes if training is not None else ()), *work.checkpoint.source.notes()),
    )
