"""Records what a conversion into a bucket has finished, so that it can resume: its plan, and its objects.

Objects have no names to exchange, so they get their final ones at once, and what makes a checkpoint of them comes last:

1. The plan is noted before the first object, below `.shardctl/`, where no loader looks, and only where none is: of two
   runs that begin at the same moment one is refused.
2. An object is complete or absent: its parts become an object when the last one is there.
3. A group is noted after its objects, with their ETags: a rerun keeps those that still have them.
4. Objects with tensors come first, then index and side files, `config.json` next to last, `shardctl.json` last; before
   that all are listed once more, so that what somebody else wrote meanwhile is noticed.
5. Several workers share one plan, which never changes: whoever has another one is refused. Each object has one writer;
   index and side files wait below `.shardctl/new/` until all workers are done.
6. So does everything that replaces a finished checkpoint: that is touched only when all of its replacement is complete.
   How it then goes on is for `shardctl.execute.replacement`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict

from shardctl.errors import DestinationError, OccupiedDestinationError, SourceError, format_first_few
from shardctl.execute.crew import other_plan
from shardctl.execute.part import encode_part, parse_part
from shardctl.execute.replacement import NEW, REPLACEMENT, STATE, BucketReplacement, ReplacedObjects, replaced_by
from shardctl.record import RECORD
from shardctl.record import parse_record as load_record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from shardctl.execute.part import WorkerPart
    from shardctl.execute.worker import WorkerId
    from shardctl.storage.cloud.bucket import BucketObject, CloudBucket

_PLAN: Final = f"{STATE}plan.json"
_SCHEMA: Final = "shardctl.uploads/2"


class NotedPlan(TypedDict):
    """What every plan that is noted has, beside what its conversion says of itself."""

    schema: Literal["shardctl.uploads/2"]
    files: list[str]
    held: list[str]
    replaces: ReplacedObjects | None


class BucketUploads:
    """The state of one destination in a bucket, for one writer."""

    def __init__(self, bucket: CloudBucket, plan: Mapping[str, Any], worker: WorkerId | None = None) -> None:
        """Of a plan as it is noted there; `begin` notes it."""
        self._bucket = bucket
        self._plan = dict(plan)
        self._worker = worker
        self._etags: dict[str, str] = {}
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
        wanted = {"schema": _SCHEMA, **header, "files": sorted(files), "held": sorted(held)}
        earlier = noted_plan(bucket)
        same = earlier is not None and wanted == {key: earlier[key] for key in earlier if key != "replaces"}
        published = published_record(bucket, earlier)
        if same and published is not None and worker is not None:
            raise DestinationError(
                f"{bucket.name} already holds the finished checkpoint of these workers",
                hint=f"shardctl finish {bucket.name} removes what they left",
            )
        if same and published is not None and resume:
            uploads = cls(bucket, earlier or wanted)
            uploads.published = published
            return uploads
        if earlier is not None and not same and published is None:
            _require_own(bucket, earlier, wanted)
        replaces = require_free_destination(bucket, overwrite=overwrite)
        if earlier is not None and (not same or (not resume and worker is None)):
            if published is None:
                _remove_uploads(bucket, earlier)
            _remove_notes(bucket)
            earlier = None
        plan = earlier or {**wanted, "replaces": replaces}
        if earlier is None:
            _claim_place(bucket, plan)
        uploads = cls(bucket, plan, worker)
        if worker is not None and not resume:
            uploads.forget_worker(worker)
        return uploads

    @property
    def plan(self) -> Mapping[str, Any]:
        """What is noted of the conversion."""
        return self._plan

    @property
    def replacing(self) -> bool:
        """Whether there is a finished checkpoint to be replaced."""
        return bool(self._plan["replaces"])

    def group(self, number: int) -> WorkerPart | None:
        """Return a group that an earlier run finished, if its objects are still the ones that it wrote."""
        content = self._bucket.read(self._note(number))
        part, etags = (parse_part(content, self._plan) if content is not None else None) or (None, None)
        if part is None or etags is None:
            return None
        objects = {path: self._bucket.head(self._at(path)) for path in part.files}
        if any(there is None or there.etag != etags[path] for path, there in objects.items()):
            return None
        self._etags |= etags
        return part

    def upload(self, number: int, part: WorkerPart, tree: Path) -> WorkerPart:
        """Write the objects of a group, and note it; raises DestinationError if another command has taken the place."""
        self._require_place()
        etags = {path: self._bucket.upload(self._at(path), tree / path, size).etag for path, size in part.files.items()}
        self._etags |= etags
        self.note_group(number, part)
        return part

    def note_group(self, number: int, part: WorkerPart) -> None:
        """Note that the objects of a group are there."""
        etags = {path: self._etags[path] for path in part.files}
        self._bucket.write(self._note(number), encode_part(part, self._plan, etags))

    def write(self, path: str, content: bytes) -> None:
        """Write a small file of the result."""
        self._bucket.write(self._at(path), content)

    def note_worker(self, worker: WorkerId, part: WorkerPart, frame: Mapping[str, Any] | None) -> None:
        """Note that a worker is done: all that it wrote, and the frame of the record from the one that has it."""
        self._require_place()
        etags = {path: self._etags[path] for path in part.files}
        content = encode_part(part, {**self._plan, "worker": worker.number}, {"etags": etags, "frame": frame})
        self._bucket.write(_format_done_path(worker), content)

    def worker_done(
        self, worker: WorkerId, objects: Mapping[str, BucketObject]
    ) -> tuple[WorkerPart, Mapping[str, Any] | None] | None:
        """Return what a worker has finished, if all of it is among the objects that were listed.

        And the record's frame.
        """
        content = self._bucket.read(_format_done_path(worker)) if _format_done_path(worker) in objects else None
        part, more = (parse_part(content, {**self._plan, "worker": worker.number}) if content else None) or (None, None)
        if part is None or more is None:
            return None
        for path, etag in more["etags"].items():
            there = objects.get(self._at(path))
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
        else:
            _remove_uploads(self._bucket, self._plan)

    def publish(self, record: bytes, sizes: Mapping[str, int]) -> None:
        """Write the record, if everything it speaks of is there, and remove the notes."""
        there = self._bucket.objects()
        for path, size in sizes.items():
            etag, found = self._etags.get(path), there.get(self._at(path))
            if found is None or found.size != size or etag not in {None, found.etag}:
                raise DestinationError(
                    f"{self._bucket.name}/{path} was changed by another program",
                    hint="run the same command again; only one run may write to a destination",
                )
        staged = {path: size for path, size in sizes.items() if self._at(path) != path}
        if staged or self.replacing:
            replacement = BucketReplacement(record.decode(), staged, self._plan["replaces"] or ReplacedObjects())
            replacement.note(self._bucket)
            replacement.carry_out(self._bucket)
        else:
            self._bucket.write(RECORD, record)
        self.forget()

    def forget(self) -> None:
        """Remove the notes of a result that is published."""
        _remove_notes(self._bucket)

    def _require_place(self) -> None:
        if noted_plan(self._bucket) != self._plan:
            raise _taken(self._bucket)

    def _at(self, path: str) -> str:
        """Return the key of a file of the result until it is published."""
        return f"{NEW}{path}" if self.replacing or path in self._plan["held"] else path

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
    if others and _PLAN not in objects:
        raise DestinationError(
            f"{bucket.name} is not empty and was not written by shardctl: it holds {format_first_few(others)}",
            hint="choose another prefix",
        )
    return None


def _read_recorded_objects(bucket: CloudBucket) -> set[str]:
    """Read the objects of a finished checkpoint; raises DestinationError if its record cannot be read."""
    try:
        return {*load_record(bucket.read(RECORD) or b"").files, RECORD}
    except SourceError as error:
        raise DestinationError(f"{bucket.name}/{RECORD} cannot be read: {error.message}", hint=error.hint) from error


def noted_plan(bucket: CloudBucket) -> dict[str, Any] | None:
    """Return the plan of an earlier run, if there is one; raises DestinationError if it is damaged."""
    import msgspec

    content = bucket.read(_PLAN)
    if content is None:
        return None
    try:
        found: dict[str, Any] = json.loads(content)
        msgspec.convert(found, NotedPlan)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise DestinationError(
            f"{bucket.name}/{_PLAN} is damaged: {error}", hint=f"remove everything in {bucket.name}"
        ) from error
    return found


def published_record(bucket: CloudBucket, plan: Mapping[str, Any] | None) -> bytes | None:
    """Return the record of a plan's result, if that is complete.

    A replacement that was interrupted is carried out first.
    """
    replacement = replaced_by(bucket)
    if replacement is not None:
        replacement.carry_out(bucket)
    there = bucket.head(RECORD) if plan is not None else None
    if plan is None or there is None or there.etag == (plan["replaces"] or {}).get("etag"):
        return None
    return bucket.read(RECORD)


def _claim_place(bucket: CloudBucket, plan: Mapping[str, Any]) -> None:
    """Note a plan; raises DestinationError if another run did so, or finished, since this one looked."""
    if not bucket.create(_PLAN, json.dumps(plan).encode()):
        if noted_plan(bucket) != plan:
            raise _taken(bucket)
        return
    known = (plan["replaces"] or {}).get("files", {})
    beside = [path for path in bucket.objects() if not path.startswith(STATE) and path not in plan["files"]]
    if any(path not in known for path in beside):
        bucket.delete([_PLAN])
        raise _taken(bucket)


def _taken(bucket: CloudBucket) -> DestinationError:
    return DestinationError(
        f"{bucket.name} was taken by another run, which has finished or is still running",
        hint="only one run may write to a destination: choose another prefix for this one",
    )


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


def _remove_uploads(bucket: CloudBucket, plan: Mapping[str, Any]) -> None:
    """Remove what an earlier run wrote, and nothing else."""
    objects = bucket.objects()
    if not plan["replaces"]:
        bucket.delete([path for path in plan["files"] if path in objects])
    _remove_notes(bucket)


def _remove_notes(bucket: CloudBucket) -> None:
    """Remove what tells of an unfinished run; the plan goes last, because without it nobody knows whose the rest is."""
    notes = [path for path in bucket.objects() if path.startswith(STATE)]
    bucket.delete([path for path in notes if path == REPLACEMENT])
    bucket.delete([path for path in notes if path not in {REPLACEMENT, _PLAN}])
    bucket.delete([_PLAN])


def _format_worker_path(worker: WorkerId) -> str:
    return f"{STATE}worker-{worker.number:05d}-"


def _format_done_path(worker: WorkerId) -> str:
    return f"{_format_worker_path(worker)}done"
