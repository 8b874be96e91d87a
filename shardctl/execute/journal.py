"""What an interrupted run had finished: one line per band that is on stable storage."""

from __future__ import annotations

import json
import os
import threading
import zlib
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from shardctl.digest import Sums
from shardctl.storage.durable import flush, told

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

Key = tuple[int, int]
"""Position of the tensor in the copy plan, position of the band in the tensor."""


class Entry(NamedTuple):
    """What is known of a band that was moved."""

    read: Sums
    """Digest sums of its elements in the source."""
    written: Sums
    """And as they were written; the same unless they were cast."""
    overflowed: int = 0
    """Finite elements that the cast made infinite."""


class Journal:
    """An append-only file bound to one plan and one state of the source.

    A line is written only after the bytes it speaks of were synced. Each ends with its CRC-32, because what it says of
    the source cannot be checked against the staged bytes; a torn or damaged line is ignored.
    """

    SCHEMA: ClassVar = "shardctl.journal/1"

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.entries: dict[Key, Entry] = {}
        """What an earlier run with the same header finished."""
        self._path = path
        self._lock = threading.Lock()
        self._broken = False
        self._header = {"schema": self.SCHEMA, **header}
        with told(path, "opening"):
            if self.header(path) == self._header:
                self._load()
            fresh = not self.entries
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | (os.O_TRUNC if fresh else 0)
            self._descriptor = os.open(path, flags, 0o600)
        self._write(json.dumps(self._header) + "\n" if fresh else "\n")  # a newline ends a torn line

    @staticmethod
    def header(path: Path) -> dict[str, Any] | None:
        """The header of an earlier run's journal, or None if there is none that can be read."""
        try:
            with path.open(encoding="utf-8") as lines:
                found = json.loads(lines.readline())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and found.get("schema") == Journal.SCHEMA else None

    def _load(self) -> None:
        with self._path.open(encoding="utf-8", errors="replace") as lines:
            next(lines)
            for line in lines:
                text, _, check = line.rstrip("\n").rpartition(" ")
                if check == _check(text):
                    tensor, band, read, written, overflowed = json.loads(text)
                    self.entries[tensor, band] = Entry(Sums.parse(read), Sums.parse(written), overflowed)

    def append(self, rows: Sequence[tuple[Key, Entry]]) -> None:
        """Record bands whose bytes have been synced."""
        self._write("".join(map(_line, rows)))

    def _write(self, text: str) -> None:
        with told(self._path, "writing"), self._lock:
            if self._broken:
                return  # the first error is on its way to the user, and a second try to flush would lie
            self._broken = True
            data = text.encode()
            while data:
                data = data[os.write(self._descriptor, data) :]
            flush(self._descriptor)
            self._broken = False

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def _line(row: tuple[Key, Entry]) -> str:
    key, (read, written, overflowed) = row
    text = json.dumps([*key, str(read), str(written), overflowed])
    return f"{text} {_check(text)}\n"


def _check(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
