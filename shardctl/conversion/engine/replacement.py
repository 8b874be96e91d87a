"""Moves objects from `.shardctl/new/` to their final names, and removes those they replace.

A bucket has no step that exchanges two checkpoints. So from a note on, which says that all of the new one is complete,
everything goes forward only, and whoever comes next after a kill carries it on:

1. The old record goes first, then `config.json`, then old objects whose names are not used again: what is left does not
   look finished.
2. The new objects are copied to their names, within the store where that has such a request, `config.json` last.
3. The new record is written, if all of them are there; only then those that were copied are removed.

Between 1 and 3 readers find a part of a checkpoint, without a record: that is not atomic, and cannot be.
"""

from __future__ import annotations

import json
from collections.abc import Mapping  # noqa: TC003 - msgspec looks at the types of fields
from dataclasses import asdict
from typing import TYPE_CHECKING, Final, TypedDict

from shardctl.base.errors import DestinationError
from shardctl.base.value import value_class
from shardctl.tensors.record import RECORD

if TYPE_CHECKING:
    from shardctl.storage.cloud.bucket import CloudBucket

STATE: Final = ".shardctl/"
"""What is below is ours, and no part of a checkpoint."""
NEW: Final = f"{STATE}new/"
"""Where objects wait that may not have their names yet."""
REPLACEMENT: Final = f"{STATE}publishing.json"
"""The note of a replacement; it goes before the objects that it speaks of."""
_CONFIG_FILE: Final = "config.json"


class ReplacedObjects(TypedDict, total=False):
    """The checkpoint that is replaced, by ETags; empty if there is none."""

    files: Mapping[str, str]
    """Of its objects."""
    etag: str
    """Of its record."""


@value_class
class BucketReplacement:
    """What is to be done; noted in the bucket before it begins."""

    record: str
    """The new record."""
    staged: Mapping[str, int]
    """Bytes of each file that waits below `NEW`."""
    replaces: ReplacedObjects

    def note(self, bucket: CloudBucket) -> None:
        """Say that everything is complete: from here on it goes forward only."""
        bucket.write(REPLACEMENT, json.dumps(asdict(self)).encode())

    def carry_out(self, bucket: CloudBucket) -> None:
        """Do what is left of it; on return the new checkpoint is complete.

        Raises DestinationError if somebody removed what was to be published.
        """
        objects = bucket.objects()
        if RECORD in objects and objects[RECORD].etag != self.replaces.get("etag"):
            return
        old = self.replaces.get("files", {})
        for first in (RECORD, _CONFIG_FILE):
            bucket.delete([path for path in old if path == first and path in objects])
        bucket.delete([path for path in old if path not in {RECORD, _CONFIG_FILE, *self.staged} and path in objects])
        for path in sorted(self.staged, key=lambda path: (path == _CONFIG_FILE, path)):
            waiting = objects.get(f"{NEW}{path}")
            if waiting is None:
                raise self._build_lost_error(bucket, path)
            bucket.copy(f"{NEW}{path}", path, waiting)
        self._require_all(bucket)
        bucket.write(RECORD, self.record.encode())

    def _require_all(self, bucket: CloudBucket) -> None:
        """Raise DestinationError if somebody removed what was published, as a second run at the same time would."""
        objects = bucket.objects()
        for path, size in self.staged.items():
            if path not in objects or objects[path].size != size:
                raise self._build_lost_error(bucket, path)

    @staticmethod
    def _build_lost_error(bucket: CloudBucket, path: str) -> DestinationError:
        return DestinationError(
            f"{bucket.name}/{path} was removed by another program", hint=f"remove all that is in {bucket.name}"
        )


def replaced_by(bucket: CloudBucket) -> BucketReplacement | None:
    """Return the replacement that an earlier run had begun; None if there is none."""
    import msgspec

    content = bucket.read(REPLACEMENT)
    if content is None:
        return None
    try:
        return msgspec.convert(json.loads(content), BucketReplacement)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise DestinationError(
            f"{bucket.name}/{REPLACEMENT} is damaged: {error}", hint=f"remove everything in {bucket.name}"
        ) from error
