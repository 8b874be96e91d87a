"""Keeps the journal, from which an interrupted run resumes: one line per band on stable storage."""

from __future__ import annotations

import json
import os
import threading
import zlib
from array import array
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np

from shardctl.digest import DigestSums
from shardctl.storage.crc_tracker import CrcPiece
from shardctl.storage.durable import sync_descriptor, translate_os_errors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

Key = tuple[int, int]
"""Position of the tensor in the copy plan, position of the band in the tensor."""


_LONGEST: Final = 4096
"""Bytes of a line at most; the widest element has a few hundred."""


_MARGIN: Final = 16
"""Bytes of a line for its own check."""


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


class BandJournal:
    """An append-only file bound to one plan and one state of the source.

    A line is written only after the bytes it speaks of were synced. Each ends with its CRC-32, because what it says of
    the source cannot be checked against the staged bytes; a torn or damaged line is ignored. In memory a line of an
    earlier run is only a place in the file, so that terabytes of bands cost megabytes.
    """

    SCHEMA: ClassVar = "shardctl.journal/2"

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._broken = False
        self._header = {"schema": self.SCHEMA, **header}
        self._keys = self._places = np.empty(0, np.int64)
        self.proved: frozenset[str] = frozenset()
        """Files of the source that an earlier run saw the whole of, as their place promises them."""
        with translate_os_errors(path, "opening"):
            if self.header(path) == self._header:
                self._load()
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | (0 if len(self) else os.O_TRUNC)
            self._descriptor = os.open(path, flags, 0o600)
        self._write("\n" if len(self) else json.dumps(self._header) + "\n")  # a newline ends a torn line

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
            with path.open(encoding="utf-8") as lines:
                found = json.loads(lines.readline())
        except (OSError, ValueError):
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

    def _load(self) -> None:
        keys, places = array("q"), array("q")
        place, proved = 0, set[str]()
        with self._path.open("rb") as lines:
            for line in lines:
                if (path := _parse_proof(line)) is not None:
                    proved.add(path)
                elif row := _parse_line(line):
                    keys.append(_pack_key(row[0]))
                    places.append(place)
                place += len(line)
        order = np.argsort(np.array(keys), kind="stable")
        self._keys, self._places = np.array(keys)[order], np.array(places)[order]
        self.proved = frozenset(proved)

    def find(self, key: Key) -> JournalEntry | None:
        """Return what an earlier run with the same header finished of a band; the last line about it counts."""
        packed = _pack_key(key)
        position = int(np.searchsorted(self._keys, packed, "right")) - 1
        if position < 0 or self._keys[position] != packed:
            return None
        with translate_os_errors(self._path, "reading"):
            lines = os.pread(self._descriptor, _LONGEST, int(self._places[position]))
        row = _parse_line(lines.partition(b"\n")[0])
        return row[1] if row else None

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
    if len(text) > _LONGEST - _MARGIN:
        text = json.dumps([*fixed, []])
    return _with_check(text)


def _with_check(text: str) -> str:
    return f"{text} {_compute_crc(text.encode())}\n"


def _parse_proof(line: bytes) -> str | None:
    """Parse the file that a line says was proved; None for any other line."""
    text, _, check = line.rstrip(b"\n").rpartition(b" ")
    if not text.startswith(b'"') or check.decode(errors="replace") != _compute_crc(text):
        return None
    return str(json.loads(text))


def _parse_line(line: bytes) -> tuple[Key, JournalEntry] | None:
    """Parse a line's content; None if it is not whole."""
    text, _, check = line.rstrip(b"\n").rpartition(b" ")
    if check.decode(errors="replace") != _compute_crc(text):
        return None
    tensor, band, read, written, overflowed, crcs = json.loads(text)
    pieces = tuple(CrcPiece(*piece) for piece in crcs)
    return (tensor, band), JournalEntry(DigestSums.parse(read), DigestSums.parse(written), overflowed, pieces)


def _compute_crc(text: bytes) -> str:
    return f"{zlib.crc32(text):08x}"
