"""A model of the Hub as a source: at one commit, from this machine's cache where it has the file, else by ranges."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from shardctl.bounded_text import CONFIG_TEXT, check_size
from shardctl.errors import SourceError
from shardctl.storage import Stat, require_span
from shardctl.storage.hub.listing import take_listing
from shardctl.storage.hub.ranges import Ranges
from shardctl.storage.in_order import InOrder, Promise
from shardctl.storage.local import LocalSource
from shardctl.storage.windows import KEPT, Windows
from shardctl.workers import Stop

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from shardctl.storage import Span
    from shardctl.storage.hub.address import Address
    from shardctl.storage.hub.listing import HubFile

_LIBRARIES: Final = 40 << 20
"""Anonymous memory of huggingface_hub, its HTTP client, certificates and connections."""


class HubSource:
    """The files of a model at the commit that its revision was at when it was opened."""

    held_bytes = KEPT + _LIBRARIES

    def __init__(self, text: str, address: Address) -> None:
        """`text` is the address as a person wrote it.

        Raises SourceError for what does not exist, AccessError for what is not allowed, TransientError without a Hub.
        """
        self._text = text
        self._address = address
        self._stop = Stop()
        self._listing = listing = take_listing(address, self._stop)
        inside = address.inside
        self._single = inside in listing.files
        self._prefix = inside[: inside.rfind("/") + 1] if self._single else inside + "/" * bool(inside)
        self._files = {
            path.removeprefix(self._prefix): Stat(file.size, f"{listing.commit}:{file.etag}")
            for path, file in listing.files.items()
            if (path == inside if self._single else path.startswith(self._prefix))
        }
        if inside and not self._files:
            raise SourceError(f"{inside} is missing in {address.repository} at {listing.commit}")
        self._disk = LocalSource(listing.cache) if any(file.cached for file in listing.files.values()) else None
        self._found = {path: self._disk.restat(file.cached) for path, file in self._cached()} if self._disk else {}
        remote = {path: file for path, file in listing.files.items() if not file.cached}
        self._hashes = InOrder({path: _promise(file) for path, file in remote.items() if file.etag})
        self._ranges = Ranges(address, listing)
        self._windows = Windows(self._fetch, lambda path: listing.files[path].size)

    def _cached(self) -> Iterable[tuple[str, HubFile]]:
        return ((path, file) for path, file in self._listing.files.items() if file.cached)

    @property
    def name(self) -> str:
        """The address as it was given."""
        return self._text

    @property
    def location(self) -> str:
        """The address with the commit."""
        return self._address.at(self._listing.commit)

    @property
    def folder(self) -> Path | None:
        """The cache's directory, if it holds all the files."""
        return self._listing.snapshot / self._prefix if self._listing.snapshot else None

    def notes(self) -> tuple[str, ...]:
        """Which files were compared with the Hub's hashes, which need a file to be read whole and in order."""
        fetched, proved = self._hashes.begun, self._hashes.proved
        if not fetched:
            return ()
        note, rest = f"{len(fetched):,} files from the Hub, ", len(fetched) - len(proved)
        if not rest:
            return (note + "all with the hashes that it promises",)
        return (note + f"{len(proved):,} with the hashes that it promises; others were not read whole and in order",)

    def files(self) -> Mapping[str, Stat]:
        """Every file, by path relative to the folder of the address; a version is the commit and the file's ETag."""
        return self._files

    def restat(self, path: str) -> Stat | None:
        """The file's state: a commit never changes, but what lies in the cache may."""
        full = self._prefix + path
        if self._disk is not None and full in self._found:
            now = self._disk.restat(self._listing.files[full].cached)
            if now != self._found[full]:
                return now
        return self._files.get(path)

    def beside(self, name: str) -> bytes | None:
        """A small file in the folder of the one that the address names."""
        path = self._prefix + name
        file = self._listing.files.get(path) if self._single else None
        if file is None:
            return None
        check_size(file.size, name, CONFIG_TEXT)
        content = bytearray(file.size)
        self._read(path, 0, memoryview(content))
        return bytes(content)

    def expect(self, spans: Iterable[Span]) -> None:
        """Fetch what will be read and is not here, several stretches at once."""
        far = ((self._prefix + path, offset, size) for path, offset, size in spans)
        self._windows.expect(span for span in far if not self._listing.files[span[0]].cached)

    def heed(self, stop: Stop) -> None:
        """Raise Interrupted from reads, also while they wait, once `stop` is set."""
        self._stop = stop

    def read_at(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` from byte `offset` of `path`."""
        require_span(self, path, offset, len(into))
        self._read(self._prefix + path, offset, into)

    def _read(self, path: str, offset: int, into: memoryview) -> None:
        cached = self._listing.files[path].cached
        if cached and self._disk is not None:
            self._disk.read_at(cached, offset, into)
        else:
            self._windows.read(path, offset, into)

    def _fetch(self, path: str, offset: int, into: memoryview) -> None:
        stop = offset + len(into)
        self._hashes.begin(path, offset, stop)
        try:
            self._ranges.fetch(path, offset, into, self._stop)
        except BaseException:
            self._hashes.fail(path, offset, stop)
            raise
        self._hashes.finish(path, offset, into)

    def close(self) -> None:
        """Close files and connections, but for those that huggingface_hub keeps for the process."""
        self._ranges.close()
        if self._disk is not None:
            self._disk.close()


def _promise(file: HubFile) -> Promise:
    """What the Hub says of a file: the SHA-256 of a large one, for others the name that git gives to its content."""
    if file.sha256:
        return Promise(file.size, file.sha256, hashlib.sha256())
    return Promise(file.size, file.blob, hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False))
