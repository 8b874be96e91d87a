"""Writes a conversion into a bucket: fills files on this machine's disk group by group, and sends them."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from shardctl.base.errors import DestinationError
from shardctl.base.settings import is_text
from shardctl.base.value import value_class
from shardctl.base.version import __version__
from shardctl.base.workers import StopRequest, raise_if_stopped
from shardctl.checkpoint.config_files import CONFIG
from shardctl.conversion.engine.budget import divide_host_memory
from shardctl.conversion.engine.interrupt import stop_on_signals
from shardctl.conversion.engine.part import have_same_content, is_touched
from shardctl.conversion.engine.provenance import list_whole_files
from shardctl.conversion.engine.uploads import BucketUploads, require_free_destination
from shardctl.conversion.pending_record import (
    add_sums_files,
    build_sums_files,
    complete_record,
    draft_record,
    list_overflow_warnings,
    list_sums_files,
)
from shardctl.conversion.share_transfer import list_source_versions, move_share
from shardctl.storage.cloud.bucket import CloudBucket, estimate_upload_memory
from shardctl.storage.free_space import measure_free_space
from shardctl.tensors.cast import build_overflow_error
from shardctl.tensors.record import RECORD, encode_record, parse_record
from shardctl.tensors.shares import WorkerShare, build_share, divide_files, group_files, list_read_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardctl.base.workers import ProgressWatcher
    from shardctl.conversion.conversion_plan import PlannedConversion
    from shardctl.conversion.engine.part import WorkerPart
    from shardctl.conversion.engine.worker import WorkerId
    from shardctl.conversion.pending_record import PendingRecord
    from shardctl.conversion.share_transfer import Versions
    from shardctl.options import DestinationOptions
    from shardctl.tensors.manifest import OpaqueObject
    from shardctl.tensors.record import CheckpointRecord

_SCRATCH_SPACE_DIVISOR: Final = 2
"""A group takes at most one in so many of the free bytes of the scratch directory, unless one file takes more."""


class GroupUploads(Protocol):
    """Where groups of files go: a bucket, or a repository of the Hub."""

    def group(self, number: int) -> WorkerPart | None:
        """Return a group that an earlier run sent."""

    def upload(self, number: int, part: WorkerPart, tree: Path) -> WorkerPart:
        """Send the files of a group, and note it."""

    def note_group(self, number: int, part: WorkerPart) -> None:
        """Note a group again whose files are as they were sent."""

    def write(self, path: str, content: bytes) -> None:
        """Write a small file of the result."""

    def publish(self, record: bytes, sizes: Mapping[str, int]) -> None:
        """Make a checkpoint of what was sent, with its record."""

    def discard(self) -> None:
        """Forget or remove what was sent so far."""


def convert_into_bucket(
    work: PlannedConversion, destination: str, options: DestinationOptions, progress: ProgressWatcher
) -> tuple[CheckpointRecord, Sequence[WorkerPart] | None, tuple[str, ...]]:
    """Write the result of a conversion below `destination`; returns its record, what was done, and warnings.

    Each file is filled in the directory for temporary files, sent, and removed there. On return all objects are
    complete. On an error there is no new `shardctl.json`, and no object that is not complete. What was done is None if
    an earlier run had done all of it.
    """
    require_object_names(work)
    bucket, stop = CloudBucket(destination, writing=True), StopRequest(kept=True)
    identity, versions = work.identity(), list_source_versions(work)
    header = {"plan": identity, "source": versions, "sha256": options.sha256, "version": __version__}
    frame = draft_record(work, identity)
    with scratch_directory() as scratch, stop_on_signals(stop):
        bucket.stop = stop
        groups = ShareGroups.of(work, scratch, None)
        uploads = BucketUploads.begin(
            bucket,
            header,
            result_files(frame, sha256=options.sha256),
            resume=not options.no_resume,
            overwrite=options.overwrite,
        )
        if uploads.published is not None:
            uploads.forget()
            return parse_record(uploads.published), None, ()
        progress.warn(work.have.warnings)
        sender = ShareSender(work, versions, scratch, uploads, progress, stop, options.sha256)
        parts = sender.send(groups, work.carried)
        work.checkpoint.prove()
        record = publish_parts(frame, parts, uploads, stop, sha256=options.sha256)
    return record, parts, (*list_overflow_warnings(frame, parts), *replacement_warnings(bucket, uploads))


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """Make a directory for the files that are filled before they are sent."""
    with tempfile.TemporaryDirectory(prefix="shardctl-") as scratch:
        yield Path(scratch)


def result_files(frame: PendingRecord, *, sha256: bool) -> list[str]:
    """Return the names of what a conversion writes, but the record."""
    return [*frame.record.files, *(list_sums_files(frame.record) if sha256 else [])]


def publish_parts(
    frame: PendingRecord, parts: Sequence[WorkerPart], uploads: GroupUploads, stop: StopRequest, *, sha256: bool
) -> CheckpointRecord:
    """Make one result of parts whose objects are all there: its record, which is written last."""
    record = complete_record(frame, parts)
    if sha256:
        sums = build_sums_files(record, parts)
        record = add_sums_files(record, sums)
        for path, content in sums.items():
            uploads.write(path, content)
    raise_if_stopped(stop)
    uploads.publish(encode_record(record), record.files)
    return record


def replacement_warnings(bucket: CloudBucket, uploads: BucketUploads) -> tuple[str, ...]:
    """Return what somebody must know who read the place while its checkpoint was replaced."""
    if not uploads.replacing:
        return ()
    warning = (
        f"{bucket.name} was replaced object by object, because a bucket cannot be replaced in one step; "
        f"anyone who read it before {RECORD} was written again may have read part of a checkpoint"
    )
    return (warning,)


def reserve_sending_memory(work: PlannedConversion) -> PlannedConversion:
    """Return the same with room for sending in its budget; raises MemoryBudgetError if there is none."""
    largest = max((file.size for file in work.plan.want.files.values()), default=0)
    beside = work.checkpoint.source.held_bytes + estimate_upload_memory(largest)
    return replace(
        work, budget=divide_host_memory(work.plan, work.reshard_options.host_memory, work.budget.threads, beside=beside)
    )


def check_bucket(work: PlannedConversion, destination: str, *, overwrite: bool) -> Path:
    """Raise what `convert_into_bucket` would raise before its first byte; returns where files would be filled."""
    require_object_names(work)
    require_free_destination(CloudBucket(destination, writing=True), overwrite=overwrite)
    scratch = Path(tempfile.gettempdir())
    ShareGroups.of(work, scratch, None)
    return scratch


def require_object_names(work: PlannedConversion) -> None:
    """Raise DestinationError for a side file that no object can be called as: names of objects are UTF-8."""
    odd = [side.name for side in work.carried if not is_text(side.name)]
    if odd:
        raise DestinationError(
            f"{odd[0]} is copied, and its name is not UTF-8, as the name of an object must be",
            hint="rename the file, or write to a directory",
        )


@value_class
class ShareGroups:
    """Files that one worker, or the only one, fills together and then sends."""

    files: tuple[tuple[str, ...], ...]
    """Every file of the result in one group; of several workers, what is not this one's is a group too."""
    mine: range
    """The groups to send, in this order; the last has the files without tensors."""

    @classmethod
    def of(cls, work: PlannedConversion, scratch: Path, worker: WorkerId | None) -> ShareGroups:
        """Return groups as large as `scratch` has room for; raises DestinationError if it has none for the largest."""
        free = measure_free_space(scratch)
        most = free // _SCRATCH_SPACE_DIVISOR if free is not None else 1 << 62
        theirs: list[str] = []
        plan = work.plan
        if worker is not None:
            divided = divide_files(plan, worker.count)
            theirs = [path for number, paths in enumerate(divided) if number != worker.number for path in paths]
            plan = build_share(plan, divided, worker.number).plan
        holding = {path for copy in plan.copies for path in copy.target.files}
        groups = [*group_files(plan, most), tuple(path for path in plan.want.files if path not in holding)]
        _require_room(work, groups, free, scratch)
        if worker is not None and worker.number:  # what is nobody's counts for the first group, and once
            return cls((tuple(theirs), *groups), range(1, len(groups) + 1))
        return cls((*groups, tuple(theirs)), range(len(groups)))


