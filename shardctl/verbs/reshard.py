"""Moves the bytes: a checkpoint into another layout, in bounded memory, resumable, digested on the way."""

from __future__ import annotations

import hashlib
import json
from contextlib import contextmanager
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
from shardctl.record import RECORD, Hashed, Record, RecordedTensor, StoredBox, dump, hash_spans, load
from shardctl.storage.durable import told
from shardctl.storage.local import LocalTarget
from shardctl.verbs.drafting import Draft, Wish, draft
from shardctl.verbs.opening import Reading, opened
from shardctl.verbs.optimizer import states_of
from shardctl.verify.agreement import require_agreement
from shardctl.workers import Effort, Stop

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.verbs.opening import Checkpoint
    from shardctl.verbs.plan_file import PlanFile

_Versions = dict[str, list[int | str]]
"""Size and version of each source file that matters."""

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
    notes: tuple[str, ...] = ()
    """How a trainer's files were understood, such as which copy of the weights was read."""


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
    plan: PlanFile | None = None,
) -> Resharded:
    """Convert the checkpoint at `path` into a new directory `destination`.

    With a `plan`, what it says is done, or nothing; `wish`, if given, may then differ from the plan's in memory and
    threads only.
    On return every byte is right and on stable storage. On any error the source and what stood at the destination are
    untouched, and the same call finishes the job.
    """
    with opened(path, reading or (plan.reading if plan else None)) as checkpoint:
        destination = Path(destination)
        check_apart(checkpoint, destination)
        work = plan.drafted(checkpoint, wish or plan.wish) if plan else draft(checkpoint, wish or Wish())
        with Staging(destination, overwrite=overwrite) as staging:
            return _run(work, staging, resume=resume, sha256=sha256, progress=progress or Silent())


