"""Compares files that threads read a stretch at a time, in any order, with the hashes that were promised of them.

A hash needs the bytes in order. A stretch that comes when it is its turn is hashed from the reader's own buffer; a
reader that is early waits while another thread is fetching what comes before. A stretch that nobody waits for, and one
that is read again, is noted by its SHA-256: the same bytes must be seen when the file is hashed, for which they are
read again, at once if they are few and otherwise by `prove`. So every byte that was given out is one that was hashed.
"""

from __future__ import annotations

import hashlib
import threading
import time
from bisect import bisect_right, insort
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from shardctl.errors import ChangedError
from shardctl.workers import StopRequest, run_in_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from hashlib import _Hash

    Reread = Callable[[str, int, memoryview], None]
    """Fills memory from an offset of a file; raises as any read does."""

PIECE: Final = 1 << 20
"""Bytes read again at once, by each of `_THREADS`: larger pieces are fewer requests, and more memory beside the plan's.
"""
_THREADS: Final = 8
"""Files that are read again at the same time; most of the time is spent waiting."""
REREAD_BYTES: Final = _THREADS * PIECE
"""Memory that reading again takes."""
_GRACE: Final = 1.0
"""Seconds for the thread that has taken up the stretch before to begin fetching it: waiting costs time once, and not
waiting costs fetching the stretch again."""
_NEAR: Final = 256 << 20
"""Bytes between a stretch and the one that is due, beyond which no thread is about to fetch that."""
_GAP: Final = 64 << 10
"""Bytes that no tensor has, such as the header of a record in an archive: as many are read only to be hashed."""
_TENSOR: Final = 4 << 10
"""Bytes of a gap that may be a tensor's, so that another thread may be about to fetch it."""
_LOOK: Final = 0.05
"""Seconds between two looks at whether a thread that waits does so in vain; and for another to begin with a small gap.
"""
_CATCH_UP: Final = 64 << 20
"""Bytes that are read again at once, so that what follows can be hashed as it comes: as much as the threads have on
their way together. Of what is more, `prove` reads the rest of the file again."""
_MOST_NOTES: Final = 1 << 16
"""Stretches noted at once, of all files: about 16 MB, and what 64 GB have in pieces of 1 MiB that come backwards."""
_MARKS: Final = 64
"""States of a hash kept of one file, from which a part of it is hashed again: each 200 bytes or so, against reading
more again."""
_ALMOST: Final = 8
"""A file of which all but one byte in so many was read, or less, is read whole, so that it can be hashed."""

_ON_THE_WAY: Final = "something on the way changed it; run again, and if that does not help, fetch it another way"


@dataclass(frozen=True, slots=True)
class PromisedHash:
    """What the hash of a file should be."""

    size: int
    """Bytes of the file."""
    digest: str
    """In hexadecimal; empty if nothing is promised."""
    state: _Hash
    """The hash of no byte of the file yet."""


@dataclass(slots=True, eq=False)
class _StretchNote:
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
            raise _build_change_error(path, self.start, self.stop)
        return True


_BY_START: Final = attrgetter("start")


@dataclass(slots=True)
class _HashedFile:
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
    ahead: list[_StretchNote] = field(default_factory=list)
    """Stretches that the hash will come to, in their order."""
    behind: list[_StretchNote] = field(default_factory=list)
    """Stretches of which it has passed at least the beginning."""
    marks: list[tuple[int, _Hash]] = field(default_factory=list)
    """The hash after so many bytes, in rising order."""
    forgotten: bool = False
    """Whether more stretches came out of order than are noted."""
    turn: threading.Condition = field(default_factory=threading.Condition)

    @property
    def proved(self) -> bool:
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
        self.marks.append((self.position, self.state.copy()))
        if len(self.marks) > _MARKS:
            del self.marks[3::2]  # the ends of the first stretches stay: headers are what is read twice most often


