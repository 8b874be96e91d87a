"""What an interrupted run had finished: one line per band that is on stable storage."""

from __future__ import annotations

import json
import os
import threading
from typing import TYPE_CHECKING, Any, ClassVar

from shardctl.digest import Sums

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

Key = tuple[int, int]
"""Position of the tensor in the copy plan, position of the band in the tensor."""
Entry = tuple[Sums, Sums]
"""Digest sums of the band as read and as written."""


class Journal:
    """An append-only file bound to one plan and one state of the source.

    A line is written only after the bytes it speaks of were synced; a torn last line is ignored.
    """

    SCHEMA: ClassVar = "shardctl.journal/1"

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.entries: dict[Key, Entry] = {}
        """What an earlier run with the same header finished."""
        self._lock = threading.Lock()
        self._header = {"schema": self.SCHEMA, **header}
        if path.exists():
            self._load(path)
        fresh = not self.entries
        flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if fresh else os.O_APPEND)
        self._descriptor = os.open(path, flags, 0o600)
        if fresh:
            self._write(json.dumps(self._header) + "\n")
        else:
            self._write("\n")  # ends a torn line

    @staticmethod
    def header(path: Path) -> dict[str, Any] | None:
        """The header of an earlier run's journal, or None if there is none that can be read."""
        try:
            with path.open(encoding="utf-8") as lines:
                found = json.loads(lines.readline())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and found.get("schema") == Journal.SCHEMA else None

    def _load(self, path: Path) -> None:
        if self.header(path) != self._header:
            return
        with path.open(encoding="utf-8", errors="replace") as lines:
            next(lines)
            for line in lines:
                try:
                    tensor, band, read, written = json.loads(line)
                    self.entries[int(tensor), int(band)] = (Sums.parse(read), Sums.parse(written))
                except (ValueError, TypeError):
                    continue

    def append(self, rows: Sequence[tuple[Key, Entry]]) -> None:
        """Record bands whose bytes have been synced."""
        lines = [json.dumps([*key, str(read), str(written)]) + "\n" for key, (read, written) in rows]
        self._write("".join(lines))

    def _write(self, text: str) -> None:
        with self._lock:
            data = text.encode()
            while data:
                data = data[os.write(self._descriptor, data) :]
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
