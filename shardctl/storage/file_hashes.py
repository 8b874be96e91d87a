"""Compares files that threads read a stretch at a time, in any order, with the hashes that were promised of them.

A hash needs the bytes in order. A stretch that comes when it is its turn is hashed from the reader's own buffer; a
reader that is early waits while another thread is fetching what comes before. A stretch that nobody waits for, and one
that is read again, is noted by its SHA-256: the same bytes must be seen when the file is hashed, for which they are
read again, at once if they are few and otherwise by `prove`. So every byte that was given out is one that was hashed.
"""

from __future__ import annotations

import hashlib
import time
from bisect import insort
from typing import TYPE_CHECKING, Final

from shardctl.base.workers import StopRequest, run_in_threads
from shardctl.storage.hashed_file import (
    BY_START,
    HashedFile,
    PromisedHash,
    RangeNote,
    build_change_error,
    claim_hash,
    compare_hash,
    list_spans,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    Reread = Callable[[str, int, memoryview], None]
    """Fills memory from an offset of a file; raises as any read does."""


PIECE: Final = 1 << 20
"""Bytes read again at once, by each of `_MAX_REREAD_THREADS`.

Larger pieces are fewer requests, and more memory in addition to the plan's.
"""
_MAX_REREAD_THREADS: Final = 8
"""Files that are read again at the same time; most of the time is spent waiting."""
REREAD_BYTES: Final = _MAX_REREAD_THREADS * PIECE
"""Memory that reading again takes."""
_GRACE_PERIOD_SECONDS: Final = 1.0
"""Seconds for the thread that has taken up the stretch before to begin fetching it: waiting costs time once, and not
waiting costs fetching the stretch again."""
_MAX_FETCH_DISTANCE_BYTES: Final = 256 << 20
"""Bytes between a stretch and the one that is due, beyond which no thread is about to fetch that."""
_MAX_GAP_BYTES: Final = 64 << 10
"""Bytes that no tensor has, such as the header of a record in an archive: as many are read only to be hashed."""
_MIN_TENSOR_GAP_BYTES: Final = 4 << 10
"""Bytes of a gap that may be a tensor's, so that another thread may be about to fetch it."""
_POLL_INTERVAL_SECONDS: Final = 0.05
"""Seconds between two looks at whether a thread that waits does so in vain; and for another to begin with a small gap.
"""
_CATCH_UP: Final = 64 << 20
"""Bytes that are read again at once, so that what follows can be hashed as it comes: as much as the threads have on
their way together. Of what is more, `prove` reads the rest of the file again."""
_MOST_NOTES: Final = 1 << 16
"""Stretches noted at once, of all files: about 16 MB, and what 64 GB have in pieces of 1 MiB that come backwards."""
_UNREAD_FRACTION_DIVISOR: Final = 8
"""A file of which all but one byte in so many was read, or less, is read whole, so that it can be hashed."""


class FileHashes:
    """Hashes files while threads read them; shared by threads."""

    def __init__(self, promised: Mapping[str, PromisedHash], reread: Reread) -> None:
        """`promised` is what the hash of each file should be, `reread` reads stretches without telling this object."""
        self._files = {path: HashedFile(promise, promise.state.copy()) for path, promise in promised.items()}
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

    def _wait(self, file: HashedFile, start: int, stop: int) -> None:
        """Return when it is the turn of this stretch, or when nobody is about to bring what comes before."""
        with file.turn:
            seen, since = file.position, time.monotonic()
            while file.position < start:
                if seen != file.position:
                    seen, since = file.position, time.monotonic()
                if not file.due and time.monotonic() - since >= _compute_grace(start - seen, stop - start):
                    return
                file.turn.wait(_POLL_INTERVAL_SECONDS)

    def _close_gap(self, path: str, file: HashedFile, start: int) -> None:
        """Read the few bytes before a stretch that nobody else will."""
        with file.turn:
            position = file.position
            if file.due or not 0 < start - position <= _MAX_GAP_BYTES:
                return
            file.flights.append((position, start))
        try:
            self._rehash_range(path, file, position, start)
        finally:
            self.fail(path, position, start)

    def _catch_up(self, path: str, file: HashedFile) -> None:
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
            self._rehash_range(path, file, position, end)
        finally:
            self.fail(path, position, end)

    def _rehash_range(self, path: str, file: HashedFile, start: int, stop: int) -> None:
        for offset, data in self._read_pieces(path, start, stop):
            self._take(path, file, offset, data, given=False)

    def _read_pieces(self, path: str, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        buffer = memoryview(bytearray(min(PIECE, stop - start)))
        for offset in range(start, stop, PIECE):
            data = buffer[: min(PIECE, stop - offset)]
            self._reread(path, offset, data)
            yield offset, data

    def _take(self, path: str, file: HashedFile, start: int, data: memoryview, *, given: bool) -> None:
        """Hash what is new of a stretch, if the hash has come so far; note what is not, if it was `given` out."""
        stop = start + len(data)
        with claim_hash(file, start, stop) as (position, seen):
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
                    compare_hash(path, file)
        if given and known > start:
            self._note(file, start, data[: known - start])
        if complete and sum(high - low for low, high in list_spans(file)) <= _CATCH_UP:
            self._recheck_ranges(path, file)

    def _note(self, file: HashedFile, start: int, data: memoryview) -> None:
        note = RangeNote(start, start + len(data), hashlib.sha256(data).digest())
        with file.turn:
            if self._notes >= _MOST_NOTES:
                file.forgotten = True
                return
            self._notes += 1
            if start >= file.frontier:
                insort(file.ahead, note, key=BY_START)
            else:
                file.behind.append(note)

    def _recheck_ranges(self, path: str, file: HashedFile) -> None:
        """See again the stretches that the hash had passed: hashed from a state before them to one behind them."""
        with file.turn:
            notes, file.behind = sorted(file.behind, key=BY_START), []
            spans, marks = list_spans(file, notes), dict(file.marks)
            marks[file.position] = file.state.copy()
        for low, high in spans:
            state = marks[low].copy()
            open_notes = [note for note in notes if low <= note.start < high]
            for offset, data in self._read_pieces(path, low, high):
                state.update(data)
                open_notes = [n for n in open_notes if n.start >= offset + len(data) or not n.see(path, offset, data)]
            if state.digest() != marks[high].digest():
                raise build_change_error(path, low, high)
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
        run_in_threads(iter(open_files), lambda: self.prove_file, min(_MAX_REREAD_THREADS, len(open_files)), stop)
        return tuple(path for path in wanted if not self._files[path].proved)

    def find_digest(self, path: str) -> str:
        """Return the hash of a file in hexadecimal; empty before all of it was hashed."""
        file = self._files[path]
        with file.turn:
            return file.state.hexdigest() if file.position == file.promise.size else ""

    def prove_file(self, path: str) -> None:
        """Hash what is missing of a file, by reading it (again); raises ChangedError if it is not as promised."""
        file = self._files[path]
        if file.promise.digest and not file.forgotten:
            self._rehash_range(path, file, file.position, file.promise.size)
            self._recheck_ranges(path, file)

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
        return "it was read out of order, and not read again"


def _compute_grace(distance: int, size: int) -> float:
    """Compute seconds to wait for a thread that would fetch so many bytes before a stretch of this size."""
    if distance <= _MAX_GAP_BYTES:
        return _POLL_INTERVAL_SECONDS if distance >= _MIN_TENSOR_GAP_BYTES else 0.0
    return _GRACE_PERIOD_SECONDS if size >= PIECE and distance < _MAX_FETCH_DISTANCE_BYTES else 0.0


def is_almost_all(part: int, size: int) -> bool:
    """Return whether so many bytes of a file are as good as all of it, so that the rest is read for its hash."""
    return (size - part) * _UNREAD_FRACTION_DIVISOR <= size
