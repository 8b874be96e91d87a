"""Compares what is read of a file with the CRC-32s that its container states, in whatever order it is read.

>>> import zlib
>>> stated = CrcRange("record", 0, 6, zlib.crc32(b"abcdef"))
>>> tracker = CrcTracker(StatedRanges({"file": [stated]}))
>>> reader = CrcReader(lambda path, offset, into: None, tracker)  # which leaves what it should fill as it is
>>> reader.read_at("file", 3, memoryview(bytearray(b"deX")))
>>> reader.read_at("file", 0, memoryview(bytearray(b"abc")))
>>> [damage.stated.name for damage in tracker.damages]
['record']
"""

from __future__ import annotations

import threading
import zlib
from bisect import bisect_right
from dataclasses import field
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from shardctl.base.value import state_class, value_class

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

_CRC32_POLYNOMIAL: Final = 0xEDB88320
"""Of CRC-32, its lowest coefficient first (IEEE 802.3)."""
_UNIT_POLYNOMIAL: Final = 1 << 31
"""The polynomial 1 in that order."""
MOST_PIECES: Final = 16
"""Pieces of one band that a later run is told of: a band is part of a record, or a few small ones. Each takes a line of
about 100 bytes; without them a range that two runs read is not compared."""
_MOST_STRETCHES: Final = 10_000
"""Stretches of one range that are known before they meet. A range that is read in more of them, as columns of a
permuted matrix are, is given up: each takes about 200 bytes, and up to 10 microseconds."""


class CrcRange(NamedTuple):
    """A stretch of a file with the CRC-32 that its bytes should have."""

    name: str
    """What the container calls it."""
    offset: int
    """Absolute, in bytes."""
    size: int
    """Bytes."""
    crc: int
    """0 where the writer did not compute one."""


class CrcLists(Protocol):
    """What containers state of their files; may read a container's directory when it is asked."""

    def containers(self, path: str) -> Sequence[tuple[int, int]]:
        """Return offset and size of each container in a file, in order and disjoint; none in most files."""

    def ranges(self, path: str, offset: int, size: int) -> Sequence[CrcRange]:
        """Return the ranges of one of them, disjoint and in the order of their offsets."""


class CrcRecorder(Protocol):
    """What takes account of bytes that were read."""

    def add(self, path: str, offset: int, data: memoryview) -> Sequence[CrcPiece]:
        """Take account of bytes that were read; returns what of them was new."""


@value_class
class StatedRanges:
    """Ranges that are known already, each a container of its own."""

    stated: Mapping[str, Sequence[CrcRange]]
    """By file."""

    def containers(self, path: str) -> Sequence[tuple[int, int]]:
        """Return where they are."""
        return [(each.offset, each.size) for each in self.stated.get(path, ())]

    def ranges(self, path: str, offset: int, size: int) -> Sequence[CrcRange]:
        """Return the one at `offset`."""
        return [each for each in self.stated[path] if (each.offset, each.size) == (offset, size)]


class CrcPiece(NamedTuple):
    """A stretch of a file that was read, with the CRC-32 that it had."""

    file: str
    offset: int
    """Absolute, in bytes."""
    size: int
    """Bytes."""
    crc: int


class CrcShare(NamedTuple):
    """What one of several readers read of a range, for whoever has what the others read."""

    file: str
    stated: CrcRange
    pieces: tuple[CrcPiece, ...]


@value_class
class CrcDamage:
    """A range whose bytes are not those that were written."""

    file: str
    stated: CrcRange
    found: int
    """The CRC-32 that it has."""


@state_class
class _TrackedContainer:
    """The ranges of a container, and what is known of each."""

    ranges: Sequence[CrcRange]
    starts: Sequence[int]
    stretches: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    """Start, stop and CRC-32 of what was read, in order and not touching each other, of ranges that are not over."""
    over: set[int] = field(default_factory=set)
    """Ranges that were read whole, or that nothing is stated of, or that are given up."""


@state_class
class _TrackedFile:
    spans: Sequence[tuple[int, int]]
    starts: list[int]
    containers: dict[int, _TrackedContainer | None] = field(default_factory=dict)
    """By position among the spans, of those that something was read of; None once all of its ranges are over."""


_Place = tuple[_TrackedContainer, int, CrcRange]
"""A range, and where what is known of it is kept."""


