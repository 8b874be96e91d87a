"""Reads a checkpoint in a bucket: lists it once, then reads ranges of the objects that were listed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.storage import HIDDEN, FileStat, UnpromisedSource, require_span
from shardctl.storage.read_ahead import KEPT, ReadAheadCache

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardctl.base.workers import StopRequest
    from shardctl.storage import Span
    from shardctl.storage.cloud.bucket import CloudBucket

_OBSTORE_MEMORY_BYTES: Final = 100 << 20
"""Anonymous memory of obstore, its connections, and the ranges that threads have on their way."""


class CloudSource(UnpromisedSource):
    """The objects below a prefix, or one object.

    Small reads fetch what follows as well (`storage.read_ahead`); of what is read on purpose nothing is fetched
    twice.
    """

    held_bytes = KEPT + _OBSTORE_MEMORY_BYTES
    folder = None

    def __init__(self, bucket: CloudBucket) -> None:
        """Raises SourceError if there is nothing."""
        self._bucket = bucket
        objects = bucket.objects()
        self._single = False
        if not objects and "/" in bucket.name.partition("://")[2]:
            head, _, last = bucket.name.rpartition("/")
            parent = type(bucket)(head)
            found = parent.head(last)
            if found is not None:
                self._bucket, self._single, objects = parent, True, {last: found}
        kept = {path: found for path, found in objects.items() if HIDDEN.isdisjoint(path.split("/")[:-1])}
        self._files = {  # a folder made in a web page is an empty object `NAME/`, listed as `NAME`
            path: FileStat(found.size, found.etag)
            for path, found in kept.items()
            if found.size or self._bucket.head(path) is not None
        }
        if not self._files:
            raise SourceError(f"{bucket.name} does not exist", hint="check the bucket and the path")
        self._name = bucket.name
        self._windows = ReadAheadCache(self._fetch, lambda path: self._files[path].size)

    @property
    def name(self) -> str:
        """The address as it was given."""
        return self._name

    @property
    def location(self) -> str:
        """The same: it means the same everywhere."""
        return self._name

    def notes(self) -> tuple[str, ...]:
        """Return nothing: a store promises no hashes of what it holds."""
        return ()

    def files(self) -> Mapping[str, FileStat]:
        """Return every object, by key relative to the prefix; a version is its ETag."""
        return self._files

    def stat_file(self, path: str) -> FileStat | None:
        """Return the object's state now; None if it is gone."""
        found = self._bucket.head(path)
        return FileStat(found.size, found.etag) if found is not None else None

    def beside(self, name: str) -> bytes | None:
        """Return a small object beside the one that the address names."""
        return self._bucket.read(name) if self._single else None

    def expect(self, spans: Iterable[Span]) -> None:
        """Fetch what will be read, several stretches at once."""
        self._windows.expect(spans)

    def set_stop_request(self, stop: StopRequest) -> None:
        """Raise Interrupted from reads that wait, once `stop` is set."""
        self._bucket.stop = stop

    def read_at(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` from byte `offset` of `path`."""
        require_span(self, path, offset, len(into))
        self._windows.read(path, offset, into)

    def _fetch(self, path: str, offset: int, into: memoryview) -> None:
        self._bucket.fetch(path, offset, into, self._files[path].version)

    def close(self) -> None:
        """Close nothing: connections are obstore's."""
