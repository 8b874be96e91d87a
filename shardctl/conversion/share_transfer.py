"""Moves one share of a conversion into a staging area; after that, the source is no longer needed."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from shardctl.checkpoint.computed_source import ComputedSource
from shardctl.checkpoint.record_crcs import build_crc_tracker, refuse_damage
from shardctl.errors import ChangedError, SourceError
from shardctl.execute.block_sharing import prepare_sharing
from shardctl.execute.engine import CopyOutcome, execute_plan
from shardctl.execute.journal import BandJournal
from shardctl.execute.part import WorkerPart
from shardctl.record import hash_file_spans
from shardctl.storage.durable import translate_os_errors
from shardctl.storage.local import LocalTarget
from shardctl.verify.agreement import require_agreement
from shardctl.workers import ExecutionOptions, raise_if_stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from shardctl.conversion.conversion_plan import PlannedConversion
    from shardctl.execute.block_sharing import BlockSharer
    from shardctl.manifest import OpaqueObject
    from shardctl.record import HashedSpans
    from shardctl.shares import WorkerShare
    from shardctl.storage import WriteTarget
    from shardctl.storage.crc_tracker import CrcTracker
    from shardctl.workers import ProgressWatcher, StopRequest

Versions = dict[str, list[int | str]]
"""Size and version of each source file that matters."""

_COPY_BYTES: Final = 1 << 20


def list_source_versions(work: PlannedConversion) -> Versions:
    """List the state of the source that a conversion is bound to."""
    return {
        path: [stat.size, stat.version]
        for path, stat in work.checkpoint.source.files().items()
        if _is_needed(path, work)
    }


def _is_needed(path: str, work: PlannedConversion) -> bool:
    return path in work.have.files or any(side.file == path for side in work.carried)


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
    after `discard` has thrown away what was staged.
    """
    effort = ExecutionOptions(work.budget.threads, block=work.budget.block // 2, stop=stop)
    work.checkpoint.source.heed(stop)
    tracker = build_crc_tracker(work.checkpoint, refuse_damage)
    tensors = [tensor for name, tensor in work.have.tensors.items() if name in share.first]
    tensors += (*work.checkpoint.encoded, *work.checkpoint.adapted)
    if isinstance(work.checkpoint.source, ComputedSource):
        work.checkpoint.source.track(tracker)
    require_agreement(tensors, work.checkpoint.source, effort)
    reflink = work.reshard_options.reflink
    target = LocalTarget(tree, sharing=reflink)
    sharer = prepare_sharing(work.checkpoint.source, work.have, target) if reflink else None
    with _require_unchanged(work, versions, discard):
        outcome = _copy_share(work, share, sides, target, sharer, BandJournal(*journal), tracker, progress, stop)
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
        read_bytes=share.read_bytes,
        written_bytes=outcome.written_bytes,
        shared_bytes=outcome.shared_bytes,
        kept_bytes=outcome.kept_bytes,
        projected_memory_bytes=work.budget.projected,
    )


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
def _require_unchanged(work: PlannedConversion, versions: Versions, discard: Callable[[], None]) -> Iterator[None]:
    """Raise ChangedError if the source is another one than before, whatever the reader made of that.

    What was staged of it is thrown away: the source may be put back as it was, with its old modification time.
    """
    try:
        yield
    except ChangedError:
        discard()
        raise
    except SourceError as error:
        _check_unchanged(work, versions, discard, error)
        raise
    _check_unchanged(work, versions, discard)


def _check_unchanged(
    work: PlannedConversion, versions: Versions, discard: Callable[[], None], cause: SourceError | None = None
) -> None:
    for path, before in versions.items():
        now = work.checkpoint.source.restat(path)
        if now is None or [now.size, now.version] != before:
            discard()
            raise ChangedError(
                f"{path} {'disappeared' if now is None else 'changed'} while it was read",
                hint="run again when nothing writes to the source",
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
