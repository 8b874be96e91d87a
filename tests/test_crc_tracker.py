"""Ranges are compared with their CRC-32s whatever the order, the stretches and the threads in which they are read."""

from __future__ import annotations

import random
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardctl.storage import crc_tracker
from shardctl.storage.crc_tracker import CrcRange, CrcReader, CrcTracker, StatedRanges, combine_crcs, find_damages

DATA = random.Random(0).randbytes(6_000)
PLACES = {"first": (3, 100), "long": (110, 2_000), "byte": (2_300, 1), "none": (2_301, 0), "last": (2_400, 3_600)}


def stated(data: bytes = DATA, **crcs: int) -> StatedRanges:
    ranges = [CrcRange(n, o, s, crcs.get(n, zlib.crc32(data[o : o + s]))) for n, (o, s) in PLACES.items()]
    return StatedRanges({"f": ranges})


def read(tracker: CrcTracker, offset: int, size: int) -> None:
    tracker.add("f", offset, memoryview(DATA)[offset : offset + size])


stretches = st.tuples(st.integers(0, len(DATA) - 1), st.integers(1, 3_000)).map(
    lambda s: (s[0], min(s[1], len(DATA) - s[0]))
)


@given(st.binary(max_size=300), st.binary(max_size=3_000))
def test_two_crcs_are_joined_as_their_bytes_would_be(first, second):
    assert combine_crcs(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@given(st.lists(stretches, max_size=40), st.randoms(use_true_random=False))
@settings(max_examples=50)
def test_what_was_read_whole_is_known_to_be_intact(some, randoms):
    jobs = [*some, *((at, 100) for at in range(0, len(DATA), 100))]
    randoms.shuffle(jobs)
    tracker = CrcTracker(stated())
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda job: read(tracker, *job), jobs))
    assert (tracker.intact, tracker.damages, list(tracker.unread("f"))) == (4, [], [])


@given(st.lists(stretches, max_size=20))
def test_what_was_not_read_is_known_to_the_byte(some):
    tracker = CrcTracker(stated())
    for job in some:
        read(tracker, *job)
    seen = {at for offset, size in some for at in range(offset, offset + size)}
    wanted = {at for offset, size in PLACES.values() for at in range(offset, offset + size)}
    unread = [at for offset, size in tracker.unread("f") for at in range(offset, offset + size)]
    assert sorted(unread) == sorted(wanted - seen)
    for offset, size in list(tracker.unread("f")):
        read(tracker, offset, size)
    assert tracker.intact == 4


@pytest.mark.parametrize("bit", range(0, 16_000, 611))
def test_any_flipped_bit_is_damage_of_its_range(bit):
    offset, size = PLACES["long"]
    written = bytearray(DATA)
    written[offset + bit // 8] ^= 1 << bit % 8
    told = []
    tracker = CrcTracker(stated(bytes(written)), told.append)
    for at in (offset + 900, offset, offset + 1_000):
        assert not told
        read(tracker, at, min(1_000, offset + size - at))
    assert [(damage.file, damage.stated.name) for damage in told] == [("f", "long")]
    assert tracker.damages == told


def test_nothing_is_said_of_a_range_that_has_no_crc_or_was_read_in_part():
    tracker = CrcTracker(stated(first=0, last=1))
    read(tracker, 0, 2_000)
    read(tracker, 2_400, 3_599)
    assert (tracker.intact, tracker.damages, tracker.unstated) == (0, [], {"f": 1})
    read(tracker, 5_999, 1)
    assert [damage.stated.name for damage in tracker.damages] == ["last"]


def test_pieces_of_an_earlier_run_count_as_read():
    first, second = CrcTracker(stated(long=1)), CrcTracker(stated(long=1))
    reader = CrcReader(
        lambda _, offset, into: into.__setitem__(slice(None), DATA[offset:][: len(into)]), first, keep=True
    )
    reader.read_at("f", 0, memoryview(bytearray(1_000)))
    pieces = reader.take_pieces()
    assert [(piece.offset, piece.size) for piece in pieces] == [(3, 100), (110, 890)]
    assert reader.take_pieces() == ()
    second.add_pieces(pieces)
    second.add_pieces(pieces)
    assert second.intact == 1
    read(second, 1_000, 1_110)
    assert [damage.stated.name for damage in second.damages] == ["long"]


def test_what_several_readers_read_is_put_together():
    readers = [CrcTracker(stated(long=1)) for _ in range(2)]
    read(readers[0], 0, 1_000)
    read(readers[1], 1_000, 1_400)
    shares = [share for reader in readers for share in reader.shares()]
    assert [(s.file, s.stated.name, [(p.offset, p.size) for p in s.pieces]) for s in shares] == [
        ("f", "long", [(110, 890)]),
        ("f", "long", [(1_000, 1_110)]),
    ]
    assert [(damage.file, damage.stated.name) for damage in find_damages(shares)] == [("f", "long")]
    assert find_damages(shares[:1]) == []


def test_a_range_that_is_read_in_too_many_places_is_given_up(monkeypatch):
    monkeypatch.setattr(crc_tracker, "_MOST_STRETCHES", 5)
    tracker = CrcTracker(stated(long=1))
    for at in range(110, 2_110, 2):
        read(tracker, at, 1)
    for at in range(111, 2_110, 2):
        read(tracker, at, 1)
    assert (tracker.intact, tracker.damages) == (0, [])
