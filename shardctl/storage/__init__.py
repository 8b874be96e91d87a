"""Defines byte-range readers and writers: checkpoints are read and written only through them."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Final, Protocol

from shardctl.base.errors import SourceError
from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

    from shardctl.base.workers import StopRequest

HIDDEN: Final = frozenset({".git", ".cache", ".shardctl", ".weight_sync"})
"""Folders that programs keep for themselves: what is in them is no part of a checkpoint."""
Span = tuple[str, int, int]
"""A stretch of a file: its path, the offset of the first byte, and how many bytes."""


@value_class
class FileStat:
    """What identifies a version of a file without reading it."""

    size: int
    """Bytes."""
    version: str
    """Changes whenever the file does: inode and modification time locally, an ETag or commit remotely."""
    changed: int = field(default=0, compare=False)
    """Status change time (ctime) in nanoseconds; 0 where `version` follows from the content.

    An edit in place may put the modification time back, but never this. It is not part of the version, because `chmod`,
    a hard link and a backup set it, too, and because two machines never agree about it.
    """


@value_class
class FileProofs:
    """Which of the files that were read have the hashes that their place promises."""

    verified: tuple[str, ...] = ()
    """Files whose every byte was hashed, and that are as promised."""
    unverified: Mapping[str, str] = field(default_factory=dict)
    """Other files of which something was read, each with the reason."""


class Source(Protocol):
    """Where a checkpoint is read from."""

    @property
    def name(self) -> str:
        """The location as a person writes it."""

    @property
    def location(self) -> str:
        """The same for a later run, wherever it is started: absolute, and bound to a commit where there is one."""

    @property
    def folder(self) -> Path | None:
        """The local directory of the files; None where they are elsewhere."""

    @property
    def held_bytes(self) -> int:
        """Anonymous memory that reading may take at once, beside the caller's own buffers; for `Budget`."""

    def files(self) -> Mapping[str, FileStat]:
        """Return every regular file below the root, by path with forward slashes, in sorted order."""

    def notes(self) -> tuple[str, ...]:
        """Return what came out about the files while they were read, in words for people."""

    @property
    def promised(self) -> Collection[str]:
        """The files that are compared with a hash while they are read."""

    def proofs(self) -> FileProofs:
        """Return which files were compared with their hashes, as far as they were read by now."""

    def prove(
        self, whole: Collection[str] = (), *, earlier: Collection[str] = (), allow_unverified: bool = False
    ) -> None:
        """Compare with their hashes the files that were read whole, and those of `whole`, reading again what it takes.

        Those of `earlier` were proved by an earlier run, and no more than their headers was read by this one.
        Raises ChangedError for one that is not as promised, SourceError if that cannot be found out. With
        `allow_unverified` nothing is read again, and nothing but what is known to be wrong is an error.
        """

    def cautions(self) -> tuple[str, ...]:
        """Return what may go wrong with reading these files, to be said before it is begun."""

    def stat_file(self, path: str) -> FileStat | None:
        """Return the file's state now, to see whether it changed under the reader; None if it is gone."""

    def beside(self, name: str) -> bytes | None:
        """Return where the source is one file: the content of a small file beside it, if there is one of that name."""

    def expect(self, spans: Iterable[Span]) -> None:
        """Be told what will be read next: what is far away may fetch it at once and together; may do nothing."""

    def set_headers_only(self) -> None:
        """Be told that headers and small files will be read and no tensors: what is far away may fetch less."""

    def set_stop_request(self, stop: StopRequest) -> None:
        """Raise Interrupted instead of waiting once `stop` is set; nothing to do where reads never wait."""

    def read_at(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` from `offset`; raises SourceError if the file is missing or ends early."""

    def close(self) -> None:
        """Release descriptors or connections."""


class UnpromisedSource:
    """The half of a `Source` that speaks of hashes, for a place that promises none."""

    promised: Collection[str] = ()

    def set_headers_only(self) -> None:
        """Do nothing: headers are read where they are."""

    def cautions(self) -> tuple[str, ...]:
        """Return nothing: nothing is known to go wrong."""
        return ()

    def proofs(self) -> FileProofs:
        """Return nothing: nothing was promised."""
        return FileProofs()

    def prove(
        self, whole: Collection[str] = (), *, earlier: Collection[str] = (), allow_unverified: bool = False
    ) -> None:
        """Do nothing: there is nothing to compare with."""


class WriteTarget(Protocol):
    """Where the files of a checkpoint are written before they are published."""

    def create(self, path: str, size: int) -> None:
        """Make a file of `size` bytes, or keep the one that an interrupted run left."""

    def write_at(self, path: str, offset: int, data: memoryview | bytes) -> None:
        """Write all of `data` at `offset`."""

    def read_at(self, path: str, offset: int, into: memoryview) -> None:
        """Read back what was written, to check it before it is trusted."""

    def sync(self, path: str) -> None:
        """Return once the file's bytes are on stable storage."""

    def close(self) -> None:
        """Release descriptors or connections."""


def read_bytes(source: Source, path: str, offset: int = 0, size: int | None = None) -> bytes:
    """Read `size` bytes (default: to the end) of a file, as one object; for headers and side files only."""
    if size is None:
        size = source.files()[path].size - offset
    buffer = bytearray(size)
    source.read_at(path, offset, memoryview(buffer))
    return bytes(buffer)


def require_span(source: Source, path: str, offset: int, size: int) -> None:
    """Raise SourceError unless a file that is elsewhere has `size` bytes from `offset`."""
    file = source.files().get(path)
    if file is None:
        raise SourceError(f"{path} is missing in {source.name}")
    if offset + size > file.size:
        raise SourceError(
            f"{path} ends at byte {file.size}, but bytes up to {offset + size} are needed",
            hint="the file was truncated before it was uploaded",
        )
