"""Small reads are merged, in bounded memory, whatever the threads do."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardctl.storage import read_ahead as windows
from shardctl.storage.read_ahead import GLANCE, KEPT, STRIDE, ReadAheadCache

FILE = bytes(range(256)) * (40 << 10)


class Fetched:
    """Windows over a file of 10 MiB, and what they fetched of it."""

    def __init__(self, content=FILE, wait=0.0):
        self.content, self.spans, self.errors, self.delay = content, [], [], wait
        self.windows = ReadAheadCache(self.fetch, lambda _: len(content))

    def fetch(self, path, offset, into):
        self.spans.append((path, offset, len(into)))
        time.sleep(self.delay)
        if self.errors:
            raise self.errors.pop()
        assert offset + len(into) <= len(self.content)
        into[:] = self.content[offset : offset + len(into)]

    def read(self, offset, size, path="a"):
        into = bytearray(size)
        self.windows.read(path, offset, memoryview(into))
        assert into == self.content[offset : offset + size]


def test_a_small_read_fetches_64_kib_and_reading_on_a_megabyte():
    file = Fetched()
    for offset in range(0, 2 * GLANCE, 1000):
        file.read(offset, 1000)
    assert file.spans == [("a", 0, GLANCE), ("a", GLANCE, STRIDE)]


def test_a_large_read_is_fetched_as_it_is():
    file = Fetched()
    file.read(5, 4 << 20)
    assert file.spans == [("a", 5, 4 << 20)]


def test_a_large_read_goes_on_after_what_is_there():
    file = Fetched()
    file.read(0, 10)
    file.read(100, 4 << 20)
    assert file.spans == [("a", 0, GLANCE), ("a", GLANCE, (4 << 20) + 100 - GLANCE)]


def test_a_scale_between_two_weights_costs_one_request_and_no_byte_twice():
    """As quantized checkpoints alternate."""
    file = Fetched()
    for start in range(0, 8 << 20, (2 << 20) + 4096):
        file.read(start, 2 << 20)
        file.read(start + (2 << 20), 4096)
    assert sum(size for _, _, size in file.spans) <= (8 << 20) + (4 << 20)
    ends = [offset + size for _, offset, size in file.spans]
    assert all(offset == end for (_, offset, _), end in zip(file.spans[1:], ends, strict=False))


def test_the_end_of_a_file_is_the_end_of_a_window():
    """An archive is read backwards from there: its end record, its directory."""
    file = Fetched()
    file.read(len(FILE) - 22, 22)
    file.read(len(FILE) - 1000, 978)
    file.read(len(FILE) - GLANCE, 10)
    assert file.spans == [("a", len(FILE) - GLANCE, GLANCE)]


def test_reading_on_to_the_end_reads_nothing_again():
    file = Fetched()
    for offset in range(0, len(FILE), 50_000):
        file.read(offset, min(50_000, len(FILE) - offset))
    assert sum(size for _, _, size in file.spans) == len(FILE)


def test_neighbours_are_expected_together():
    file = Fetched()
    file.windows.expect([("a", 0, 30), ("a", 1000, 30), ("a", 1000 + GLANCE, 30), ("a", 9 * GLANCE, 30), ("b", 0, 30)])
    assert sorted(file.spans) == [("a", 0, 1030 + GLANCE), ("a", 9 * GLANCE, 30), ("b", 0, 30)]


def test_what_was_expected_is_not_fetched_again():
    file = Fetched()
    file.windows.expect([("a", 0, 3000), ("b", 0, 3000), ("b", 100, 10)])
    file.read(8, 2000, "a")
    file.read(0, 3000, "b")
    assert sorted(file.spans) == [("a", 0, 3000), ("b", 0, 3000)]


def test_no_more_is_expected_than_can_be_held():
    file = Fetched()
    file.windows.expect([(str(number), 0, 4 << 20) for number in range(9)])
    assert len(file.spans) == KEPT // (4 << 20)


def test_an_error_of_what_is_expected_is_raised_and_the_rest_can_still_be_read():
    file = Fetched()
    file.errors = [OSError("gone")]
    with pytest.raises(OSError, match="gone"):
        file.windows.expect([(str(number), 0, 100) for number in range(20)])
    for number in range(20):
        file.read(0, 100, str(number))


def test_the_oldest_windows_go(monkeypatch):
    monkeypatch.setattr(windows, "KEPT", 4 * GLANCE)
    file = Fetched()
    for number in range(6):
        file.read(0, 10, str(number))
    file.read(0, 10, "5")
    assert len(file.spans) == 6
    file.read(0, 10, "0")
    assert len(file.spans) == 7


def together(work, count):
    errors = []

    def caught(number):
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 - told by the caller
            errors.append(error)

    threads = [threading.Thread(target=caught, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return errors


def test_threads_share_a_window_that_is_on_its_way():
    file = Fetched(wait=0.1)
    assert not together(lambda number: file.read(number * 100, 100), 8)
    assert len(file.spans) == 1


def test_an_error_is_that_of_the_thread_that_fetched():
    file = Fetched(wait=0.1)
    file.errors = [OSError("gone")]
    errors = together(lambda number: file.read(number * 100, 100), 8)
    assert [str(error) for error in errors] == ["gone"], "the others fetch for themselves"


@given(st.lists(st.tuples(st.integers(0, 3 << 20), st.integers(0, 300_000)), max_size=30), st.integers(1, 1 << 20))
def test_bytes_are_right_in_any_order(reads, kept):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "KEPT", kept)
        file = Fetched(FILE[: 4 << 20])
        for offset, size in reads:
            file.read(offset, size)


def test_windows_that_begin_at_the_same_byte_are_two():
    file = Fetched(FILE[:50_000])
    file.windows.expect([("a", 0, 3000)])
    file.read(10_000, 10)
    file.read(5000, 10)
    assert [span[1] for span in file.spans] == [0, 10_000, 0]
    for number in range(KEPT // 50_000 + 3):
        file.read(0, 10, path=str(number))
    file.read(100, 3)
    kept = sum(len(window.data) for held in file.windows._by_path.values() for window in held)
    assert file.windows._held == kept <= KEPT
