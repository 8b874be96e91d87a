"""Moves the bytes: a checkpoint into another layout, in bounded memory, resumable, digested on the way."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardctl import __version__
from shardctl.digest import checkpoint_digest, tensor_digest
from shardctl.errors import ChangedError, DestinationError, Interrupted, SourceError
from shardctl.execute.engine import Outcome, execute
from shardctl.execute.interrupt import stopping
from shardctl.execute.journal import Journal
from shardctl.execute.progress import Progress, Silent
from shardctl.execute.staging import Staging
from shardctl.manifest import Region
from shardctl.record import RECORD, Record, RecordedTensor, StoredBox, dump, load
from shardctl.storage.local import LocalTarget
from shardctl.verbs.drafting import Draft, Wish, draft
from shardctl.verbs.opening import Reading, opened
from shardctl.verify.content import ties
from shardctl.workers import Effort, Stop

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.verbs.opening import Checkpoint

_SUMS: Final = "SHA256SUMS"
_COPY_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Resharded:
    """What `reshard` did."""

    destination: Path
    record: Record
    warnings: tuple[str, ...]
    read_bytes: int
    written_bytes: int
    """Output bytes that this run wrote."""
    kept_bytes: int
    """Output bytes that an interrupted run had written, found intact."""
    projected_memory_bytes: int


def reshard(
    path: str | Path,
    destination: str | Path,
    wish: Wish | None = None,
    *,
    reading: Reading | None = None,
    overwrite: bool = False,
    resume: bool = True,
    sha256: bool = False,
    progress: Progress | None = None,
) -> Resharded:
    """Convert the checkpoint at `path` into a new directory `destination`.

    On return every byte is right and on stable storage. On any error the source and what stood at the destination are
    untouched, and the same call finishes the job.
    """
    with opened(path, reading) as checkpoint:
        destination = Path(destination)
        check_apart(checkpoint, destination)
        work = draft(checkpoint, wish or Wish())
        with Staging(destination, overwrite=overwrite) as staging:
            return _run(work, staging, resume=resume, sha256=sha256, progress=progress or Silent())


def _run(work: Draft, staging: Staging, *, resume: bool, sha256: bool, progress: Progress) -> Resharded:
    source, identity = work.checkpoint.source, work.identity()
    versions: dict[str, list[int | str]] = {
        path: [stat.size, stat.version] for path, stat in source.files().items() if _matters(path, work)
    }
    header: dict[str, object] = {"plan": identity, "source": versions, "block": work.budget.block, "sha256": sha256}
    earlier = Journal.header(staging.journal) if resume else None
    if earlier is not None and earlier == {**header, "block": earlier.get("block"), "schema": Journal.SCHEMA}:
        if staging.published(identity):
            staging.forget()
            record = load((staging.destination / RECORD).read_bytes())
            return _result(work, staging, record, Outcome(kept_bytes=work.write_bytes))
        header["block"] = earlier["block"]  # so that the bands are the same ones
        work = replace(work, budget=work.budget.with_block(earlier["block"]))
    else:
        staging.require_replaceable()
        staging.discard()
    staging.require_space(work.write_bytes)
    _check_ties(work)
    target, stop = LocalTarget(staging.data), Stop()
    journal = Journal(staging.journal, header)
    try:
        with stopping(stop):
            outcome = execute(work.plan, source, target, work.budget, journal=journal, progress=progress, stop=stop)
            _carry(work, target)
            _check_unchanged(work.checkpoint, versions)
            record = _record(work, outcome, identity, _checksums(staging, stop) if sha256 else {})
            staging.write(RECORD, dump(record))
    finally:
        target.close()
        journal.close()
    staging.publish()
    return _result(work, staging, record, outcome)


def check_apart(checkpoint: Checkpoint, destination: Path) -> None:
    """Raise DestinationError if writing `destination` would touch the source, or a later scan of the source see it."""
    source, wanted = checkpoint.source.path.resolve(), destination.resolve()
    if wanted.is_relative_to(source):
        raise DestinationError(f"{destination} is the source itself or inside it", hint="write to another directory")
    if source.is_relative_to(wanted):
        raise DestinationError(f"{destination} contains the source", hint="write to another directory")


def _check_ties(work: Draft) -> None:
    """Refuse a tied weight of which two different versions are stored: one of them would be lost."""
    effort = Effort(work.budget.threads, block=work.budget.block // 2)
    for found in ties(list(work.have.tensors.values()), work.checkpoint.source, effort):
        tensor = work.have.tensors[found.tensor]
        raise SourceError(
            f"{' and '.join(dict.fromkeys(c.name for c in tensor.chunks))} are tied by config.json, "
            f"but their stored values differ, first at {found.first}",
            hint="if they are two weights, say so: --config with tie_word_embeddings false",
        )


def _matters(path: str, work: Draft) -> bool:
    return path in work.have.files or any(side.file == path for side in work.carried)


def _carry(work: Draft, target: LocalTarget) -> None:
    """Copy the side files, or write their new content."""
    buffer = bytearray(_COPY_BYTES)
    for side in work.carried:
        size = len(side.content) if side.content is not None else side.size
        target.create(side.name, size)
        if side.content is not None:
            target.write_at(side.name, 0, side.content)
        else:
            for offset in range(0, size, _COPY_BYTES):
                view = memoryview(buffer)[: min(_COPY_BYTES, size - offset)]
                work.checkpoint.source.read_at(side.file, side.offset + offset, view)
                target.write_at(side.name, offset, view)
        target.sync(side.name)


def _check_unchanged(checkpoint: Checkpoint, versions: Mapping[str, list[int | str]]) -> None:
    for path, before in versions.items():
        now = checkpoint.source.restat(path)
        if [now.size, now.version] != before:
            raise ChangedError(f"{path} changed while it was read", hint="run again when nothing writes to the source")


def _checksums(staging: Staging, stop: Stop) -> dict[str, int]:
    """Write `SHA256SUMS` over every data and side file; returns its own entry for the record."""
    lines = []
    for file in sorted(f for f in staging.data.rglob("*") if f.is_file() and f.name not in {RECORD, _SUMS}):
        if stop:
            raise Interrupted("interrupted; everything is copied, and kept", signal=stop.signal)
        name = file.relative_to(staging.data).as_posix()
        with file.open("rb") as data:
            lines.append(f"{hashlib.file_digest(data, 'sha256').hexdigest()}  {name}\n")
    content = "".join(lines).encode()
    staging.write(_SUMS, content)
    return {_SUMS: len(content)}


def _record(work: Draft, outcome: Outcome, identity: str, extra: dict[str, int]) -> Record:
    tensors = {}
    for copy in sorted(work.plan.copies, key=lambda c: c.source.name):
        have, want = copy.source, copy.target
        stored = sorted((c.where.file, c.box.origin, c.name, c.box) for c in want.chunks if isinstance(c.where, Region))
        tensors[have.name] = RecordedTensor(
            dtype=want.dtype,
            shape=want.shape,
            digest=tensor_digest(outcome.output_sums[have.name], want.dtype, want.shape),
            source_digest=tensor_digest(outcome.source_sums[have.name], have.dtype, have.shape),
            ties=have.ties,
            spelling=have.spelling,
            stored=tuple(StoredBox(file, name, box) for file, _, name, box in stored),
        )
    sizes = {path: file.size for path, file in work.plan.want.files.items()}
    sizes |= {side.name: len(side.content) if side.content is not None else side.size for side in work.carried}
    source_dtypes = {copy.source.name: copy.source.dtype for copy in work.plan.copies}
    return Record(
        version=__version__,
        plan=identity,
        layout=work.layout,
        digest=checkpoint_digest((n, t.dtype, t.shape, t.digest) for n, t in tensors.items()),
        source_digest=checkpoint_digest((n, source_dtypes[n], t.shape, t.source_digest) for n, t in tensors.items()),
        source={
            "format": work.have.format,
            "files": {path: file.size for path, file in sorted(work.have.files.items())},
        },
        mesh=work.placed.mesh if work.placed else None,
        stages=work.placed.stages if work.placed else (),
        architecture=work.checkpoint.model.architecture if work.checkpoint.model else "",
        options=work.options,
        files=dict(sorted((sizes | extra).items())),
        tensors=tensors,
    )


def _result(work: Draft, staging: Staging, record: Record, outcome: Outcome) -> Resharded:
    overflow = [
        f"{name}: {count} finite values became infinite in {work.plan.want.tensors[name].dtype}"
        for name, count in sorted(outcome.overflowed.items())
    ]
    return Resharded(
        destination=staging.destination,
        record=record,
        warnings=(*work.have.warnings, *overflow),
        read_bytes=work.plan.read_bytes,
        written_bytes=outcome.written_bytes,
        kept_bytes=outcome.kept_bytes,
        projected_memory_bytes=work.budget.projected,
    )
