"""Whatever the order and the delays in which threads read a file, every byte that was given out was hashed."""

import hashlib
import random
import threading
import time

import pytest

from shardctl.base.errors import ChangedError
from shardctl.base.workers import StopRequest
from shardctl.storage import file_hashes
from shardctl.storage.file_hashes import FileHashes
from shardctl.storage.hashed_file import PromisedHash

CONTENT = random.Random(7).randbytes(1_000_003)


class Network:
    """Gives the content, counts, and may flip a bit of what it gives."""

    def __init__(self):
        self.read_bytes = 0
        self.flip = None

    def __call__(self, path, offset, into):
        assert path == "a"
        into[:] = CONTENT[offset : offset + len(into)]
        self.read_bytes += len(into)
        if self.flip is not None and offset <= self.flip < offset + len(into):
            into[self.flip - offset] ^= 1


class Reader:
    """Reads stretches as a source does."""

    def __init__(self, digest=None):
        digest = hashlib.sha256(CONTENT).hexdigest() if digest is None else digest
        self.network = Network()
        self.hashes = FileHashes({"a": PromisedHash(len(CONTENT), digest, hashlib.sha256())}, self.network)

    def take(self, start, stop, *, flip=None):
        self.hashes.begin("a", start, stop)
        data = bytearray(CONTENT[start:stop])
        if flip is not None:
            data[flip - start] ^= 1
        self.hashes.finish("a", start, memoryview(data))

    def take_all(self, order, *, wrong=None):
        for start, stop in order:
            self.take(start, stop, flip=(start + stop) // 2 if (start, stop) == wrong else None)
        self.prove()

    def prove(self, whole=()):
        return self.hashes.prove(whole, StopRequest())

    @property
    def proved(self):
        return not self.hashes.why_not("a")


@pytest.fixture
def reader():
    return Reader()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(file_hashes, "_GRACE_PERIOD_SECONDS", 0.02)
    monkeypatch.setattr(file_hashes, "_POLL_INTERVAL_SECONDS", 0.005)


def pieces(size=10_000):
    return [(start, min(start + size, len(CONTENT))) for start in range(0, len(CONTENT), size)]


def shuffled(seed=3, size=10_000):
    order = pieces(size)
    random.Random(seed).shuffle(order)
    return order


def test_in_order_nothing_is_read_twice(reader):
    for start, stop in pieces():
        reader.take(start, stop)
    assert reader.proved
    assert reader.network.read_bytes == 0


ORDERS = {"backwards": pieces()[::-1], "shuffled": shuffled(), "in two halves": pieces()[50:] + pieces()[:50]}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_in_any_order_a_file_is_hashed(reader, order):
    for piece in order:
        reader.take(*piece)
    reader.prove()
    assert reader.proved
    assert reader.network.read_bytes <= len(CONTENT) * 1.5, "once, and what filled a gap before it came"


@pytest.mark.parametrize("order", [pieces(), *ORDERS.values()], ids=["in order", *ORDERS])
def test_one_flipped_bit_is_found_in_any_order(reader, order):
    wrong = order[len(order) // 3]
    with pytest.raises(ChangedError, match=r"its sha256 is|were read twice"):
        reader.take_all(order, wrong=wrong)


def test_a_flipped_bit_in_what_is_read_again_is_found(reader):
    """What is read for the hash is as little to be trusted as what was read for the result."""
    reader.network.flip = 700_000
    with pytest.raises(ChangedError):
        reader.take_all(pieces()[::-1])


def test_what_is_read_twice_must_be_the_same(reader):
    for start, stop in pieces():
        reader.take(start, stop)
    reader.take(123_456, 234_567, flip=200_000)
    assert not reader.proved
    with pytest.raises(ChangedError, match="read twice"):
        reader.prove()


def test_what_is_read_twice_is_hashed_from_a_place_nearby(reader):
    for start, stop in pieces():
        reader.take(start, stop)
    reader.take(123_456, 234_567)
    reader.prove()
    assert reader.proved
    assert 234_567 - 123_456 < reader.network.read_bytes < 234_567 - 123_456 + 2 * 40_000


def test_stretches_that_overlap(reader):
    for start, stop in pieces():
        reader.take(max(start - 777, 0), stop)
    reader.prove()
    assert reader.proved


@pytest.mark.parametrize("threads", [2, 8])
def test_threads_that_finish_in_any_order(reader, threads):
    queue, lock = iter(pieces()), threading.Lock()

    def work():
        dice = random.Random(threading.get_ident())
        while True:
            with lock:
                piece = next(queue, None)
            if piece is None:
                return
            reader.hashes.begin("a", *piece)
            time.sleep(dice.random() / 200)
            reader.hashes.finish("a", piece[0], memoryview(CONTENT)[slice(*piece)])

    running = [threading.Thread(target=work) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
    reader.prove()
    assert reader.proved


def test_a_stretch_that_is_on_its_way_is_waited_for_without_reading_anything_again(reader):
    """However long it takes: how long that may be is for its request to say."""
    reader.hashes.begin("a", 0, 500_000)
    later = threading.Thread(target=reader.take, args=(500_000, len(CONTENT)))
    later.start()
    time.sleep(0.3)
    assert later.is_alive(), "its grace was over long ago"
    reader.hashes.finish("a", 0, memoryview(CONTENT)[:500_000])
    later.join(5)
    assert reader.proved
    assert reader.network.read_bytes == 0


def test_a_stretch_that_fails_leaves_nobody_waiting(reader):
    reader.hashes.begin("a", 0, 100_000)
    later = threading.Thread(target=reader.take, args=(100_000, 200_000))
    later.start()
    reader.hashes.fail("a", 0, 100_000)
    later.join(5)
    assert not later.is_alive()
    reader.take(0, 100_000)
    for piece in pieces()[20:]:
        reader.take(*piece)
    assert reader.proved
    assert reader.network.read_bytes == 100_000, "what came too early"


def test_gaps_that_no_tensor_has_are_read_along(reader):
    whole = pieces()[:-1]
    for start, stop in whole:
        reader.take(start + 300, stop)
    reader.take(*pieces()[-1])
    assert reader.proved
    assert reader.network.read_bytes == 300 * len(whole)


def test_another_hash_is_an_error_with_the_last_byte():
    reader = Reader("0" * 64)
    *first, last = pieces()
    for piece in first:
        reader.take(*piece)
    with pytest.raises(ChangedError, match=r"its sha256 is [0-9a-f]{64}, but 0{64} is expected"):
        reader.take(*last)


def test_a_part_of_a_file_is_not_proved_unless_the_whole_is_wanted(reader):
    reader.take(0, 10)
    reader.take(300_000, 700_000)
    assert reader.prove() == ()
    assert reader.hashes.why_not("a") == "400,010 of 1,000,003 bytes were read"
    assert reader.prove({"a"}) == ()
    assert reader.proved


def test_almost_all_is_as_good_as_all(reader):
    reader.take(0, 900_000)
    reader.prove()
    assert reader.proved


def test_notes_are_not_kept_without_end(reader, monkeypatch):
    monkeypatch.setattr(file_hashes, "_MOST_NOTES", 10)
    for piece in pieces()[::-1]:
        reader.take(*piece)
    assert reader.prove() == ("a",)
    assert reader.hashes.why_not("a") == "it was read in too many pieces out of order"


def test_a_file_of_which_nothing_is_promised():
    reader = Reader("")
    reader.take(0, len(CONTENT))
    assert reader.prove() == ("a",)
    assert reader.hashes.why_not("a") == "the source states no hash for it"
