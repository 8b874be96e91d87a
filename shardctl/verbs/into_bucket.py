"""A conversion whose result goes into a bucket: group by group, each filled on this machine's disk and then sent."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardctl.errors import DestinationError, UsageError
from shardctl.execute.budget import budget
from shardctl.execute.interrupt import stopping
from shardctl.execute.uploads import Uploads, require_free
from shardctl.record import SUMS, dump, load
from shardctl.shares import Share, gathered, share
from shardctl.storage.byte_names import is_unicode
from shardctl.storage.cloud.bucket import Bucket, sending_bytes
from shardctl.storage.room import free_space
from shardctl.verbs.described import CONFIG
from shardctl.verbs.frame import completed, framed, overflow_warnings, sums_file, with_sums
from shardctl.verbs.moving import move, versions_of
from shardctl.version import __version__
from shardctl.workers import Stop, heed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardctl.execute.part import Part
    from shardctl.execute.progress import Progress
    from shardctl.manifest import Opaque
    from shardctl.record import Record
    from shardctl.verbs.drafting import Draft
    from shardctl.verbs.moving import Versions

_SHARE: Final = 2
"""A group takes at most one in so many of the free bytes of the scratch directory, unless one file takes more."""


def into_bucket(
    work: Draft, destination: str, *, overwrite: bool, resume: bool, sha256: bool, progress: Progress
) -> tuple[Record, Sequence[Part] | None, tuple[str, ...]]:
    """Write the result of a conversion below `destination`; returns its record, what was done, and warnings.

    Each file is filled in the directory for temporary files, sent, and removed there. On return all objects are
    complete. On an error there is no `shardctl.json`, and no object that is not complete. What was done is None if an
    earlier run had done all of it.
    """
    _require_object_names(work)
    bucket, stop = _bucket(destination, overwrite=overwrite), Stop(kept=True)
    identity, versions = work.identity(), versions_of(work)
    header = {"plan": identity, "source": versions, "sha256": sha256, "version": __version__}
    frame = framed(work, identity)
    with tempfile.TemporaryDirectory(prefix="shardctl-") as scratch, stopping(stop):
        bucket.stop = stop
        free = free_space(Path(scratch))
        groups = _groups(work, free)
        _require_room(work, groups, free, Path(scratch))
        uploads = Uploads(bucket, header, [*frame.record.files, *([SUMS] if sha256 else [])], resume=resume)
        if uploads.published is not None:
            uploads.forget()
            return load(uploads.published), None, ()
        sender = _Sender(work, versions, Path(scratch), uploads, progress, stop, sha256)
        parts = [sender.group(number, share(work.plan, groups, number)) for number in range(len(groups) - 1)]
        parts.append(sender.last(len(groups) - 1, share(work.plan, groups, len(groups) - 1)))
        record = completed(frame, parts)
        if sha256:
            content = sums_file(parts)
            record = with_sums(record, content)
            bucket.write(SUMS, content)
        heed(stop)
        uploads.publish(dump(record), record.files)
    return record, parts, tuple(overflow_warnings(frame, parts))


def with_sending(work: Draft) -> Draft:
    """The same with room for sending in its budget; raises MemoryBudgetError if there is none."""
    largest = max((file.size for file in work.plan.want.files.values()), default=0)
    beside = work.checkpoint.source.held_bytes + sending_bytes(largest)
    return replace(work, budget=budget(work.plan, work.wish.host_memory, work.budget.threads, beside=beside))


def check_bucket(work: Draft, destination: str, *, overwrite: bool) -> Path:
    """Raise what `into_bucket` would raise before its first byte; returns where files would be filled."""
    _require_object_names(work)
    require_free(_bucket(destination, overwrite=overwrite))
    scratch = Path(tempfile.gettempdir())
    free = free_space(scratch)
    _require_room(work, _groups(work, free), free, scratch)
    return scratch


def _require_object_names(work: Draft) -> None:
    """Raise DestinationError for a side file that no object can be called as: names of objects are UTF-8."""
    odd = [side.name for side in work.carried if not is_unicode(side.name)]
    if odd:
        raise DestinationError(
            f"{odd[0]} travels along, and its name is not UTF-8, as that of an object must be",
            hint="rename the file, or write to a directory",
        )


def _bucket(destination: str, *, overwrite: bool) -> Bucket:
    if overwrite:
        raise UsageError(
            "--overwrite is for directories: objects cannot be exchanged in one step",
            hint="write to another prefix, or remove what is there first",
        )
    return Bucket(destination, writing=True)


def _groups(work: Draft, free: int | None) -> tuple[tuple[str, ...], ...]:
    """Files that are filled together, because they share tensors; the last group has those without any."""
    most = free // _SHARE if free is not None else 1 << 62
    holding = {path for copy in work.plan.copies for path in copy.target.files}
    rest = tuple(path for path in work.plan.want.files if path not in holding)
    return (*gathered(work.plan, most), rest)


def _require_room(work: Draft, groups: Sequence[Sequence[str]], free: int | None, scratch: Path) -> None:
    needed = max(sum(work.plan.want.files[path].size for path in group) for group in groups)
    if free is not None and needed > free:
        raise DestinationError(
            f"a file of {needed:,} bytes is filled in {scratch} before it is sent, and there are {free:,} free",
            hint="set TMPDIR to a directory with more room, or add --max-shard-size",
        )


class _Sender:
    """Fills groups of files and sends them."""

    def __init__(
        self,
        work: Draft,
        versions: Versions,
        scratch: Path,
        uploads: Uploads,
        progress: Progress,
        stop: Stop,
        sha256: bool,  # noqa: FBT001 - all are named by the one caller
    ) -> None:
        self._work, self._versions, self._scratch, self._uploads = work, versions, scratch, uploads
        self._progress, self._stop, self._sha256 = _Whole(progress, work), stop, sha256

    def group(self, number: int, mine: Share) -> Part:
        """Files with tensors; those that an earlier run sent are kept, if there was room for the same group then."""
        found = self._uploads.group(number)
        if found is not None and found.files.keys() == mine.plan.want.files.keys():
            for path, size in found.files.items():
                self._progress.advance(size, kept=True)
                self._progress.file_done(path)
            return replace(found, written_bytes=0, kept_bytes=found.written_bytes + found.kept_bytes)
        return self._sent(number, mine, ())

    def last(self, number: int, mine: Share) -> Part:
        """What makes a checkpoint of the others: index and side files, `config.json` after all of them."""
        return self._sent(number, mine, sorted(self._work.carried, key=lambda side: side.name == CONFIG))

    def _sent(self, number: int, mine: Share, sides: Sequence[Opaque]) -> Part:
        heed(self._stop)
        tree = self._scratch / f"{number}"
        tree.mkdir()
        part = move(
            self._work,
            mine,
            sides,
            tree,
            (self._scratch / f"{number}.journal", {}),
            versions=self._versions,
            discard=self._uploads.discard,
            sha256=self._sha256,
            progress=self._progress,
            stop=self._stop,
        )
        self._uploads.upload(number, part, tree)
        shutil.rmtree(tree)
        return part


class _Whole:
    """Tells one story of several moves."""

    def __init__(self, progress: Progress, work: Draft) -> None:
        self._progress = progress
        progress.begin(work.plan.write_bytes, len(work.plan.want.files))

    def begin(self, total_bytes: int, files: int) -> None:
        """Nothing: it has begun."""

    def advance(self, nbytes: int, *, kept: bool = False) -> None:
        self._progress.advance(nbytes, kept=kept)

    def file_done(self, path: str) -> None:
        self._progress.file_done(path)
