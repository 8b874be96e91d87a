"""Moves the bytes: a checkpoint into another layout, in bounded memory, resumable, digested on the way."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardctl.execute.interrupt import stopping
from shardctl.execute.journal import Journal
from shardctl.execute.progress import Progress, Silent
from shardctl.execute.staging import Staging
from shardctl.record import RECORD, Record, load
from shardctl.shares import whole
from shardctl.storage import FileProofs
from shardctl.storage.cloud import is_bucket
from shardctl.verbs.assembling import assembled, result_name
from shardctl.verbs.frame import framed, overflow_warnings
from shardctl.verbs.moving import move, versions_of
from shardctl.verbs.preparing import worked_out
from shardctl.workers import Stop

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardctl.execute.part import Part
    from shardctl.options import ReshardOptions, SourceOptions
    from shardctl.verbs.drafting import Draft
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
