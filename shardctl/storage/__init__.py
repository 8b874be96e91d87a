"""Byte-range readers and writers: the only doors through which checkpoints are read and written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Stat:
    """What identifies a version of a file without reading it."""

    size: int
    """Bytes."""
    version: str
    """Changes whenever the file does: inode and modification time locally, an ETag or commit remotely."""


class Source(Protocol):
    """Where a checkpoint is read from."""

    @property
    def name(self) -> str:
        """The location as a person writes it."""

    def files(self) -> Mapping[str, Stat]:
        """Every regular file below the root, by path with forward slashes, in sorted order."""

    def read_at(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` from `offset`; raises SourceError if the file is missing or ends early."""

    def close(self) -> None:
        """Release descriptors or connections."""


class Target(Protocol):
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


def read(source: Source, path: str, offset: int = 0, size: int | None = None) -> bytes:
    """`size` bytes (default: to the end) of a file, as one object; for headers and side files only."""
    if size is None:
        size = source.files()[path].size - offset
    buffer = bytearray(size)
    source.read_at(path, offset, memoryview(buffer))
    return bytes(buffer)
