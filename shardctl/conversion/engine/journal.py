"""Keeps the journal, from which an interrupted run resumes: one line per band on stable storage."""

from __future__ import annotations

import json
import os
import sys
import threading
import zlib
from array import array
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np

from shardctl.base.errors import SourceError
from shardctl.base.value import value_class
from shardctl.storage.bounded_text import TextLimits, check_json
from shardctl.storage.crc_tracker import CrcPiece
from shardctl.storage.durable import sync_descriptor, translate_os_errors
from shardctl.tensors.digest import DigestSums

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

Key = tuple[int, int]
"""Position of the tensor in the copy plan, position of the band in the tensor."""


_MAX_LINE_BYTES: Final = 4096
"""Bytes of a line at most; the widest element has a few hundred."""


_LINE_CHECKSUM_BYTES: Final = 16
"""Bytes of a line for its own check."""

_HEADER_TEXT: Final = TextLimits(size=64 << 20, memory=256 << 20, depth=8)
"""The first line, which lists the files of the source; 64 MB are half a million of them."""


class JournalEntry(NamedTuple):
    """What is known of a band that was moved."""

    read: DigestSums
    """Digest sums of its elements in the source."""
    written: DigestSums
    """And as they were written; the same unless they were cast."""
    overflowed: int = 0
    """Finite elements that the cast made infinite."""
    crcs: tuple[CrcPiece, ...] = ()
    """What of the source's files was read for it, where they state CRC-32s."""


@value_class
class _FileTouch:
    """A status change time of a file of the source, which holds for the lines that follow."""

    file: str
    changed: int
    """Nanoseconds."""