class CrcTracker:
    """What was read of the containers of a checkpoint; shared by threads.

    No byte is kept: the CRC-32 of two neighbours follows from theirs (`combine_crcs`), so the order does not matter.
    """

    def __init__(self, lists: CrcLists, on_damage: Callable[[CrcDamage], None] | None = None) -> None:
        """`on_damage` is called with a range as soon as it is known to be damaged, and may raise."""
        self._lists = lists
        self._on_damage = on_damage
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._files: dict[str, _TrackedFile] = {}
        self.damages: list[CrcDamage] = []
        """Ranges that were read whole and are not what was written."""
        self.intact = 0
        """How many ranges were read whole and have the CRC-32 that is stated of them."""
        self.unstated: dict[str, int] = {}
        """How many ranges of each file have no CRC-32 to compare with."""

    def add(self, path: str, offset: int, data: memoryview) -> list[CrcPiece]:
        """Take account of bytes that were read; returns what of them was new."""
        new = []
        for place in list(self._find_touched_ranges(path, offset, offset + len(data))):
            span = place[2]
            start, stop = max(span.offset, offset), min(span.offset + span.size, offset + len(data))
            while gaps := self._find_unread_ranges(
                place, start, stop
            ):  # again if another thread read some of one meanwhile
                for first, last in gaps:
                    piece = CrcPiece(path, first, last - first, zlib.crc32(data[first - offset : last - offset]))
                    if self._insert(place, piece):
                        new.append(piece)
        return new

    def add_pieces(self, pieces: Iterable[CrcPiece]) -> None:
        """Take account of what an earlier run read; a piece of which some is known is left out."""
        for piece in pieces:
            for place in list(self._find_touched_ranges(piece.file, piece.offset, piece.offset + piece.size)):
                span = place[2]
                if span.offset <= piece.offset and piece.offset + piece.size <= span.offset + span.size:
                    self._insert(place, piece)

    def heeds(self, path: str) -> bool:
        """Return whether a file may have ranges of which a CRC-32 is stated."""
        return bool(self._get_tracked_file(path).spans)

    def shares(self) -> Iterator[CrcShare]:
        """Yield the ranges that were read in part, but for those that were read in too many places to keep."""
        for path, file in self._files.items():
            for container in filter(None, file.containers.values()):
                for position, known in container.stretches.items():
                    pieces = tuple(CrcPiece(path, start, stop - start, crc) for start, stop, crc in known)
                    if len(pieces) <= MOST_PIECES:
                        yield CrcShare(path, container.ranges[position], pieces)

    def unread(self, path: str) -> Iterator[tuple[int, int]]:
        """Yield offset and size of the stretches of a file that lie in ranges and are not known."""
        for offset, size in self._get_tracked_file(path).spans:
            for place in list(self._find_touched_ranges(path, offset, offset + size)):
                span = place[2]
                for start, stop in self._find_unread_ranges(place, span.offset, span.offset + span.size):
                    yield start, stop - start

    # Which ranges

    def _get_tracked_file(self, path: str) -> _TrackedFile:
        found = self._files.get(path)
        if found is None:
            with self._loading:
                spans = self._lists.containers(path)
                found = self._files.setdefault(path, _TrackedFile(spans, [offset for offset, _ in spans]))
        return found

    def _find_touched_ranges(self, path: str, start: int, stop: int) -> Iterator[_Place]:
        """Yield the ranges that are not over and hold some of a stretch."""
        file = self._get_tracked_file(path)
        for number in range(max(bisect_right(file.starts, start) - 1, 0), len(file.spans)):
            offset, size = file.spans[number]
            if offset >= stop:
                break
            if offset + size <= start:
                continue
            if number not in file.containers:
                self._load(path, file, number)
            container = file.containers[number]
            if container is not None:
                yield from _list_touched_ranges(container, start, stop)
                if len(container.over) == len(container.ranges):
                    file.containers[number] = None

    def _load(self, path: str, file: _TrackedFile, number: int) -> None:
        ranges = [each for each in self._lists.ranges(path, *file.spans[number]) if each.size]
        container = _TrackedContainer(ranges, [each.offset for each in ranges])
        container.over.update(position for position, each in enumerate(ranges) if not each.crc)
        with self._lock:
            if number not in file.containers:
                file.containers[number] = container
                if container.over:
                    self.unstated[path] = self.unstated.get(path, 0) + len(container.over)

    # What is known of one

    def _find_unread_ranges(self, place: _Place, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the parts of a stretch that were not read yet."""
        container, position, _ = place
        gaps, at = [], start
        with self._lock:
            if position in container.over:
                return []
            known = container.stretches.get(position, [])
            for first, last, _ in known[max(bisect_right(known, (start,)) - 1, 0) :]:
                if first >= stop:
                    break
                if first > at:
                    gaps.append((at, first))
                at = max(at, last)
        return [*gaps, (at, stop)] if at < stop else gaps

    def _insert(self, place: _Place, piece: CrcPiece) -> bool:
        """Add a stretch to a range, unless some of it is known."""
        container, position, span = place
        new = piece.offset, piece.offset + piece.size, piece.crc
        with self._lock:
            known = container.stretches.setdefault(position, [])
            at = bisect_right(known, new)
            before, after = known[max(at - 1, 0) : at], known[at : at + 1]
            if position in container.over or any(e[1] > new[0] for e in before) or any(e[0] < new[1] for e in after):
                return False
            left, right = [e for e in before if e[1] == new[0]], [e for e in after if e[0] == new[1]]
            for other in left:
                new = _join_stretches(other, new)
            for other in right:
                new = _join_stretches(new, other)
            known[at - len(left) : at + len(right)] = [new]
            whole = new[:2] == (span.offset, span.offset + span.size)
            if whole or len(known) > _MOST_STRETCHES:
                del container.stretches[position]
                container.over.add(position)
            damage = CrcDamage(piece.file, span, new[2]) if whole and new[2] != span.crc else None
            self.intact += whole and damage is None
        if damage is not None:
            self.damages.append(damage)
            if self._on_damage is not None:
                self._on_damage(damage)
        return True


def find_damages(shares: Iterable[CrcShare]) -> list[CrcDamage]:
    """Find the damaged ranges among those that several readers read together."""
    pieces: dict[str, dict[CrcRange, list[CrcPiece]]] = {}
    for share in shares:
        pieces.setdefault(share.file, {}).setdefault(share.stated, []).extend(share.pieces)
    tracker = CrcTracker(StatedRanges({file: sorted(ranges, key=_get_offset) for file, ranges in pieces.items()}))
    for ranges in pieces.values():
        for read in ranges.values():
            tracker.add_pieces(read)
    return tracker.damages


def _get_offset(stated: CrcRange) -> int:
    return stated.offset


class CrcReader:
    """Reads from a source, and tells a tracker of what it reads."""

    def __init__(
        self, read_at: Callable[[str, int, memoryview], None], tracker: CrcRecorder, *, keep: bool = False
    ) -> None:
        """`keep` is for one thread that will take the pieces."""
        self._read_at = read_at
        self._keep = keep
        self._tracker = tracker
        self._pieces: list[CrcPiece] = []

    def read_at(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` from `offset`."""
        self._read_at(path, offset, into)
        pieces = self._tracker.add(path, offset, into)
        if self._keep:
            self._pieces += pieces

    def take_pieces(self) -> tuple[CrcPiece, ...]:
        """Return what was read since the last call and had not been read before.

        Nothing if it is too much to be kept.
        """
        taken = tuple(self._pieces) if len(self._pieces) <= MOST_PIECES else ()
        self._pieces.clear()
        return taken


def _list_touched_ranges(container: _TrackedContainer, start: int, stop: int) -> Iterator[_Place]:
    for position in range(max(bisect_right(container.starts, start) - 1, 0), len(container.ranges)):
        span = container.ranges[position]
        if span.offset >= stop:
            break
        if span.offset + span.size > start and position not in container.over:
            yield container, position, span


def _join_stretches(left: tuple[int, int, int], right: tuple[int, int, int]) -> tuple[int, int, int]:
    return left[0], right[1], combine_crcs(left[2], right[2], right[1] - right[0])


def combine_crcs(first: int, second: int, size: int) -> int:
    """Return the CRC-32 of two stretches one after the other, the second of `size` bytes, from their own.

    As `crc32_combine` of zlib (crc32.c), which Python's module lacks.

    >>> combine_crcs(zlib.crc32(b"bands "), zlib.crc32(b"in order"), 8) == zlib.crc32(b"bands in order")
    True
    """
    return _multiply_polynomials(_compute_power(size), first) ^ second


@lru_cache(maxsize=1 << 12)  # bands and records have few sizes
def _compute_power(size: int) -> int:
    """Compute the power of x with the exponent 8 * `size`, modulo the polynomial."""
    power, bit = _UNIT_POLYNOMIAL, 3
    while size:
        if size & 1:
            power = _multiply_polynomials(_square_repeatedly(bit), power)
        size >>= 1
        bit += 1
    return power


@lru_cache(maxsize=64)
def _square_repeatedly(times: int) -> int:
    """Return the polynomial x, squared so many times."""
    return (
        _multiply_polynomials(_square_repeatedly(times - 1), _square_repeatedly(times - 1))
        if times
        else _UNIT_POLYNOMIAL >> 1
    )


def _multiply_polynomials(one: int, other: int) -> int:
    """Return the product of two polynomials, modulo that of CRC-32."""
    product, bit = 0, _UNIT_POLYNOMIAL
    while one:
        if one & bit:
            product ^= other
            one ^= bit
        other = other >> 1 ^ _CRC32_POLYNOMIAL if other & 1 else other >> 1
        bit >>= 1
    return product
