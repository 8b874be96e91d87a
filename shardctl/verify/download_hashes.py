"""Compares the files of a download with the hashes that the Hub stated of them, while their tensors are read."""

from __future__ import annotations

import hashlib
import re
from dataclasses import field
from typing import TYPE_CHECKING, Final

from shardctl.base.amounts import format_plural
from shardctl.base.errors import ChangedError, format_first_few
from shardctl.base.value import state_class
from shardctl.base.workers import raise_if_stopped
from shardctl.storage.file_hashes import PIECE, FileHashes
from shardctl.storage.hashed_file import PromisedHash
from shardctl.storage.local import LocalSource
from shardctl.tensors.manifest import Region
from shardctl.verify.finding import CheckFinding

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from shardctl.base.workers import StopRequest
    from shardctl.storage import Source
    from shardctl.tensors.manifest import Manifest

_DOWNLOAD_METADATA_FOLDER: Final = ".cache/huggingface/download"
"""Where a download into a directory leaves a note of each file: commit, ETag and time, a line each
(huggingface_hub, `_local_folder.py`). The ETag of a large file is its SHA-256, that of a small one its git SHA-1."""
_NOTE_BYTES: Final = 1 << 10
_HASH_PATTERN: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SHA256_DIGITS: Final = 64


@state_class
class DownloadHashes:
    """Which files have the hashes that the Hub stated when they were downloaded, or states now."""

    verified: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    without: list[str] = field(default_factory=list)
    """Files of which no hash is known here."""
    digests: dict[str, str] = field(default_factory=dict)
    """What the files were found to have."""

    def describe(self) -> Iterator[str]:
        """Say in words which files were held against a hash and which were not; nothing of what is no download."""
        if not self.verified and not self.differing:
            return
        yield f"{format_plural(len(self.verified), 'file')} with the hash that the Hub stated"
        if self.without:
            yield f"no hash of the Hub to hold against: {format_first_few(self.without)}"


