"""One worker's part of a conversion that several share; `finish` makes the result of all parts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardctl.execute.crew import Crew
from shardctl.execute.interrupt import stopping
from shardctl.execute.journal import Journal
from shardctl.execute.part import Part, dump
from shardctl.execute.progress import Progress, Silent
from shardctl.execute.staging import Staging
from shardctl.execute.worker import Worker
from shardctl.shares import divide, share
from shardctl.storage import FileProofs
from shardctl.storage.cloud import is_bucket
from shardctl.verbs.assembling import result_name
from shardctl.verbs.frame import framed, overflow_warnings, to_json
from shardctl.verbs.moving import move, versions_of
from shardctl.verbs.preparing import worked_out
from shardctl.verbs.sampling import sample_source
from shardctl.version import __version__
from shardctl.workers import Effort, Stop, heed

if TYPE_CHECKING:
    from collections.abc import Collection

    from shardctl.options import ReshardOptions, SourceOptions
    from shardctl.shares import Share
    from shardctl.verbs.drafting import Draft
    from shardctl.verbs.moving import Versions
    from shardctl.verbs.plan_file import PlanFile

PATIENCE: Final = 60
"""Seconds to wait while other workers join, one after another, or while a result is published."""


@dataclass(frozen=True, slots=True)
class Contributed:
    """What one worker did."""

    destination: Path | str
    """A directory, or the address of a place in a bucket."""
    worker: Worker
    part: Part
    done_before: bool
    """Whether an earlier run of this worker had done all of it."""
    missing: tuple[Worker, ...]
    """The workers that had not finished yet."""
    warnings: tuple[str, ...]
    proofs: FileProofs = field(default_factory=FileProofs)
    """Which files of the source have the hashes that their place promises: a part of a file cannot be hashed."""
    notes: tuple[str, ...] = ()
    """The same in words."""


def contribute(
    path: str | Path,
    destination: str | Path,
    wish: ReshardOptions | None = None,
    *,
    worker: Worker,
    reading: SourceOptions | None = None,
    overwrite: bool = False,
    resume: bool = True,
    sha256: bool = False,
    progress: Progress | None = None,
    plan: PlanFile | None = None,
    run: str = "",
) -> Contributed:
    """Write the files of one worker of a conversion into the staging area of `destination`, which all workers see.

    Into a bucket they go under their own names, but what makes a checkpoint of them.

    All workers are given the same arguments but for `worker`, memory and threads. Each output file has one writer. On
    return every byte of this part is right and on stable storage; on any error, the same call finishes it. `run` names
    what starts workers anew after it has seen them die.
    """
    with worked_out(path, destination, wish, reading, plan) as work:
        identity, versions = work.identity(), versions_of(work)
        header = {
            "plan": identity,
            "source": {name: [size, _anywhere(str(version))] for name, (size, version) in versions.items()},
            "sample": sample_source(work.checkpoint.source, versions, Effort(work.budget.threads)),
            "sha256": sha256,
            "workers": worker.count,
            "overwrite": overwrite,
            "version": __version__,
        }
        if is_bucket(destination):
            from shardctl.verbs.crew_in_bucket import send_share

            progress = progress or Silent()
            part, before, done = send_share(
                work, destination, worker, header, versions, resume=resume, progress=progress
            )
            return _contributed(work, destination, worker, part, done, before=before)
        tree = result_name(identity, header["source"], header["sample"], sha256)
        with Staging(Path(destination), overwrite=overwrite, patience=PATIENCE) as staging:
            crew = Crew(staging)
            crew.join(tree, header)
            lock = crew.lock(worker, run)
            lock.acquire(PATIENCE if run else 0)
        try:
            desk = _Desk(work, staging, crew, worker, {**header, "tree": tree, "worker": worker.number})
            return desk.run(versions, resume=resume, progress=progress or Silent())
        finally:
            lock.release()


def _contributed(
    work: Draft, destination: Path | str, worker: Worker, part: Part, done: Collection[Worker], *, before: bool
) -> Contributed:
    """What a worker did, `done` being those who say that they have finished."""
    workers = (Worker(number, worker.count) for number in range(worker.count))
    overflow = tuple(overflow_warnings(framed(work, ""), [part])) if part.overflowed else ()
    return Contributed(
        destination=destination,
        worker=worker,
        part=part,
        done_before=before,
        missing=tuple(each for each in workers if each not in done),
        warnings=(*work.have.warnings, *overflow),
        proofs=work.checkpoint.source.proofs(),
        notes=work.checkpoint.source.notes(),
    )


def _anywhere(version: str) -> str:
    """A file's version as other machines see it: they may number its inode differently, but not its last change."""
    inode, colon, modified = version.partition(":")
    return modified if colon and inode.isdigit() and modified.isdigit() else version


@dataclass(frozen=True, slots=True)
class _Desk:
    """Where one worker works."""

    work: Draft
    staging: Staging
    crew: Crew
    worker: Worker
    header: dict[str, Any]

    def run(self, versions: Versions, *, resume: bool, progress: Progress) -> Contributed:
        found = self.crew.part(self.worker, self.header) if resume else None
        part = found[0] if found else self._made(versions, resume=resume, progress=progress)
        workers = (Worker(number, self.worker.count) for number in range(self.worker.count))
        done = {worker for worker in workers if self.crew.part_exists(worker)}
        return _contributed(self.work, self.staging.destination, self.worker, part, done, before=found is not None)

    def _made(self, versions: Versions, *, resume: bool, progress: Progress) -> Part:
        work, mine = self.work, self._share()
        path = self.crew.journal(self.worker)
        header: dict[str, Any] = {**self.header, "source": versions}
        block = Journal.block(path, header) if resume else None
        if block is not None:
            work = replace(work, budget=work.budget.with_block(block))
        else:
            self.crew.forget_part(self.worker)
        self.staging.require_space(work.write_bytes)
        stop = Stop(kept=True)
        with stopping(stop):
            part = move(
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
            frame = to_json(framed(work, self.header["plan"])) if self.worker.number == 0 else None
            heed(stop)
            self.crew.note_part(self.worker, dump(part, self.header, frame))
        return part

    def _share(self) -> Share:
        return share(self.work.plan, divide(self.work.plan, self.worker.count), self.worker.number)