class BandJournal:
    """An append-only file bound to one plan and one state of the source.

    A line is written only after the bytes it speaks of were synced. Each ends with its CRC-32, because what it says of
    the source cannot be checked against the staged bytes; a torn or damaged line is ignored. In memory a line of an
    earlier run is only a place in the file, so that terabytes of bands cost megabytes.

    Lines also note when a file of the source was last touched (its ctime). Such a note is not part of what the journal
    is bound to: bands whose lines come before it are compared with the source once more, and noted again behind it.
    """

    SCHEMA: ClassVar = "shardctl.journal/3"

    def __init__(self, path: Path, header: Mapping[str, Any], changed: Mapping[str, int] | None = None) -> None:
        """`changed` are the status change times of the source's files, by path, where their versions do not suffice."""
        self._path = path
        self._lock = threading.Lock()
        self._broken = False
        self._header = {"schema": self.SCHEMA, **header}
        self._keys = self._places = np.empty(0, np.int64)
        self.proved: frozenset[str] = frozenset()
        """Files of the source that an earlier run saw the whole of, as their place promises them."""
        self._noted: dict[str, tuple[int, int]] = {}
        """By file of the source: where in the journal its last status change time is noted, and that time."""
        with translate_os_errors(path, "opening"):
            if self.header(path) == self._header:
                self._load()
            if not len(self):
                self._noted = {}
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | (0 if len(self) else os.O_TRUNC)
            self._descriptor = os.open(path, flags, 0o600)
        touched = {file: time for file, time in (changed or {}).items() if self._noted.get(file, (0, 0))[1] != time}
        self._since = {file: place for file, (place, _) in self._noted.items()} | dict.fromkeys(touched, sys.maxsize)
        """By file of the source: from where on the lines speak of the file as it is now."""
        self._last_touch = max(self._since.values(), default=0)
        begin = "\n" if len(self) else json.dumps(self._header) + "\n"  # a newline ends a torn line
        self._write(begin + "".join(_with_check(json.dumps({"changed": each})) for each in touched.items()))

    def __len__(self) -> int:
        """Return how many lines of an earlier run with the same header there are."""
        return len(self._keys)

    def __bool__(self) -> bool:
        """Return True: a journal without lines is a journal all the same."""
        return True

    @staticmethod
    def header(path: Path) -> dict[str, Any] | None:
        """Return the header of an earlier run's journal, or None if there is none that can be read."""
        try:
            with path.open("rb") as lines:
                line = lines.readline(_HEADER_TEXT.size)
            check_json(line, path.name, _HEADER_TEXT)
            found = json.loads(line)
        except (OSError, SourceError, ValueError):
            return None
        return found if isinstance(found, dict) and found.get("schema") == BandJournal.SCHEMA else None

    @classmethod
    def block(cls, path: Path, header: Mapping[str, Any]) -> int | None:
        """Return bytes of the bands of an earlier run with this header but for its `block`; None if there was none.

        A run that goes on from there must have the same bands.
        """
        found = cls.header(path) or {}
        block = found.pop("block", None)
        return block if isinstance(block, int) and block > 0 and found == {"schema": cls.SCHEMA, **header} else None

    @staticmethod
    def list_touched(path: Path, changed: Mapping[str, int]) -> list[str]:
        """List the files of the source that were touched since a journal was begun or gone on with.

        `changed` are their status change times now.
        """
        noted = {}
        with translate_os_errors(path, "reading"), path.open("rb") as lines:
            while line := lines.readline(_MAX_LINE_BYTES):
                found = _parse_line(line)
                if isinstance(found, _FileTouch):
                    noted[found.file] = found.changed
        return [file for file, time in changed.items() if noted.get(file) != time]

    def _load(self) -> None:
        keys, places = array("q"), array("q")
        place, proved = 0, set[str]()
        with self._path.open("rb") as lines:
            while line := lines.readline(_MAX_LINE_BYTES):  # the pieces of a longer one are no lines
                found = _parse_line(line)
                if isinstance(found, str):
                    proved.add(found)
                elif isinstance(found, _FileTouch):
                    self._noted[found.file] = (place, found.changed)
                elif found is not None:
                    keys.append(_pack_key(found[0]))
                    places.append(place)
                place += len(line)
        order = np.argsort(np.array(keys), kind="stable")
        self._keys, self._places = np.array(keys)[order], np.array(places)[order]
        self.proved = frozenset(proved)

    def __contains__(self, key: Key) -> bool:
        """Return whether a line of an earlier run with the same header is about a band."""
        return self._find_place(key) is not None

    def find(self, key: Key) -> JournalEntry | None:
        """Return what an earlier run with the same header finished of a band; the last line about it counts."""
        place = self._find_place(key)
        if place is None:
            return None
        with translate_os_errors(self._path, "reading"):
            lines = os.pread(self._descriptor, _MAX_LINE_BYTES, place)
        row = _parse_line(lines.partition(b"\n")[0])
        return row[1] if isinstance(row, tuple) else None

    def predates_touch(self, key: Key, files: Iterable[str]) -> bool:
        """Return whether a file of these was touched after an earlier run had finished a band that was read from it.

        Only its digest then tells whether the file still has the same bytes. A file that is computed from others is
        taken to be touched with any of them.
        """
        place = self._find_place(key)
        return place is None or any(place < self._since.get(file, self._last_touch) for file in files)

    def _find_place(self, key: Key) -> int | None:
        packed = _pack_key(key)
        position = int(np.searchsorted(self._keys, packed, "right")) - 1
        return int(self._places[position]) if position >= 0 and self._keys[position] == packed else None

    def append(self, rows: Sequence[tuple[Key, JournalEntry]]) -> None:
        """Record bands whose bytes have been synced."""
        self._write("".join(map(_format_line, rows)))

    def append_proofs(self, paths: Sequence[str]) -> None:
        """Record files of the source that were hashed whole, once all bands that they have a part in are recorded."""
        self._write("".join(_with_check(json.dumps(path)) for path in paths))

    def _write(self, text: str) -> None:
        with translate_os_errors(self._path, "writing"), self._lock:
            if self._broken:
                return  # the first error is on its way to the user, and a second try to flush would lie
            self._broken = True
            data = text.encode()
            while data:
                data = data[os.write(self._descriptor, data) :]
            sync_descriptor(self._descriptor)
            self._broken = False

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def _pack_key(key: Key) -> int:
    return key[0] << 32 | key[1]


def _format_line(row: tuple[Key, JournalEntry]) -> str:
    key, (read, written, overflowed, crcs) = row
    fixed = [*key, str(read), str(written), overflowed]
    text = json.dumps([*fixed, crcs])
    if len(text) > _MAX_LINE_BYTES - _LINE_CHECKSUM_BYTES:
        text = json.dumps([*fixed, []])
    return _with_check(text)


def _with_check(text: str) -> str:
    return f"{text} {_compute_crc(text.encode())}\n"


def _parse_line(line: bytes) -> str | _FileTouch | tuple[Key, JournalEntry] | None:
    """Parse a line: a file that was proved, one that was touched, or a band; None if it is torn or damaged."""
    text, _, check = line.rstrip(b"\n").rpartition(b" ")
    if check.decode(errors="replace") != _compute_crc(text):
        return None
    try:
        found = json.loads(text)
        if isinstance(found, str):
            return found
        if isinstance(found, dict):
            return _FileTouch(*found["changed"])
        tensor, band, read, written, overflowed, crcs = found
        pieces = tuple(CrcPiece(*piece) for piece in crcs)
        return (tensor, band), JournalEntry(DigestSums.parse(read), DigestSums.parse(written), overflowed, pieces)
    except (ValueError, TypeError, KeyError, RecursionError):  # the check is right, so another program wrote it
        return None


def _compute_crc(text: bytes) -> str:
    return f"{zlib.crc32(text):08x}"