class HashingReader:
    """Reads from a source, and hashes the files of which a hash was promised; shared by threads."""

    def __init__(self, source: Source, promised: Mapping[str, PromisedHash]) -> None:
        self._source = source
        self._promised = promised
        self._hashes = FileHashes(promised, source.read_at)
        self._wrong: set[str] = set()

    def read_at(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` from `offset`."""
        if path not in self._promised or path in self._wrong:
            self._source.read_at(path, offset, into)
            return
        self._hashes.begin(path, offset, offset + len(into))
        try:
            self._source.read_at(path, offset, into)
        except BaseException:
            self._hashes.fail(path, offset, offset + len(into))
            raise
        try:
            self._hashes.finish(path, offset, into)
        except ChangedError as error:
            self._note_wrong(path, error)

    def read_headers(self, stored: Manifest) -> None:
        """Read what comes before the first tensor of each file, so that all that follows can be hashed as it comes."""
        first: dict[str, int] = {}
        for _, chunk in stored.arrays():
            if isinstance(chunk.where, Region) and chunk.where.file in self._promised:
                place = chunk.where
                first[place.file] = min(place.offset, first.get(place.file, place.offset))
        for path, end in first.items():
            buffer = memoryview(bytearray(min(PIECE, end)))
            for offset in range(0, end, PIECE):
                self.read_at(path, offset, buffer[: min(PIECE, end - offset)])

    def compare(self, stop: StopRequest) -> DownloadHashes:
        """Read what was not read yet of each file, and say which are as promised.

        Raises ChangedError for a file that changes while it is read.
        """
        found = DownloadHashes(without=[path for path in self._source.files() if path not in self._promised])
        for path, promise in self._promised.items():
            raise_if_stopped(stop)
            try:
                if path not in self._wrong:
                    self._hashes.prove_file(path)
            except ChangedError as error:
                self._note_wrong(path, error)
            digest = self._hashes.find_digest(path)
            if self._hashes.why_not(path) and path not in self._wrong:  # it is empty, or was read in too many pieces
                digest = self._hash_again(path, promise, stop)
            found.digests[path] = digest
            (found.verified if digest == promise.digest else found.differing).append(path)
        return found

    def _hash_again(self, path: str, promise: PromisedHash, stop: StopRequest) -> str:
        state, buffer = promise.state.copy(), memoryview(bytearray(min(PIECE, promise.size)))
        for offset in range(0, promise.size, PIECE):
            raise_if_stopped(stop)
            data = buffer[: min(PIECE, promise.size - offset)]
            self._source.read_at(path, offset, data)
            state.update(data)
        return state.hexdigest()

    def _note_wrong(self, path: str, error: ChangedError) -> None:
        """Note a file that has another hash; raises the error of one of which two reads gave different bytes."""
        if not self._hashes.find_digest(path):
            raise error
        self._wrong.add(path)


def list_noted_hashes(source: Source) -> dict[str, PromisedHash]:
    """List the hashes that huggingface_hub noted of the files of a local source, beside them or in a link's name."""
    if not isinstance(source, LocalSource):
        return {}
    promised = {}
    for path, stat in source.files().items():
        digest = _read_noted_hash(source.root, path) or _find_linked_hash(source.root / path)
        if digest is not None:
            promised[path] = _build_promise(stat.size, digest)
    return promised


def list_hash_findings(compared: DownloadHashes, noted: Mapping[str, PromisedHash]) -> Iterator[CheckFinding]:
    """List the files that are not what the Hub gave; a small one, which people edit, is a warning."""
    for path in compared.differing:
        if path not in noted:
            continue
        large = len(noted[path].digest) == _SHA256_DIGITS
        kind, promise = "SHA-256" if large else "git SHA-1", noted[path].digest
        found = f"its {kind} is {compared.digests[path]}, and {promise} was noted when it was downloaded"
        yield CheckFinding(
            "error" if large else "warning", "sha256", f"{path} is not the file that the Hub gave: {found}", file=path
        )


def _build_promise(size: int, digest: str) -> PromisedHash:
    if len(digest) == _SHA256_DIGITS:
        return PromisedHash(size, digest, hashlib.sha256())
    return PromisedHash(size, digest, hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False))


def _read_noted_hash(root: Path, path: str) -> str | None:
    """Read the hash in the note of a file that was downloaded into the directory."""
    try:
        with (root / _DOWNLOAD_METADATA_FOLDER / f"{path}.metadata").open("rb") as note:
            lines = note.read(_NOTE_BYTES).decode("ascii", "replace").splitlines()
    except OSError:
        return None
    return lines[1] if len(lines) > 1 and _HASH_PATTERN.fullmatch(lines[1]) else None


def _find_linked_hash(file: Path) -> str | None:
    """Find the hash by which the cache calls a file: `snapshots/<commit>/<file> -> ../../blobs/<hash>`.

    What that is may be a link again, to a store of all repositories, where it has another name (its Xet hash).
    """
    if not file.is_symlink():
        return None
    blob = file.readlink()
    return blob.name if blob.parent.name == "blobs" and _HASH_PATTERN.fullmatch(blob.name) else None


def list_stated_hashes(other: Source | None, source: Source) -> dict[str, PromisedHash]:
    """List the hashes that the Hub states of files which this source has, too, in the same places and sizes."""
    stated: Mapping[str, PromisedHash] = getattr(other, "stated_hashes", {})
    own = source.files() if isinstance(source, LocalSource) else {}
    return {path: promise for path, promise in stated.items() if path in own and own[path].size == promise.size}


def find_equal_files(
    source: Source,
    files: Collection[str],
    stated: Mapping[str, PromisedHash],
    known: Mapping[str, str],
    stop: StopRequest,
) -> frozenset[str]:
    """Find which of the files have the hash that is stated, of which those that are not `known` are read."""
    wanted = {path: stated[path] for path in files if path in stated}
    unknown = {path: promise for path, promise in wanted.items() if path not in known}
    digests = {**known, **HashingReader(source, unknown).compare(stop).digests}
    return frozenset(path for path, promise in wanted.items() if digests[path] == promise.digest)
