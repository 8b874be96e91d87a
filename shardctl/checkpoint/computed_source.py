"""Reads tensors that are worked out of others, through files that do not exist and are computed when read."""

from __future__ import annotations

import threading
from functools import cached_property
from typing import TYPE_CHECKING, Final, Protocol

from shardctl.base.value import value_class
from shardctl.storage import FileProofs
from shardctl.storage.crc_tracker import CrcReader
from shardctl.tensors.bands import BandBuffer

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from shardctl.base.workers import StopRequest
    from shardctl.storage import FileStat, Source, Span
    from shardctl.storage.crc_tracker import CrcPiece, CrcRecorder
    from shardctl.tensors.bands import ByteReader

_READ_BUFFER_BYTES: Final = 1 << 20
"""Bytes that gapped reads of a tensor's arrays are gathered in."""


class ComputedArray(Protocol):
    """An array whose elements follow from what is stored."""

    @property
    def name(self) -> str:
        """What messages call it."""

    def read_values(self, reader: ByteReader, buffer: BandBuffer, offset: int, into: memoryview) -> int:
        """Fill `into` with the bytes from `offset`; returns how many finite values became infinite."""


class ComputedSource:
    """A source with one more file for each array that is worked out, and the files of other sources it takes."""

    def __init__(
        self,
        source: Source,
        arrays: Mapping[str, ComputedArray],
        *,
        thread_bytes: int,
        note: str,
        others: Mapping[str, tuple[Source, str]] | None = None,
    ) -> None:
        """`arrays` are what is computed, by the path of its file, with the bytes that all threads need for that.

        `others` are files of other sources: by the path that this source has for it, the source and its own path.
        `note` says what was done; it is empty for a source below another one that says it.
        """
        self._source, self._arrays, self._thread_bytes, self._note = source, arrays, thread_bytes, note
        self._others = others or {}
        self.parts = (source, *{id(other): other for other, _ in self._others.values()}.values())
        """All sources that are read, the first of which gives this one its name."""
        self._local = threading.local()
        self._lock = threading.Lock()
        self._overflowed: dict[str, int] = {}
        self._tracker: CrcRecorder | None = None

    @property
    def name(self) -> str:
        """The location as a person writes it."""
        return self._source.name

    @property
    def location(self) -> str:
        """The same for a later run."""
        return self._source.location

    @property
    def folder(self) -> Path | None:
        """The local directory of the files."""
        return self._source.folder

    @property
    def held_bytes(self) -> int:
        """What the sources themselves hold, and what their threads compute in."""
        return self._thread_bytes + sum(part.held_bytes for part in self.parts)

    def files(self) -> Mapping[str, FileStat]:
        """Return the files that exist."""
        others = {path: other.files()[own] for path, (other, own) in self._others.items() if own in other.files()}
        return {**self._source.files(), **others} if others else self._source.files()

    def notes(self) -> tuple[str, ...]:
        """Return what came out about the files, and which tensors have values that the wanted type does not hold."""
        overflowed = tuple(
            f"{name}: {count:,} finite values became infinite" for name, count in sorted(self._overflowed.items())
        )
        notes = (note for part in self.parts for note in part.notes())
        return (*notes, *((self._note,) if self._note else ()), *overflowed)

    @cached_property
    def promised(self) -> Collection[str]:
        """The files that are compared with a hash while they are read."""
        others = {path for path, (other, own) in self._others.items() if own in other.promised}
        return {*self._source.promised, *others} if others else self._source.promised

    def proofs(self) -> FileProofs:
        """Return which files were compared with their hashes."""
        verified, unverified = dict[str, None](), dict[str, str]()
        for part in self.parts:
            found, paths = part.proofs(), self._map_paths(part)
            verified.update((paths.get(path, path), None) for path in found.verified)
            unverified.update((paths.get(path, path), why) for path, why in found.unverified.items())
        return FileProofs(tuple(verified), unverified)

    def prove(
        self, whole: Collection[str] = (), *, earlier: Collection[str] = (), allow_unverified: bool = False
    ) -> None:
        """Compare files with their hashes, each where it is."""
        for part in self.parts:
            mine, before = (
                [own for path in each for other, own in (self._find_file(path),) if other is part]
                for each in (whole, earlier)
            )
            part.prove(mine, earlier=before, allow_unverified=allow_unverified)

    def cautions(self) -> tuple[str, ...]:
        """Return what may go wrong with reading these files."""
        return tuple(caution for part in self.parts for caution in part.cautions())

    def stat_file(self, path: str) -> FileStat | None:
        """Return the file's state now."""
        other, own = self._find_file(path)
        return other.stat_file(own)

    def beside(self, name: str) -> bytes | None:
        """Return the content of a small file beside a source that is one file."""
        return self._source.beside(name)

    def expect(self, spans: Iterable[Span]) -> None:
        """Pass on what will be read next of files that exist."""
        stored = [(self._find_file(path), start, size) for path, start, size in spans if path not in self._arrays]
        for part in self.parts:
            part.expect([(own, start, size) for (other, own), start, size in stored if other is part])

    def set_headers_only(self) -> None:
        """Tell every part that only headers will be read."""
        for part in self.parts:
            part.set_headers_only()

    def set_stop_request(self, stop: StopRequest) -> None:
        """Raise Interrupted instead of waiting once `stop` is set."""
        for part in self.parts:
            part.set_stop_request(stop)

    def track_reads(self, tracker: CrcRecorder) -> None:
        """Tell `tracker` of all that is read of the arrays from now on."""
        self._tracker = tracker
        for part in self.parts:
            if isinstance(part, ComputedSource):
                part.track_reads(tracker if part is self._source else _RelocatedTracker(tracker, self._map_paths(part)))

    def take_overflow(self) -> int:
        """Return how many finite values became infinite in what this thread has computed since the last call."""
        found: int = getattr(self._local, "overflowed", 0)
        self._local.overflowed = 0
        return found + sum(part.take_overflow() for part in self.parts if isinstance(part, ComputedSource))

    def list_overflows(self) -> dict[str, int]:
        """List the tensors of which computed values did not fit their type, each with how many became infinite."""
        found: dict[str, int] = {}
        for part in self.parts:
            found |= part.list_overflows() if isinstance(part, ComputedSource) else {}
        return {**found, **self._overflowed}

    def read_at(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` from a file that exists, or with values of an array."""
        array = self._arrays.get(path)
        if array is None:
            other, own = self._find_file(path)
            other.read_at(own, offset, into)
            return
        if not hasattr(self._local, "buffer"):
            self._local.buffer = BandBuffer(_READ_BUFFER_BYTES)
        reader = CrcReader(self.read_at, self._tracker) if self._tracker is not None else self
        overflowed = array.read_values(reader, self._local.buffer, offset, into)
        if overflowed:
            self._local.overflowed = getattr(self._local, "overflowed", 0) + overflowed
            with self._lock:
                self._overflowed[array.name] = self._overflowed.get(array.name, 0) + overflowed

    def close(self) -> None:
        """Release what the source holds."""
        self._source.close()

    def _find_file(self, path: str) -> tuple[Source, str]:
        """Find the source that has a file, and the file's path there."""
        return self._others.get(path, (self._source, path))

    def _map_paths(self, part: Source) -> Mapping[str, str]:
        """Map the paths that files have in one of the other sources to those that they have here."""
        return {own: path for path, (other, own) in self._others.items() if other is part}


@value_class
class _RelocatedTracker:
    """Tells a tracker of what is read of another source, by the paths that its files have in this one."""

    tracker: CrcRecorder
    paths: Mapping[str, str]

    def add(self, path: str, offset: int, data: memoryview) -> Sequence[CrcPiece]:
        """Take note of what was read."""
        return self.tracker.add(self.paths.get(path, path), offset, data)