def _require_room(work: PlannedConversion, groups: Sequence[Sequence[str]], free: int | None, scratch: Path) -> None:
    needed = max(sum(work.plan.want.files[path].size for path in group) for group in groups)
    if free is not None and needed > free:
        raise DestinationError(
            f"a file of {needed:,} bytes must be filled in {scratch} before it is sent, but only {free:,} are free",
            hint="set TMPDIR to a directory with more room, or add --max-shard-size",
        )


class ShareSender:
    """Fills groups of files and sends them."""

    def __init__(
        self,
        work: PlannedConversion,
        versions: Versions,
        scratch: Path,
        uploads: GroupUploads,
        progress: ProgressWatcher,
        stop: StopRequest,
        sha256: bool,  # noqa: FBT001 - all are named by the one caller
    ) -> None:
        self._work, self._versions, self._scratch, self._uploads = work, versions, scratch, uploads
        self._progress, self._stop, self._sha256 = _CombinedProgress(progress), stop, sha256
        allowed = work.checkpoint.allow_unverified
        self._whole = frozenset() if allowed else list_whole_files(work.plan.copies, work.checkpoint.source)

    def send(self, groups: ShareGroups, sides: Sequence[OpaqueObject]) -> list[WorkerPart]:
        """Send files with tensors, then what makes a checkpoint of them: index, side files, and last `config.json`."""
        sizes = [self._work.plan.want.files[path].size for number in groups.mine for path in groups.files[number]]
        self._progress.open(sum(sizes), len(sizes))
        *holding, last = ((number, build_share(self._work.plan, groups.files, number)) for number in groups.mine)
        parts = [self._group(*each) for each in holding]
        return [*parts, self._sent(*last, sorted(sides, key=lambda side: side.name == CONFIG))]

    def _group(self, number: int, mine: WorkerShare) -> WorkerPart:
        """Return files with tensors.

        Those that an earlier run sent are kept, if there was room for the same group then.

        Where the source's place promises hashes, they are kept only if that run had compared those of the files that
        they came from: what it read of others may have been damaged on the way. If the source was touched since, they
        are filled once more, and sent if they differ.
        """
        found = self._uploads.group(number)
        if found is None or found.files.keys() != mine.plan.want.files.keys():
            return self._sent(number, mine, ())
        if is_touched(found, self._work.checkpoint.source.files()):
            return self._sent(number, mine, (), found)
        if self._whole & list_read_files(mine.plan) <= set(found.proved):
            for name, count in found.overflowed.items() if not self._work.allow_overflow else ():
                raise build_overflow_error(name, count, self._work.plan.want.tensors[name].dtype)
            for path, size in found.files.items():
                self._progress.advance(size, kept=True)
                self._progress.file_done(path)
            return replace(found, written_bytes=0, kept_bytes=found.written_bytes + found.kept_bytes)
        return self._sent(number, mine, ())

    def _sent(
        self, number: int, mine: WorkerShare, sides: Sequence[OpaqueObject], found: WorkerPart | None = None
    ) -> WorkerPart:
        """Fill files and send them, unless they are as they were `found` to have been sent."""
        raise_if_stopped(self._stop)
        tree = self._scratch / f"{number}"
        tree.mkdir()
        part = move_share(
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
        if found is not None and have_same_content(part, found):
            self._uploads.note_group(number, part)
            part = replace(part, written_bytes=0, kept_bytes=part.written_bytes)
        else:
            self._uploads.upload(number, part, tree)
        shutil.rmtree(tree)
        return part


class _CombinedProgress:
    """Tells one story of several moves."""

    def __init__(self, progress: ProgressWatcher) -> None:
        self._progress, self._phase = progress, ""

    def open(self, total_bytes: int, files: int) -> None:
        """Begin the story."""
        self._progress.begin(total_bytes, files)

    def begin(self, total_bytes: int, files: int = 0, phase: str = "") -> None:  # noqa: ARG002 - `open` had them
        """Note the phase: only the bytes of the one without a name are those that `open` announced."""
        self._phase = phase

    def warn(self, messages: Sequence[str]) -> None:
        """Do nothing: they were said before it began."""

    def work_on(self, place: str) -> None:
        self._progress.work_on(place)

    def advance(self, nbytes: int, *, kept: bool = False) -> None:
        if not self._phase:
            self._progress.advance(nbytes, kept=kept)

    def file_done(self, path: str) -> None:
        self._progress.file_done(path)
