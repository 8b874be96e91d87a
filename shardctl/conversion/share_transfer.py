"""Moves one share of a conversion into a staging area; after that, the source is no longer needed."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

from shardctl.base.errors import ChangedError, SourceError, format_first_few
from shardctl.base.workers import ExecutionOptions, raise_if_stopped
from shardctl.checkpoint.computed_source import ComputedSource
from shardctl.checkpoint.record_crcs import build_crc_tracker, refuse_damage
from shardctl.conversion.engine.block_sharing import prepare_sharing
from shardctl.conversion.engine.engine import CopyOutcome, execute_plan
from shardctl.conversion.engine.journal import BandJournal
from shardctl.conversion.engine.part import WorkerPart
from shardctl.storage.durable import translate_os_errors
from shardctl.storage.local import LocalTarget
from shardctl.tensors.record import hash_file_spans
from shardctl.tensors.shares import list_read_files
from shardctl.verify.agreement import require_agreement

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from shardctl.base.workers import ProgressWatcher, StopRequest
    from shardctl.conversion.conversion_plan import PlannedConversion
    from shardctl.conversion.engine.block_sharing import BlockSharer
    from shardctl.storage import Source, WriteTarget
    from shardctl.storage.crc_tracker import CrcTracker
    from shardctl.tensors.manifest import OpaqueObject
    from shardctl.tensors.record import HashedSpans
    from shardctl.tensors.shares import WorkerShare

Result = TypeVar("Result")

Versions = dict[str, list[int | str]]
"""Size and version of each source file that matters."""

MAX_TOUCHED_RUNS: Final = 3
"""Runs in a row under each of which somebody touched the source, before that is an error."""

_COPY_BYTES: Final = 1 << 20


def list_source_versions(work: PlannedConversion) -> Versions:
    """List the state of the source that a conversion is bound to."""
    source = work.checkpoint.source
    files, folder = source.files(), source.folder
    carried = {side.file for side in work.carried}
    needed = [path for path in files if path in work.have.files or path in carried]
    if folder is not None and any(not (folder / path).is_file() for path in needed):
        needed = list(files)  # arrays of a library's own format: only that knows in which files they are
    return {path: [files[path].size, files[path].version] for path in needed}


def list_change_times(source: Source, versions: Versions) -> dict[str, int]:
    """List the status change time in nanoseconds of each file whose version does not follow from its content."""
    files = source.files()
    return {path: files[path].changed for path in versions if files[path].changed}


class TouchedError(ChangedError):
    """Somebody touched the source while it was read: whether its bytes changed, a run that resumes finds out."""


def repeat_while_touched(convert: Callable[[], Result], progress: ProgressWatcher) -> Result:
    """Return the result of `convert`, which resumes what was written under the eyes of somebody who touched the source.

    Raises TouchedError if that never ends.
    """
    for _ in range(MAX_TOUCHED_RUNS - 1):
        try:
            return convert()
        except TouchedError as error:
            progress.warn((f"{error.message}; what was read of it is compared with what it holds now",))
    return convert()


def move_share(
    work: PlannedConversion,
    share: WorkerShare,
    sides: Sequence[OpaqueObject],
    tree: Path,
    journal: tuple[Path, Mapping[str, object]],
    *,
    versions: Versions,
    discard: Callable[[], None],
    sha256: bool,
    progress: ProgressWatcher,
    stop: StopRequest,
) -> WorkerPart:
    """Write the files of a share, and side files, below `tree`; on return they are on stable storage.

    `journal` is where it goes, and its header. Raises ChangedError if the source is no longer what `versions` says,
    after `discard` has thrown away what was staged, and SourceError for a finite value that becomes infinite, unless
    `work` allows that; what was done until then stays for a run that allows it.
    """
    effort = ExecutionOptions(work.budget.threads, block=work.budget.block // 2, stop=stop)
    work.checkpoint.source.set_stop_request(stop)
    tracker = build_crc_tracker(work.checkpoint, refuse_damage)
    tensors = [tensor for name, tensor in work.have.tensors.items() if name in share.first]
    tensors += (*work.checkpoint.encoded, *work.checkpoint.adapted)
    require_agreement(tensors, work.checkpoint.source, effort, work.checkpoint.find_spec)
    reflink = work.reshard_options.reflink
    target = LocalTarget(tree, sharing=reflink)
    sharer = prepare_sharing(work.checkpoint.source, work.have, target) if reflink else None
    changed = list_change_times(work.checkpoint.source, versions)
    with _require_unchanged(work, versions, changed, discard):
        notes = BandJournal(*journal, changed)
        outcome = _copy_share(work, share, sides, target, sharer, notes, tracker, progress, stop)
    sizes = {path: file.size for path, file in share.plan.want.files.items()}
    sizes |= {side.name: side.nbytes for side in sides}
    with translate_os_errors(tree, "reading back"):
        sha256s = {
            path: hash_file_spans(tree / path, [(0, size)], stop).sha256 for path, size in sizes.items() if sha256
        }
        hashes = _hash_other_bytes(share, sizes, tree, stop)
    return WorkerPart(
        files=sizes,
        source_sums=outcome.source_sums,
        output_sums=outcome.output_sums,
        whole_sums=outcome.whole_sums,
        overflowed=outcome.overflowed,
        hashes=hashes,
        sha256=sha256s,
        crcs=tuple(tracker.shares()),
        proved=tuple(work.checkpoint.source.proofs().verified),
        touched={path: (str(versions[path][1]), changed[path]) for path in _list_files(share, sides, changed)},
        read_bytes=share.read_bytes,
        written_bytes=outcome.written_bytes,
        shared_bytes=outcome.shared_bytes,
        kept_bytes=outcome.kept_bytes,
        projected_memory_bytes=work.budget.projected,
    )


def _list_files(share: WorkerShare, sides: Iterable[OpaqueObject], files: Collection[str]) -> Collection[str]:
    """List those of `files` that a share is made of; all of them if it reads anything that is computed from files."""
    read = {side.file for side in sides if side.content is None} | list_read_files(share.plan)
    return read if read <= set(files) else files


def _copy_share(
    work: PlannedConversion,
    share: WorkerShare,
    sides: Sequence[OpaqueObject],
    target: LocalTarget,
    sharer: Callable[[], BlockSharer] | None,
    journal: BandJournal,
    tracker: CrcTracker,
    progress: ProgressWatcher,
    stop: StopRequest,
) -> CopyOutcome:
    source, portions = work.checkpoint.source, share.portions
    try:
        outcome = execute_plan(
            share.plan,
            source,
            target,
            work.budget,
            tracker=tracker,
            portions=portions,
            journal=journal,
            progress=progress,
            stop=stop,
            allow_unverified=work.checkpoint.allow_unverified,
            sharer=sharer,
            take_overflow=source.take_overflow if isinstance(source, ComputedSource) else None,
            refuse_overflow=not work.allow_overflow,
        )
        _copy_side_files(work, sides, target, stop)
        source.prove(outcome.read_whole, earlier=journal.proved, allow_unverified=work.checkpoint.allow_unverified)
    finally:
        target.close()
        journal.close()
    return outcome


def _copy_side_files(
    work: PlannedConversion, sides: Iterable[OpaqueObject], target: WriteTarget, stop: StopRequest
) -> None:
    """Copy side files, or write their new content."""
    buffer = bytearray(_COPY_BYTES)
    for side in sides:
        target.create(side.name, side.nbytes)
        if side.content is not None:
            target.write_at(side.name, 0, side.content)
        else:
            for offset in range(0, side.size, _COPY_BYTES):
                raise_if_stopped(stop)
                view = memoryview(buffer)[: min(_COPY_BYTES, side.size - offset)]
                work.checkpoint.source.read_at(side.file, side.offset + offset, view)
                target.write_at(side.name, offset, view)
        target.sync(side.name)


@contextmanager
def _require_unchanged(
    work: PlannedConversion, versions: Versions, changed: Mapping[str, int], discard: Callable[[], None]
) -> Iterator[None]:
    """Raise ChangedError if the source is another one than before, whatever the reader made of that.

    What was staged of it is thrown away: the source may be put back as it was, with its old modification time. If
    nothing but status change times differ, it is kept, and TouchedError is raised.
    """
    try:
        yield
    except ChangedError:
        discard()
        raise
    except SourceError as error:
        _check_unchanged(work, versions, changed, discard, error)
        raise
    _check_unchanged(work, versions, changed, discard)


def _check_unchanged(
    work: PlannedConversion,
    versions: Versions,
    changed: Mapping[str, int],
    discard: Callable[[], None],
    cause: SourceError | None = None,
) -> None:
    touched = []
    for path, before in versions.items():
        now = work.checkpoint.source.stat_file(path)
        if now is None or [now.size, now.version] != before:
            discard()
            raise ChangedError(
                f"{path} {'disappeared' if now is None else 'changed'} while it was read",
                hint="run again when nothing writes to the source",
            ) from cause
        if path in changed and now.changed != changed[path]:
            touched.append(path)
    if touched:
        raise TouchedError(
            f"{format_first_few(touched)} got another status change time while it was read (an edit in place, chmod, a "
            "hard link)",
            hint="run again when nothing touches the source",
        ) from cause


def _hash_other_bytes(
    share: WorkerShare, sizes: dict[str, int], tree: Path, stop: StopRequest
) -> dict[str, HashedSpans]:
    """Return hashes of the headers of data files and of all of the others, for the bytes that no digest speaks of."""
    besides = {
        file.path: sorted([*((start, len(data)) for start, data in file.literals), *file.blanks])
        for file in share.plan.want.files.values()
    }
    return {path: hash_file_spans(tree / path, besides.get(path, [(0, size)]), stop) for path, size in sizes.items()}
