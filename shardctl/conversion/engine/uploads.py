"""Records what a conversion into a bucket has finished, so that it can resume: its plan, and its objects.

Objects have no names to exchange, so they get their final ones at once, and what makes a checkpoint of them comes last:

1. The plan is noted before the first object, below `.shardctl/`, where no loader looks. `bucket_claim` in
   this folder decides which run has the place.
2. An object is complete or absent: its parts become an object when the last one is there.
3. A group is noted after its objects, with their ETags: a rerun keeps those that still have them.
4. Objects with tensors come first, then index and side files, `config.json` next to last, `shardctl.json` last; before
   that all are listed once more, so that what somebody else wrote meanwhile is noticed.
5. Several workers share one plan, which never changes: whoever has another one is refused. Each object has one writer;
   index and side files wait below `.shardctl/new/` until all workers are done.
6. So does everything that replaces a finished checkpoint: that is touched only when all of its replacement is complete.
   How it then goes on is for `shardctl.conversion.engine.replacement`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from shardctl.base.errors import DestinationError, OccupiedDestinationError, SourceError, format_first_few
from shardctl.conversion.engine.bucket_claim import (
    PLAN,
    SCHEMA,
    BucketClaim,
    PlaceTakenError,
    changed_by_another,
    describe_terms,
    locate_object,
    noted_plan,
    published_record,
    write_record,
)
from shardctl.conversion.engine.part import encode_part, parse_part
from shardctl.conversion.engine.replacement import STATE
from shardctl.conversion.engine.worker_group import other_plan
from shardctl.tensors.record import ATTESTATION, RECORD
from shardctl.tensors.record import parse_record as load_record

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from shardctl.conversion.engine.part import WorkerPart
    from shardctl.conversion.engine.replacement import ReplacedObjects
    from shardctl.conversion.engine.worker import WorkerId
    from shardctl.storage.cloud.bucket import BucketObject, CloudBucket


class BucketUploads:
    """The state of one destination in a bucket, for one writer."""

    def __init__(self, bucket: CloudBucket, claim: BucketClaim, worker: WorkerId | None = None) -> None:
        """Of a claim that is noted there; `begin` notes it."""
        self._bucket, self._claim = bucket, claim
        self._worker = worker
        self._etags: dict[str, str] = {}
        self._sent: dict[str, str] = {}
        """The ETags of the objects that this run itself wrote, by key."""
        self.published: bytes | None = None
        """The record, if an earlier run was killed when it had written it: then only the notes are left to remove."""

    @classmethod
    def begin(
        cls,
        bucket: CloudBucket,
        header: Mapping[str, Any],
        files: Sequence[str],
        *,
        resume: bool,
        overwrite: bool = False,
        worker: WorkerId | None = None,
        held: Iterable[str] = (),
    ) -> BucketUploads:
        """Begin to write `files` there, or go on; what another plan had left is removed.

        `header` is the same for all workers, and says how many they are; `held` are the files that wait for the others.
        Raises DestinationError if there is a finished checkpoint that may not be replaced, anything that
        shardctl did not write, or several workers with another plan.
        """
        terms = {"schema": SCHEMA, **header, "files": sorted(files), "held": sorted(held)}
        earlier = noted_plan(bucket)
        same = earlier is not None and describe_terms(earlier) == terms
        published = published_record(bucket, earlier)
        if same and published is not None and worker is not None:
            raise DestinationError(
                f"{bucket.name} already holds the finished checkpoint of these workers",
                hint=f"shardctl finish {bucket.name} removes what they left",
            )
        if same and published is not None and resume:
            uploads = cls(bucket, BucketClaim(bucket, earlier or terms))
            uploads.published = published
            return uploads
        if earlier is not None and not same and published is None:
            _require_own(bucket, earlier, terms)
        replaces = require_free_destination(bucket, overwrite=overwrite)
        if earlier is not None and published is not None:
            BucketClaim(bucket, earlier).end(bucket.objects())
        claim = BucketClaim.take(bucket, terms, replaces, anew=not resume and worker is None)
        uploads = cls(bucket, claim, worker)
        if worker is not None and not resume:
            uploads.forget_worker(worker)
        return uploads

    @property
    def plan(self) -> Mapping[str, Any]:
        """What is noted of the conversion."""
        return self._claim.plan

    @property
    def _header(self) -> dict[str, Any]:
        """What the notes of groups and workers are bound to."""
        return {**describe_terms(self.plan), "replaces": self.plan["replaces"]}

    @property
    def replacing(self) -> bool:
        """Whether there is a finished checkpoint to be replaced."""
        return bool(self.plan["replaces"])

    def group(self, number: int) -> WorkerPart | None:
        """Return a group that an earlier run finished, if its objects are still the ones that it wrote."""
        content = self._bucket.read(self._note(number))
        part, etags = (parse_part(content, self._header) if content is not None else None) or (None, None)
        if part is None or etags is None:
            return None
        objects = {path: self._bucket.head(self._locate_staged_object(path)) for path in part.files}
        if any(there is None or there.etag != etags[path] for path, there in objects.items()):
            return None
        self._etags |= etags
        return part

    def upload(self, number: int, part: WorkerPart, tree: Path) -> WorkerPart:
        """Write the objects of a group, and note it; raises DestinationError if another command has taken the place."""
        with self._claim.hold_claim(self._sent), self._claim.watch_claim():
            for path, size in part.files.items():
                self._etags[path] = self._sent[self._locate_staged_object(path)] = self._bucket.upload(
                    self._locate_staged_object(path), tree / path, size
                ).etag
            self._write_note(number, part)
        return part

    def note_group(self, number: int, part: WorkerPart) -> None:
        """Note again that the objects of a group are there."""
        with self._claim.hold_claim(self._sent):
            self._write_note(number, part)

    def _write_note(self, number: int, part: WorkerPart) -> None:
        etags = {path: self._etags[path] for path in part.files}
        key = self._note(number)
        self._sent[key] = self._bucket.write(key, encode_part(part, self._header, etags)).etag

    def write(self, path: str, content: bytes) -> None:
        """Write a small file of the result."""
        with self._claim.hold_claim(self._sent):
            self._sent[self._locate_staged_object(path)] = self._bucket.write(
                self._locate_staged_object(path), content
            ).etag

    def note_worker(self, worker: WorkerId, part: WorkerPart, frame: Mapping[str, Any] | None) -> None:
        """Note that a worker is done: all that it wrote, and the frame of the record from the one that has it."""
        etags = {path: self._etags[path] for path in part.files}
        content = encode_part(part, {**self._header, "worker": worker.number}, {"etags": etags, "frame": frame})
        with self._claim.hold_claim(self._sent):
            self._sent[_format_done_path(worker)] = self._bucket.write(_format_done_path(worker), content).etag

    def worker_done(
        self, worker: WorkerId, objects: Mapping[str, BucketObject]
    ) -> tuple[WorkerPart, Mapping[str, Any] | None] | None:
        """Return what a worker has finished, if all of it is among the objects that were listed.

        And the record's frame.
        """
        content = self._bucket.read(_format_done_path(worker)) if _format_done_path(worker) in objects else None
        part, more = (parse_part(content, {**self._header, "worker": worker.number}) if content else None) or (
            None,
            None,
        )
        if part is None or more is None:
            return None
        for path, etag in more["etags"].items():
            there = objects.get(self._locate_staged_object(path))
            if there is None or there.etag != etag:
                return None
        self._etags |= more["etags"]
        return part, more["frame"]

    def workers_noted(self, workers: Iterable[WorkerId]) -> set[WorkerId]:
        """Return the workers that say that they are done."""
        objects = self._bucket.objects()
        return {worker for worker in workers if _format_done_path(worker) in objects}

    def forget_done(self, worker: WorkerId) -> None:
        """Take back that a worker is done, because something of it is not there any more."""
        self._bucket.delete([_format_done_path(worker)])

    def forget_worker(self, worker: WorkerId) -> None:
        """Let a worker start anew."""
        self._bucket.delete([path for path in self._bucket.objects() if path.startswith(_format_worker_path(worker))])

    def discard(self) -> None:
        """Remove what was written so far; of several workers, what this one has noted."""
        if self._worker is not None:
            self.forget_worker(self._worker)
            return
        with contextlib.suppress(PlaceTakenError), self._claim.hold_claim(self._sent):
            objects = self._bucket.objects()
            if not self.replacing:
                self._bucket.delete([path for path in self.plan["files"] if path in objects])
            self._claim.end(objects)

    def publish(self, record: bytes, sizes: Mapping[str, int]) -> None:
        """Write the record, if everything it speaks of is there and nothing of other runs is, and remove the notes."""
        self._claim.wait_for_others()
        with self._claim.hold_claim(self._sent):
            there = self._bucket.objects()
            for path, size in sizes.items():
                etag, found = self._etags.get(path), there.get(self._locate_staged_object(path))
                if found is None or found.size != size or etag not in {None, found.etag}:
                    raise changed_by_another(self._bucket, path)
            self._remove_strays(there, {*map(self._locate_staged_object, sizes), *sizes})
            self._claim.commit(record)
            write_record(self._bucket, self.plan)
            self._claim.end(self._bucket.objects())

    def _remove_strays(self, there: Iterable[str], own: Collection[str]) -> None:
        """Remove what runs with other plans sent before they noticed that this one has their place."""
        named = [path for path in self.plan.get("earlier", ()) if path in there and path not in own]
        strays = [path for path in named if self._bucket.is_ours(path)]
        if strays:
            self._bucket.delete(strays)

    def forget(self) -> None:
        """Remove the notes of a result that is published."""
        self._claim.end(self._bucket.objects())

    def _locate_staged_object(self, path: str) -> str:
        """Return the key of a file of the result until it is published."""
        return locate_object(self.plan, path)

    def _note(self, number: int) -> str:
        return f"{_format_worker_path(self._worker) if self._worker is not None else STATE}group-{number:05d}"


def require_free_destination(bucket: CloudBucket, *, overwrite: bool = False) -> ReplacedObjects | None:
    """Return what of a finished checkpoint will be replaced; None if there is nothing.

    Raises DestinationError if there is one and it may not be replaced, or anything that shardctl did not write.
    """
    objects = bucket.objects()
    others = sorted(path for path in objects if not path.startswith(STATE))
    if RECORD in objects:
        if not overwrite:
            raise OccupiedDestinationError(
                f"{bucket.name} already holds a finished checkpoint",
                hint="add --overwrite to replace it once the new one is complete, or choose another prefix",
            )
        files = _read_recorded_objects(bucket)
        beside = [path for path in others if path not in files]
        if beside:
            raise DestinationError(
                f"{bucket.name} holds more than the checkpoint that would be replaced: {format_first_few(beside)}",
                hint="move or remove that first, or choose another prefix",
            )
        return {"files": {path: objects[path].etag for path in others}, "etag": objects[RECORD].etag}
    if others and PLAN not in objects:
        raise DestinationError(
            f"{bucket.name} is not empty and was not written by shardctl: it holds {format_first_few(others)}",
            hint="choose another prefix",
        )
    return None


def _read_recorded_objects(bucket: CloudBucket) -> set[str]:
    """Read the objects of a finished checkpoint; raises DestinationError if its record cannot be read."""
    try:
        return {*load_record(bucket.read(RECORD) or b"").files, RECORD, *ATTESTATION}
    except SourceError as error:
        raise DestinationError(f"{bucket.name}/{RECORD} cannot be read: {error.message}", hint=error.hint) from error


def _require_own(bucket: CloudBucket, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise DestinationError if what another plan left is that of several workers."""
    if "workers" in found:
        give_up = f"remove all objects below {bucket.name}/{STATE}, and what they wrote"
        if "workers" in wanted:
            raise other_plan(found, wanted, bucket.name, give_up)
        raise DestinationError(
            f"{bucket.name} is being written by several workers",
            hint=f"shardctl finish {bucket.name} completes it; to give it up, {give_up}",
        )


def _format_worker_path(worker: WorkerId) -> str:
    return f"{STATE}worker-{worker.number:05d}-"


def _format_done_path(worker: WorkerId) -> str:
    return f"{_format_worker_path(worker)}done"
