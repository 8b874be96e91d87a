"""What an interrupted conversion into a bucket had finished: its plan, and a note for every group of objects.

Objects have no names to exchange, so they get their final ones at once, and what makes a checkpoint of them comes last:

1. The plan is noted before the first object, below `.shardctl/`, where no loader looks.
2. An object is complete or absent: its parts become an object when the last one is there.
3. A group is noted after its objects, with their ETags: a rerun keeps those that still have them.
4. Objects with tensors come first, then index and side files, `config.json` next to last, `shardctl.json` last; before
   that all are listed once more, so that what somebody else wrote meanwhile is noticed.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from shardctl.errors import DestinationError, some
from shardctl.execute.part import dump, load
from shardctl.record import RECORD

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from shardctl.execute.part import Part
    from shardctl.storage.cloud.bucket import Bucket

_STATE: Final = ".shardctl/"
_PLAN: Final = f"{_STATE}plan.json"
_SCHEMA: Final = "shardctl.uploads/1"


class Uploads:
    """The state of one destination in a bucket."""

    def __init__(self, bucket: Bucket, header: Mapping[str, Any], files: Sequence[str], *, resume: bool) -> None:
        """Begin to write `files` there, or go on; what another plan had left is removed.

        Raises DestinationError if there is a finished checkpoint, or anything that is not ours.
        """
        self._bucket = bucket
        self._plan = {"schema": _SCHEMA, **header, "files": sorted(files)}
        self._etags: dict[str, str] = {}
        earlier = _read(bucket)
        self.published = bucket.read(RECORD) if resume and earlier == self._plan else None
        """The record, if an earlier run was killed when it had written it: then only the notes are left to remove."""
        if self.published is not None:
            return
        require_free(bucket)
        if earlier is not None and (earlier != self._plan or not resume):
            _forget(bucket, earlier)
            earlier = None
        if earlier is None:
            bucket.write(_PLAN, json.dumps(self._plan).encode())

    def group(self, number: int) -> Part | None:
        """A group that an earlier run finished, if its objects are still the ones that it wrote."""
        content = self._bucket.read(_note(number))
        part, etags = (load(content, self._plan) if content is not None else None) or (None, None)
        if part is None or etags is None:
            return None
        objects = {path: self._bucket.head(path) for path in part.files}
        if any(there is None or there.etag != etags[path] for path, there in objects.items()):
            return None
        self._etags |= etags
        return part

    def upload(self, number: int, part: Part, tree: Path) -> Part:
        """Write the objects of a group, and note it; raises DestinationError if another command has taken the place."""
        if _read(self._bucket) != self._plan:
            raise DestinationError(
                f"{self._bucket.name} was taken by another run, which has finished or goes on",
                hint="only one run may write to a destination: choose another prefix for this one",
            )
        etags = {path: self._bucket.upload(path, tree / path, size).etag for path, size in part.files.items()}
        self._etags |= etags
        self._bucket.write(_note(number), dump(part, self._plan, etags))
        return part

    def discard(self) -> None:
        """Remove what was written so far."""
        _forget(self._bucket, self._plan)

    def publish(self, record: bytes, sizes: Mapping[str, int]) -> None:
        """Write the record, if everything it speaks of is there, and remove the notes."""
        there = self._bucket.objects()
        for path, size in sizes.items():
            etag = self._etags.get(path)
            if path not in there or there[path].size != size or etag not in {None, there[path].etag}:
                raise DestinationError(
                    f"{self._bucket.name}/{path} was changed by another program",
                    hint="run the same command again; only one run may write to a destination",
                )
        self._bucket.write(RECORD, record)
        self.forget()

    def forget(self) -> None:
        """Remove the notes of a result that is published."""
        _forget_notes(self._bucket)


def require_free(bucket: Bucket) -> None:
    """Raise DestinationError if there is a finished checkpoint, or anything that is not ours."""
    objects = bucket.objects()
    if RECORD in objects:
        raise DestinationError(
            f"{bucket.name} already holds a finished checkpoint",
            hint="objects cannot be exchanged in one step: write to another prefix, or remove them first",
        )
    others = sorted(path for path in objects if not path.startswith(_STATE))
    if others and _PLAN not in objects:
        raise DestinationError(
            f"{bucket.name} is not empty and was not written by shardctl: it holds {some(others)}",
            hint="choose another prefix",
        )


def _read(bucket: Bucket) -> dict[str, Any] | None:
    """The plan of an earlier run, if there is one; raises DestinationError if it is damaged."""
    content = bucket.read(_PLAN)
    if content is None:
        return None
    try:
        found = json.loads(content)
        if found["schema"] == _SCHEMA and isinstance(found["files"], list):
            return dict(found)
    except (ValueError, TypeError, KeyError):
        pass
    raise DestinationError(f"{bucket.name}/{_PLAN} is damaged", hint=f"remove all that is in {bucket.name}")


def _forget(bucket: Bucket, plan: Mapping[str, Any]) -> None:
    """Remove what an earlier run wrote, and nothing else."""
    objects = bucket.objects()
    bucket.delete([path for path in plan["files"] if path in objects])
    _forget_notes(bucket)


def _forget_notes(bucket: Bucket) -> None:
    """Remove what tells of an unfinished run; the plan goes last, because without it nobody knows whose the rest is."""
    bucket.delete([path for path in bucket.objects() if path.startswith(_STATE) and path != _PLAN])
    bucket.delete([_PLAN])


def _note(number: int) -> str:
    return f"{_STATE}group-{number:05d}"