class FileHashes:
    """Hashes files while threads read them; shared by threads."""

    def __init__(self, promised: Mapping[str, PromisedHash], reread: Reread) -> None:
        """`promised` is what the hash of each file should be, `reread` reads stretches without telling this object."""
        self._files = {path: _HashedFile(promise, promise.state.copy()) for path, promise in promised.items()}
        for file in self._files.values():
            file.mark()
        self._reread = reread
        self._notes = 0

    def begin(self, path: str, start: int, stop: int) -> None:
        """Say that a stretch is about to be fetched; `finish` or `fail` must follow."""
        file = self._files[path]
        with file.turn:
            file.flights.append((start, stop))
            file.given += stop - start
            file.begun = True

    def fail(self, path: str, start: int, stop: int) -> None:
        """Say that it will not come."""
        file = self._files[path]
        with file.turn:
            file.flights.remove((start, stop))
            file.turn.notify_all()

    def finish(self, path: str, start: int, data: memoryview) -> None:
        """Hash a stretch when it is its turn, or note it; raises ChangedError for a file that is not as promised."""
        file = self._files[path]
        stop = start + len(data)
        try:
            if file.promise.digest:
                self._wait(file, start, stop)
                self._close_gap(path, file, start)
                self._take(path, file, start, data, given=True)
                self._catch_up(path, file)
        finally:
            self.fail(path, start, stop)

    def _wait(self, file: _HashedFile, start: int, stop: int) -> None:
        """Return when it is the turn of this stretch, or when nobody is about to bring what comes before."""
        with file.turn:
            seen, since = file.position, time.monotonic()
            while file.position < start:
                if seen != file.position:
                    seen, since = file.position, time.monotonic()
                if not file.due and time.monotonic() - since >= _compute_grace(start - seen, stop - start):
                    return
                file.turn.wait(_LOOK)

    def _close_gap(self, path: str, file: _HashedFile, start: int) -> None:
        """Read the few bytes before a stretch that nobody else will."""
        with file.turn:
            position = file.position
            if file.due or not 0 < start - position <= _GAP:
                return
            file.flights.append((position, start))
        try:
            self._again(path, file, position, start)
        finally:
            self.fail(path, position, start)

    def _catch_up(self, path: str, file: _HashedFile) -> None:
        """Read again what came before it was its turn, if that is not much."""
        with file.turn:
            position = end = file.position
            for note in file.ahead:
                if note.start > end:
                    break
                end = max(end, note.stop)
            if file.due or end == position or end - position > _CATCH_UP:
                return
            file.flights.append((position, end))
        try:
            self._again(path, file, position, end)
        finally:
            self.fail(path, position, end)

    def _again(self, path: str, file: _HashedFile, start: int, stop: int) -> None:
        for offset, data in self._pieces(path, start, stop):
            self._take(path, file, offset, data, given=False)

    def _pieces(self, path: str, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        buffer = memoryview(bytearray(min(PIECE, stop - start)))
        for offset in range(start, stop, PIECE):
            data = buffer[: min(PIECE, stop - offset)]
            self._reread(path, offset, data)
            yield offset, data

    def _take(self, path: str, file: _HashedFile, start: int, data: memoryview, *, given: bool) -> None:
        """Hash what is new of a stretch, if the hash has come so far; note what is not, if it was `given` out."""
        stop = start + len(data)
        with _claim_hash(file, start, stop) as (position, seen):
            if position is None:
                known = stop
            else:
                known = min(max(position, start), stop)
                if known < stop:
                    file.state.update(data[known - start :])
            done = [note for note in seen if note.see(path, known, data[known - start :])] if known < stop else []
            with file.turn:
                if known < stop:
                    file.position = stop
                    file.ahead = [note for note in file.ahead if note not in done] if done else file.ahead
                    file.mark()
                    self._notes -= len(done)
                complete = known < stop == file.promise.size
                if complete:
                    _compare_hash(path, file)
        if given and known > start:
            self._note(file, start, data[: known - start])
        if complete and sum(high - low for low, high in _list_spans(file)) <= _CATCH_UP:
            self._recheck(path, file)

    def _note(self, file: _HashedFile, start: int, data: memoryview) -> None:
        note = _StretchNote(start, start + len(data), hashlib.sha256(data).digest())
        with file.turn:
            if self._notes >= _MOST_NOTES:
                file.forgotten = True
                return
            self._notes += 1
            if start >= file.frontier:
                insort(file.ahead, note, key=_BY_START)
            else:
                file.behind.append(note)

    def _recheck(self, path: str, file: _HashedFile) -> None:
        """See again the stretches that the hash had passed: hashed from a state before them to one behind them."""
        with file.turn:
            notes, file.behind = sorted(file.behind, key=_BY_START), []
            spans, marks = _list_spans(file, notes), dict(file.marks)
            marks[file.position] = file.state.copy()
        for low, high in spans:
            state = marks[low].copy()
            open_notes = [note for note in notes if low <= note.start < high]
            for offset, data in self._pieces(path, low, high):
                state.update(data)
                open_notes = [n for n in open_notes if n.start >= offset + len(data) or not n.see(path, offset, data)]
            if state.digest() != marks[high].digest():
                raise _build_change_error(path, low, high)
        with file.turn:
            self._notes -= len(notes)

    def prove(self, whole: Collection[str], stop: StopRequest) -> tuple[str, ...]:
        """Hash files of which all, or almost all, was read, and those of `whole`; what is missing is read (again).

        Returns those that could not be hashed. Raises ChangedError for a file that is not as promised.
        """
        wanted = [
            path
            for path, file in self._files.items()
            if file.begun and (path in whole or is_almost_all(file.read_bytes(), file.promise.size))
        ]
        open_files = [path for path in wanted if not self._files[path].proved]
        run_in_threads(iter(open_files), lambda: self._prove_file, min(_THREADS, len(open_files)), stop)
        return tuple(path for path in wanted if not self._files[path].proved)

    def _prove_file(self, path: str) -> None:
        file = self._files[path]
        if file.promise.digest and not file.forgotten:
            self._again(path, file, file.position, file.promise.size)
            self._recheck(path, file)

    def begun(self) -> Iterator[str]:
        """Yield the files of which anything was read."""
        return (path for path, file in self._files.items() if file.begun)

    def why_not(self, path: str) -> str:
        """Return why a file was not compared with its hash; empty if it was, and is as promised."""
        file = self._files[path]
        with file.turn:
            if file.proved:
                return ""
            if not file.promise.digest:
                return "the source states no hash for it"
            if file.forgotten:
                return "it was read in too many pieces out of order"
            read = file.read_bytes()
        if read < file.promise.size:
            return f"{read:,} of {file.promise.size:,} bytes were read"
        return "it was not read in order, and not again"


def _compute_grace(distance: int, size: int) -> float:
    """Compute seconds to wait for a thread that would fetch so many bytes before a stretch of this size."""
    if distance <= _GAP:
        return _LOOK if distance >= _TENSOR else 0.0
    return _GRACE if size >= PIECE and distance < _NEAR else 0.0


@contextmanager
def _claim_hash(file: _HashedFile, start: int, stop: int) -> Iterator[tuple[int | None, list[_StretchNote]]]:
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


def _build_change_error(path: str, start: int, stop: int) -> ChangedError:
    return ChangedError(f"{path}: bytes {start} to {stop - 1} were read twice, and are not the same", hint=_ON_THE_WAY)


def _compare_hash(path: str, file: _HashedFile) -> None:
    found, promised = file.state.hexdigest(), file.promise.digest
    if found != promised:
        raise ChangedError(
            f"{path} differs from its stated hash: its {file.state.name} is {found}, but {promised} is expected",
            hint=_ON_THE_WAY,
        )
    file.compared = True


def _list_spans(file: _HashedFile, notes: list[_StretchNote] | None = None) -> list[tuple[int, int]]:
    """List the stretches, from one known state of the hash to another, in which noted ones lie."""
    places = [*(position for position, _ in file.marks), file.position]
    spans: list[tuple[int, int]] = []
    for note in sorted(file.behind, key=_BY_START) if notes is None else notes:
        low = places[bisect_right(places, note.start) - 1]
        high = next(place for place in places if place >= note.stop)
        if spans and low < spans[-1][1]:
            spans[-1] = (spans[-1][0], max(high, spans[-1][1]))
        else:
            spans.append((low, high))
    return spans


def is_almost_all(part: int, size: int) -> bool:
    """Return whether so many bytes of a file are as good as all of it, so that the rest is read for its hash."""
    return (size - part) * _ALMOST <= size
