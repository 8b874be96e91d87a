"""Keeps how far a file is hashed while threads read it, and which stretches of it must be seen again."""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_right
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import ChangedError
from shardctl.base.value import state_class, value_class

if TYPE_CHECKING:
    from collections.abc import Iterator
    from hashlib import _Hash


_MAX_HASH_STATES: Final = 64
"""States of a hash kept of one file, from which a part of it is hashed again: each 200 bytes or so, against reading
more again."""
_ON_THE_WAY: Final = "it was changed on the way; run again, or download it in another way"


@value_class
class PromisedHash:
    """What the hash of a file should be."""

    size: int
    """Bytes of the file."""
    digest: str
    """In hexadecimal; empty if nothing is promised."""
    state: _Hash
    """The hash of no byte of the file yet."""


@dataclass(slots=True, eq=False)
class RangeNote:
    """A stretch that was given out and is to be seen again."""

    start: int
    stop: int
    digest: bytes
    """Its SHA-256."""
    again: _Hash = field(default_factory=hashlib.sha256)
    """Of the bytes that were seen again."""

    def see(self, path: str, start: int, data: memoryview) -> bool:
        """Take what a part of the file has of this stretch; returns whether that was the rest of it."""
        low, high = max(self.start, start), min(self.stop, start + len(data))
        if low < high:
            self.again.update(data[low - start : high - start])
        if high < self.stop:
            return False
        if self.again.digest() != self.digest:
            raise build_change_error(path, self.start, self.stop)
        return True


BY_START: Final = attrgetter("start")


@state_class
class HashedFile:
    """How far a file is hashed; `turn` guards all of it."""

    promise: PromisedHash
    state: _Hash
    position: int = 0
    """Bytes hashed so far, from the first."""
    frontier: int = 0
    """Bytes hashed once the thread that is hashing is done."""
    busy: bool = False
    begun: bool = False
    given: int = 0
    """Bytes given out, counted again where they were read again."""
    compared: bool = False
    flights: list[tuple[int, int]] = field(default_factory=list)
    """Stretches that are being fetched, or wait to be hashed."""
    ahead: list[RangeNote] = field(default_factory=list)
    """Stretches that the hash will come to, in their order."""
    behind: list[RangeNote] = field(default_factory=list)
    """Stretches of which it has passed at least the beginning."""
    marks: list[tuple[int, _Hash]] = field(default_factory=list)
    """The hash after so many bytes, in rising order."""
    forgotten: bool = False
    """Whether more stretches came out of order than are noted."""
    turn: threading.Condition = field(default_factory=threading.Condition)

    @property
    def proved(self) -> bool:
        """Whether all of it is as promised, and every stretch that was given out is a part of that."""
        return self.compared and not self.ahead and not self.behind and not self.forgotten

    @property
    def due(self) -> bool:
        """Whether a thread is fetching the next byte to hash, or has it."""
        return self.busy or any(start <= self.position < stop for start, stop in self.flights)

    def read_bytes(self) -> int:
        """Read how much of the file was given out."""
        if self.forgotten or not self.promise.digest:
            return min(self.given, self.promise.size)
        end, total = self.position, self.position
        for note in self.ahead:
            total += max(note.stop - max(note.start, end), 0)
            end = max(end, note.stop)
        return total

    def mark(self) -> None:
        """Keep the hash as it is now, from which a part can be hashed again."""
        self.marks.append((self.position, self.state.copy()))
        if len(self.marks) > _MAX_HASH_STATES:
            del self.marks[3::2]  # the ends of the first stretches stay: headers are what is read twice most often


@contextmanager
def claim_hash(file: HashedFile, start: int, stop: int) -> Iterator[tuple[int | None, list[RangeNote]]]:
    """Give one thread where the hash is, or None if it is not at `start` yet, and the notes up to `stop`."""
    with file.turn:
        while file.busy:
            file.turn.wait()
        due = start <= file.position
        position = file.position if due else None
        notes = [note for note in file.ahead if note.start < stop] if due and file.ahead else []
        if due:
            file.busy, file.frontier = True, max(stop, file.position)
    try:
        yield position, notes
    finally:
        if due:
            with file.turn:
                file.busy = False
                file.turn.notify_all()


def build_change_error(path: str, start: int, stop: int) -> ChangedError:
    """Build the error for a stretch that two reads give differently."""
    return ChangedError(f"{path}: bytes {start} to {stop - 1} were read twice with different results", hint=_ON_THE_WAY)


def compare_hash(path: str, file: HashedFile) -> None:
    """Compare the hash of a whole file with the promised one; raises ChangedError if they differ."""
    found, promised = file.state.hexdigest(), file.promise.digest
    if found != promised:
        raise ChangedError(
            f"{path} differs from its stated hash: its {file.state.name} is {found}, but {promised} is expected",
            hint=_ON_THE_WAY,
        )
    file.compared = True


def list_spans(file: HashedFile, notes: list[RangeNote] | None = None) -> list[tuple[int, int]]:
    """List the stretches, from one known state of the hash to another, in which noted ones lie."""
    places = [*(position for position, _ in file.marks), file.position]
    spans: list[tuple[int, int]] = []
    for note in sorted(file.behind, key=BY_START) if notes is None else notes:
        low = places[bisect_right(places, note.start) - 1]
        high = next(place for place in places if place >= note.stop)
        if spans and low < spans[-1][1]:
            spans[-1] = (spans[-1][0], max(high, spans[-1][1]))
        else:
            spans.append((low, high))
    return spans
