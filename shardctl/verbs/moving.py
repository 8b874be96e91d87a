"""Moves one share of a conversion into a staging area: everything for which the source is needed."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from shardctl.errors import ChangedError, SourceError
from shardctl.execute.engine import Outcome, execute
from shardctl.execute.journal import Journal
from shardctl.execute.part import Part
from shardctl.record import hash_spans
from shardctl.storage.durable import told
from shardctl.storage.local import LocalTarget
from shardctl.verbs.record_crcs import crc_tracker, refuse_damage
from shardctl.verify.agreement import require_agreement
from shardctl.workers import Effort, heed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from shardctl.execute.progress import Progress
    from shardctl.manifest import Opaque
    from shardctl.record import Hashed
    from shardctl.shares import Share
    from shardctl.storage import Target
    from shardctl.storage.crc_tracker import CrcTracker
    from shardctl.verbs.drafting import Draft
    from shardctl.workers import Stop

Versions = dict[str, list[int | str]]
"""Size and version of each source file that matters."""

_COPY_BYTES: Final = 1 << 20


def versions_of(work: Draft) -> Versions:
    """The state of the source that a conversion is bound to."""
    return {
        path: [stat.size, stat.version] for path, stat in work.checkpoint.source.files().items() if _matters(path, work)
    }


def _matters(path: str, work: Draft) -> bool:
    return path in work.have.files or any(side.file == path for side in work.carried)


def move(
    work: Draft,
    share: Share,
    sides: Sequence[Opaque],
    tree: Path,
    journal: tuple[Path, Mapping[str, object]],
    *,
    versions: Versions,
    discard: Callable[[], None],
    sha256: bool,
    progress: Progress,
    stop: Stop,
) -> Part:
    """Write the files of a share, and side files, below `tree`; on return they are on stable storage.

    `journal` is where it goes, and its header. Raises ChangedError if the source is no longer what `versions` says,
    after `discard` has thrown away what was staged.
    """
    effort = Effort(work.budget.threads, block=work.budget.block // 2, stop=stop)
    work.checkpoint.source.heed(stop)
    tracker = crc_tracker(work.checkpoint, refuse_damage)
    tensors = [tensor for name, tensor in work.have.tensors.items() if name in share.first]
    require_agreement(tensors, work.checkpoint.source, effort)
    with _unchanged(work, versions, discard):
        outcome = _fill(work, share, sides, LocalTarget(tree), Journal(*journal), tracker, progress, stop)
    sizes = {path: file.size for path, file in share.plan.want.files.items()}
    sizes |= {side.name: side.nbytes for side in sides}
    with told(tree, "reading back"):
        sha256s = {path: hash_spans(tree / path, [(0, size)], stop).sha256 for path, size in sizes.items() if sha256}
        hashes = _hashes(share, sizes, tree, stop)
    return Part(
        files=sizes,
        source_sums=outcome.source_sums,
        output_sums=outcome.output_sums,
        whole_sums=outcome.whole_sums,
        overflowed=outcome.overflowed,
        hashes=hashes,
        sha256=sha256s,
        crcs=tuple(tracker.shares()),
        read_bytes=share.read_bytes,
        written_bytes=outcome.written_bytes,
        kept_bytes=outcome.kept_bytes,
        projected_memory_bytes=work.budget.projected,
    )


def _fill(
    work: Draft,
    share: Share,
    sides: Sequence[Opaque],
    target: LocalTarget,
    journal: Journal,
    tracker: CrcTracker,
    progress: Progress,
    stop: Stop,
) -> Outcome:
    source, portions = work.checkpoint.source, share.portions
    try:
        outcome = execute(
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
        )
        _carry(work, sides, target, stop)
        source.prove(outcome.read_whole, earlier=journal.proved, allow_unverified=work.checkpoint.allow_unverified)
    finally:
        target.close()
        journal.close()
    return outcome


def _carry(work: Draft, sides: Iterable[Opaque], target: Target, stop: Stop) -> None:
    """Copy side files, or write their new content."""
    buffer = bytearray(_COPY_BYTES)
    for side in sides:
        target.create(side.name, side.nbytes)
        if side.content is not None:
            target.write_at(side.name, 0, side.content)
        else:
            for offset in range(0, side.size, _COPY_BYTES):
                heed(stop)
                view = memoryview(buffer)[: min(_COPY_BYTES, side.size - offset)]
                work.checkpoint.source.read_at(side.file, side.offset + offset, view)
                target.write_at(side.name, offset, view)
        target.sync(side.name)


@contextmanager
def _unchanged(work: Draft, versions: Versions, discard: Callable[[], None]) -> Iterator[None]:
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
    work: Draft, versions: Versions, discard: Callable[[], None], cause: SourceError | None = None
) -> None:
    for path, before in versions.items():
        now = work.checkpoint.source.restat(path)
        if now is None or [now.size, now.version] != before:
            discard()
            raise ChangedError(
                f"{path} {'disappeared' if now is None else 'changed'} while it was read",
                hint="run again when nothing writes to the source",
            ) from cause


def _hashes(share: Share, sizes: dict[str, int], tree: Path, stop: Stop) -> dict[str, Hashed]:
    """Hashes of the headers of data files and of all of the others, for the bytes that no digest speaks of."""
    besides = {
        file.path: sorted([*((start, len(data)) for start, data in file.literals), *file.blanks])
        for file in share.plan.want.files.values()
    }
    return {path: hash_spans(tree / path, besides.get(path, [(0, size)]), stop) for path, size in sizes.items()}
