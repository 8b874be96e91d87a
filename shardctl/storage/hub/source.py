"""Reads a model of the Hub at one commit: files in this machine's cache from there, others by ranges."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from shardctl.base.errors import ShardctlError, SourceError, format_first_few
from shardctl.base.version import __version__
from shardctl.base.workers import StopRequest
from shardctl.storage import FileProofs, FileStat, require_span
from shardctl.storage.bounded_text import CONFIG_TEXT, check_size
from shardctl.storage.file_hashes import REREAD_BYTES, FileHashes
from shardctl.storage.hashed_file import PromisedHash
from shardctl.storage.hub.listing import NOT_AN_ANSWER, list_repository
from shardctl.storage.hub.questions import HubQuestions
from shardctl.storage.hub.ranges import RangeReader
from shardctl.storage.hub.xet import has_xet, needs_xet
from shardctl.storage.local import LocalSource
from shardctl.storage.read_ahead import KEPT, ReadAheadCache
from shardctl.storage.retries import TroubleError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

    from shardctl.storage import Span
    from shardctl.storage.hub.address import HubAddress
    from shardctl.storage.hub.listing import HubFile, HubListing

_LIBRARY_MEMORY_BYTES: Final = 40 << 20
"""Anonymous memory of huggingface_hub, its HTTP client, certificates and connections."""

_INDEX_FILE: Final = "model.safetensors.index.json"
_MIN_SHARDS_FOR_METADATA: Final = 4
"""Shards from which on one request, and one more to see that main has not moved, are fewer than theirs."""
_DEFAULT_BRANCH: Final = "main"
_LENGTH_BYTES: Final = 8
_SLACK, _BESIDES = 2, 1024
"""A header in its file may be this much longer than without spaces; one that lacks tensors would be longer still."""


class HubSource:
    """The files of a model at the commit that its revision was at when it was opened."""

    held_bytes = KEPT + REREAD_BYTES + _LIBRARY_MEMORY_BYTES

    def __init__(self, text: str, address: HubAddress) -> None:
        """`text` is the address as a person wrote it.

        Raises SourceError for what does not exist, AccessError for what is not allowed, TransientError without a Hub.
        """
        self._text = text
        self._address = address
        self._stop = StopRequest()
        self._listing = listing = list_repository(address, self._stop)
        inside = address.inside
        self._single = inside in listing.files
        self._prefix = inside[: inside.rfind("/") + 1] if self._single else inside + "/" * bool(inside)
        self._files = {
            path.removeprefix(self._prefix): FileStat(file.size, f"{listing.commit}:{file.etag}")
            for path, file in listing.files.items()
            if (path == inside if self._single else path.startswith(self._prefix))
        }
        if inside and not self._files:
            raise SourceError(f"{inside} is missing in {address.repository} at {listing.commit}")
        self._disk = LocalSource(listing.cache) if any(file.cached for file in listing.files.values()) else None
        self._found = (
            {path: self._disk.stat_file(file.cached) for path, file in self._list_cached_files()} if self._disk else {}
        )
        for path, stat in self._files.items():
            cached = self._found.get(self._prefix + path)
            if cached is not None:  # a commit never changes, but anybody may edit what lies in the cache
                self._files[path] = replace(stat, changed=cached.changed)
        remote = {path: file for path, file in listing.files.items() if not file.cached}
        self._promised = frozenset(path.removeprefix(self._prefix) for path in remote)
        self._hashes = FileHashes({path: _build_expected_hash(file) for path, file in remote.items()}, self._reread)
        self._earlier: set[str] = set()
        self._skimming = False
        self._beginnings: dict[str, bytes] = {}
        self._ranges = RangeReader(address, listing)
        self._windows = ReadAheadCache(self._fetch, lambda path: listing.files[path].size)

    def _list_cached_files(self) -> Iterable[tuple[str, HubFile]]:
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
        """Return how many files were compared with the Hub's hashes, and why others were not."""
        if self._beginnings:
            return (f"the Hub gave the headers of {len(self._beginnings):,} files; the files were not opened",)
        found = self.proofs()
        fetched = len(found.verified) + len(found.unverified)
        if not fetched:
            return ()
        note = f"{fetched:,} files from the Hub, "
        if not found.unverified:
            return (note + "all with the expected hashes",)
        others = format_first_few(f"{path} ({reason})" for path, reason in found.unverified.items())
        return (note + f"{len(found.verified):,} with the expected hashes; not compared: {others}",)

    def cautions(self) -> tuple[str, ...]:
        """List the files of which the Hub may refuse parts, because they are above 50 GB and hf_xet is not there."""
        files = self._listing.files
        large = [path for path in self._promised if needs_xet(files[self._prefix + path])]
        if not large or (has_xet() and all(files[self._prefix + path].xet for path in large)):
            return ()
        which, name = format_first_few(sorted(large)), self._address.repository
        text = (
            "the Hub may refuse to send ranges of files above 50 GB, and hf_xet, which can, is not "
            f"installed: {which}; "
        )
        return (text + f"pip install hf_xet, or hf download {name} --local-dir DIR and give DIR as the source",)

    @property
    def promised(self) -> Collection[str]:
        """The files that come from the Hub; those of the cache on this machine are as they are."""
        return self._promised

    @property
    def stated_hashes(self) -> Mapping[str, PromisedHash]:
        """The hashes that the Hub states of all files, whether they are on this machine or not."""
        stated = ((path, _build_expected_hash(file)) for path, file in self._listing.files.items())
        return {path.removeprefix(self._prefix): promise for path, promise in stated if promise.digest}

    def proofs(self) -> FileProofs:
        """Return which files were compared with the Hub's hashes."""
        found = ((path.removeprefix(self._prefix), self._hashes.why_not(path)) for path in self._hashes.begun())
        reasons = {path: "" if path in self._earlier else reason for path, reason in found}
        return FileProofs(
            tuple(path for path, reason in reasons.items() if not reason),
            {path: reason for path, reason in reasons.items() if reason},
        )

    def prove(
        self, whole: Collection[str] = (), *, earlier: Collection[str] = (), allow_unverified: bool = False
    ) -> None:
        """Hash what was read out of order, or only in part, by reading it again."""
        self._earlier |= set(earlier)
        if allow_unverified:
            return
        unproved = self._hashes.prove({self._prefix + path for path in whole}, self._stop)
        if unproved:
            raise SourceError(
                f"{format_first_few(f'{path} ({self._hashes.why_not(path)})' for path in unproved)} cannot "
                "be compared with the "
                "hash that the Hub promises",
                hint="run again, or add --allow-unverified to accept these files as they came",
            )

    def files(self) -> Mapping[str, FileStat]:
        """Return every file, by path relative to the folder of the address.

        A version is the commit and the file's ETag.
        """
        return self._files

    def stat_file(self, path: str) -> FileStat | None:
        """Return the file's state: a commit never changes, but what lies in the cache may."""
        full = self._prefix + path
        if self._disk is not None and full in self._found:
            now = self._disk.stat_file(self._listing.files[full].cached)
            if now is None or now != self._found[full]:
                return now
            return replace(self._files[path], changed=now.changed)
        return self._files.get(path)

    def beside(self, name: str) -> bytes | None:
        """Return a small file in the folder of the one that the address names."""
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
        far = [(self._prefix + path, offset, size) for path, offset, size in spans]
        far = [span for span in far if not self._listing.files[span[0]].cached]
        if self._skimming and not self._prefix:
            shards = [path for path, offset, _ in far if not offset and path.endswith(".safetensors")]
            self._beginnings |= _fetch_headers(self._address, self._listing, shards)
        self._windows.expect(span for span in far if span[0] not in self._beginnings)

    def set_headers_only(self) -> None:
        """Take headers as the Hub has read them, of all files in one request, where it has."""
        self._skimming = True

    def set_stop_request(self, stop: StopRequest) -> None:
        """Raise Interrupted from reads, also while they wait, once `stop` is set."""
        self._stop = stop

    def read_at(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` from byte `offset` of `path`."""
        require_span(self, path, offset, len(into))
        self._read(self._prefix + path, offset, into)

    def _read(self, path: str, offset: int, into: memoryview) -> None:
        cached, beginning = self._listing.files[path].cached, self._beginnings.get(path, b"")
        if cached and self._disk is not None:
            self._disk.read_at(cached, offset, into)
        elif offset + len(into) <= len(beginning):
            into[:] = beginning[offset : offset + len(into)]
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

    def _reread(self, path: str, offset: int, into: memoryview) -> None:
        """Read bytes for the hash only: those that small reads left here, or the Hub's."""
        if not self._windows.find(path, offset, into):
            self._ranges.fetch(path, offset, into, self._stop)

    def close(self) -> None:
        """Close files and connections, but for those that huggingface_hub keeps for the process."""
        self._ranges.close()
        if self._disk is not None:
            self._disk.close()


def _build_expected_hash(file: HubFile) -> PromisedHash:
    """Build the hash that the Hub states of a file: the SHA-256 of a large one, else git's name of its content."""
    if file.sha256:
        return PromisedHash(file.size, file.sha256, hashlib.sha256())
    return PromisedHash(file.size, file.blob, hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False))


def _fetch_headers(address: HubAddress, listing: HubListing, shards: Collection[str]) -> dict[str, bytes]:
    """Return the beginning of each shard, up to its first tensor, with the entries that its header has.

    The text is the Hub's, filled with spaces to the length that follows from the size of the file. Empty if the Hub
    does not answer for these files at this commit, or not in this form: each file is then read by itself.
    """
    from huggingface_hub import constants

    from shardctl.storage.hub.library import HfHubHTTPError, TransportError, build_hf_headers

    if (
        address.revision != _DEFAULT_BRANCH
        or _INDEX_FILE not in listing.files
        or len(shards) < _MIN_SHARDS_FOR_METADATA
    ):
        return {}
    headers = build_hf_headers(library_name="shardctl", library_version=__version__)
    hub = HubQuestions(constants.ENDPOINT, headers, constants.HF_HUB_DOWNLOAD_TIMEOUT)
    api = f"{constants.ENDPOINT}/api/models/{address.repository}"
    try:
        document, _ = hub.ask(f"{api}/safetensors-metadata/{quote(_INDEX_FILE)}")
        found = {path: _build_beginning(document["headers"][path], listing.files[path].size) for path in shards}
        now, _ = hub.ask(f"{api}/revision/{_DEFAULT_BRANCH}?expand=sha")
        return found if now["sha"] == listing.commit else {}
    except (HfHubHTTPError, TransportError, TroubleError, ShardctlError, *NOT_AN_ANSWER):
        return {}


def _build_beginning(header: Any, size: int) -> bytes:  # noqa: ANN401 - it is any JSON
    """Build the first bytes of a file of `size` bytes; raises ValueError for a header that no such file has."""
    data = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    length = size - data - _LENGTH_BYTES
    if not len(text) <= length <= _SLACK * len(text) + _BESIDES:
        raise ValueError("a header that does not end where the tensors begin")
    return length.to_bytes(_LENGTH_BYTES, "little") + text.ljust(length)