def _run(work: Draft, staging: Staging, *, resume: bool, sha256: bool, progress: Progress) -> Resharded:
    identity = work.identity()
    versions: _Versions = {
        path: [stat.size, stat.version] for path, stat in work.checkpoint.source.files().items() if _matters(path, work)
    }
    header: dict[str, object] = {"plan": identity, "source": versions, "block": work.budget.block, "sha256": sha256}
    earlier = (Journal.header(staging.journal) if resume else None) or {}
    block = earlier.get("block")
    same = isinstance(block, int) and block > 0 and earlier == {**header, "block": block, "schema": Journal.SCHEMA}
    if same and staging.published:
        record = load((staging.destination / RECORD).read_bytes())
        return _result(work, staging, record, Outcome(kept_bytes=work.write_bytes), staging.forget())
    if same:
        header["block"] = block  # so that the bands are the same ones
        work = replace(work, budget=work.budget.with_block(int(block or 0)))
    staging.begin(_name(identity, versions, sha256), keep=same)
    staging.require_space(work.write_bytes)
    stop = Stop()
    with stopping(stop):
        effort = Effort(work.budget.threads, block=work.budget.block // 2, stop=stop)
        require_agreement(list(work.have.tensors.values()), work.checkpoint.source, effort)
        with _unchanged(work, versions, staging):
            outcome = _copy(work, staging, Journal(staging.journal, header), progress, stop)
        _check_recorded(work, outcome)
        with told(staging.data, "reading back"):
            record = _record(work, outcome, identity, _checksums(staging, stop) if sha256 else {})
            record = replace(record, hashes=_hashes(work, record, staging.data))
        content = dump(record)
        staging.write(RECORD, content)
        _heed(stop)
        warnings = staging.publish({**record.files, RECORD: len(content)})
    return _result(work, staging, record, outcome, warnings)


def _name(*result: object) -> str:
    """A name that two results share only if their bytes are the same."""
    return hashlib.sha256(json.dumps(result).encode()).hexdigest()[:16]


def _copy(work: Draft, staging: Staging, journal: Journal, progress: Progress, stop: Stop) -> Outcome:
    """Fill the staging area with everything but the record."""
    source, target = work.checkpoint.source, LocalTarget(staging.data)
    try:
        outcome = execute(work.plan, source, target, work.budget, journal=journal, progress=progress, stop=stop)
        _carry(work, target, stop)
    finally:
        target.close()
        journal.close()
    return outcome


def _heed(stop: Stop) -> None:
    if stop:
        raise Interrupted(
            "interrupted; everything finished so far is kept",
            signal=stop.signal,
            hint="run the same command again: it goes on where this one stopped",
        )


def check_apart(checkpoint: Checkpoint, destination: Path) -> None:
    """Raise DestinationError if writing `destination` would touch the source, or a later scan of the source see it."""
    source, wanted = checkpoint.source.path.resolve(), destination.resolve()
    same = wanted.exists() and wanted.samefile(source)  # under another name, as bind mounts give
    if same or wanted.is_relative_to(source):
        raise DestinationError(f"{destination} is the source itself or inside it", hint="write to another directory")
    if source.is_relative_to(wanted):
        raise DestinationError(f"{destination} contains the source", hint="write to another directory")


def _matters(path: str, work: Draft) -> bool:
    return path in work.have.files or any(side.file == path for side in work.carried)


def _carry(work: Draft, target: LocalTarget, stop: Stop) -> None:
    """Copy the side files, or write their new content."""
    buffer = bytearray(_COPY_BYTES)
    for side in work.carried:
        size = len(side.content) if side.content is not None else side.size
        target.create(side.name, size)
        if side.content is not None:
            target.write_at(side.name, 0, side.content)
        else:
            for offset in range(0, size, _COPY_BYTES):
                _heed(stop)
                view = memoryview(buffer)[: min(_COPY_BYTES, size - offset)]
                work.checkpoint.source.read_at(side.file, side.offset + offset, view)
                target.write_at(side.name, offset, view)
        target.sync(side.name)


@contextmanager
def _unchanged(work: Draft, versions: _Versions, staging: Staging) -> Iterator[None]:
    """Raise ChangedError if the source is another one than before, whatever the reader made of that.

    What was staged of it is thrown away: the source may be put back as it was, with its old modification time.
    """
    try:
        yield
    except SourceError as error:
        _check_unchanged(work.checkpoint, versions, staging, error)
        raise
    _check_unchanged(work.checkpoint, versions, staging)


def _check_unchanged(
    checkpoint: Checkpoint, versions: _Versions, staging: Staging, cause: SourceError | None = None
) -> None:
    for path, before in versions.items():
        now = checkpoint.source.restat(path)
        if now is None or [now.size, now.version] != before:
            staging.discard()
            raise ChangedError(
                f"{path} {'disappeared' if now is None else 'changed'} while it was read",
                hint="run again when nothing writes to the source",
            ) from cause


def _check_recorded(work: Draft, outcome: Outcome) -> None:
    """Refuse a source that shardctl wrote and whose elements are no longer the ones it wrote."""
    recorded = work.checkpoint.record.tensors if work.checkpoint.record else {}
    for name, tensor in work.have.tensors.items():
        if name not in recorded or (recorded[name].dtype, recorded[name].shape) != (tensor.dtype, tensor.shape):
            continue
        found = tensor_digest(outcome.source_sums[name], tensor.dtype, tensor.shape)
        if found != recorded[name].digest:
            raise SourceError(
                f"{name} has changed since {work.checkpoint.source.name} was written: digest {found}, but {RECORD} has "
                f"{recorded[name].digest}",
                hint=f"shardctl verify SRC --level full says where; remove {RECORD} if it was changed on purpose",
            )


def _checksums(staging: Staging, stop: Stop) -> dict[str, int]:
    """Write `SHA256SUMS` over every data and side file; returns its own entry for the record."""
    lines = []
    for file in sorted(f for f in staging.data.rglob("*") if f.is_file() and f.name not in {RECORD, _SUMS}):
        state, buffer = hashlib.sha256(), bytearray(_COPY_BYTES)
        with file.open("rb", buffering=0) as data:
            while got := data.readinto(buffer):
                _heed(stop)
                state.update(memoryview(buffer)[:got])
        lines.append(f"{state.hexdigest()}  {file.relative_to(staging.data).as_posix()}\n")
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
    weights = {name: tensor for name, tensor in tensors.items() if name not in states_of(work.have)}
    sizes = {path: file.size for path, file in work.plan.want.files.items()}
    sizes |= {side.name: len(side.content) if side.content is not None else side.size for side in work.carried}
    source_dtypes = {copy.source.name: copy.source.dtype for copy in work.plan.copies}
    return Record(
        version=__version__,
        plan=identity,
        layout=work.layout,
        digest=checkpoint_digest((n, t.dtype, t.shape, t.digest) for n, t in weights.items()),
        source_digest=checkpoint_digest((n, source_dtypes[n], t.shape, t.source_digest) for n, t in weights.items()),
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


def _hashes(work: Draft, record: Record, folder: Path) -> dict[str, Hashed]:
    """Hashes of the headers of data files and of all of the others, for the bytes that no digest speaks of."""
    literals = {f.path: [(start, len(data)) for start, data in f.literals] for f in work.plan.want.files.values()}
    return {path: hash_spans(folder / path, literals.get(path, [(0, size)])) for path, size in record.files.items()}


def _result(work: Draft, staging: Staging, record: Record, outcome: Outcome, warnings: tuple[str, ...]) -> Resharded:
    overflow = [
        f"{name}: {count} finite values became infinite in {work.plan.want.tensors[name].dtype}"
        for name, count in sorted(outcome.overflowed.items())
    ]
    return Resharded(
        destination=staging.destination,
        record=record,
        warnings=(*work.have.warnings, *overflow, *warnings),
        read_bytes=work.plan.read_bytes,
        written_bytes=outcome.written_bytes,
        kept_bytes=outcome.kept_bytes,
        projected_memory_bytes=work.budget.projected,
        notes=work.checkpoint.stored.training.notes if work.checkpoint.stored.training is not None else (),
    )
