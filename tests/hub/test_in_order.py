"""A file that several threads read from first byte to last is hashed; any other is not, and nobody waits long."""

import hashlib
import random
import threading
import time

import pytest

from shardctl.errors import ChangedError
from shardctl.storage import in_order
from shardctl.storage.in_order import InOrder, Promise

CONTENT = random.Random(7).randbytes(1_000_003)


@pytest.fixture
def promised():
    def promised(digest=None, content=CONTENT):
        return InOrder({"a": Promise(len(content), digest or hashlib.sha256(content).hexdigest(), hashlib.sha256())})

    return promised


def take(hashes, start, stop):
    hashes.begin("a", start, stop)
    hashes.finish("a", start, memoryview(CONTENT)[start:stop])


def pieces(size=10_000):
    return [(start, min(start + size, len(CONTENT))) for start in range(0, len(CONTENT), size)]


def test_one_thread(promised):
    hashes = promised()
    for start, stop in pieces():
        take(hashes, start, stop)
    assert hashes.proved == {"a"}


def test_pieces_that_overlap(promised):
    hashes = promised()
    for start, stop in pieces():
        take(hashes, max(start - 777, 0), stop)
        take(hashes, start // 2, start // 2 + 5)
    assert hashes.proved == {"a"}


@pytest.mark.parametrize("threads", [2, 8])
def test_threads_that_finish_in_any_order(promised, threads):
    hashes, queue, lock = promised(), iter(pieces()), threading.Lock()

    def work():
        dice = random.Random(threading.get_ident())
        while True:
            with lock:
                piece = next(queue, None)
            if piece is None:
                return
            hashes.begin("a", *piece)
            time.sleep(dice.random() / 200)
            hashes.finish("a", piece[0], memoryview(CONTENT)[slice(*piece)])

    running = [threading.Thread(target=work) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
    assert hashes.proved == {"a"}


def test_another_hash_is_an_error_with_the_last_byte(promised):
    hashes = promised("0" * 64)
    *first, last = pieces()
    for piece in first:
        take(hashes, *piece)
    with pytest.raises(ChangedError, match=r"its sha256 is [0-9a-f]{64}, and 0{64} was promised"):
        take(hashes, *last)


def test_a_file_that_is_not_read_in_order_is_given_up_once(promised, monkeypatch):
    monkeypatch.setattr(in_order, "_GRACE", 0.05)
    hashes = promised("0" * 64)
    began = time.monotonic()
    for piece in reversed(pieces()):
        take(hashes, *piece)
    assert time.monotonic() - began < 5, "only the first one waits"
    assert hashes.proved == set()
    assert hashes.begun == {"a"}


def test_a_stretch_that_fails_leaves_nobody_waiting(promised, monkeypatch):
    monkeypatch.setattr(in_order, "_GRACE", 0.05)
    hashes = promised()
    hashes.begin("a", 0, 100)
    later = threading.Thread(target=take, args=(hashes, 100, 200))
    later.start()
    hashes.fail("a", 0, 100)
    later.join(5)
    assert not later.is_alive()


def test_files_that_nothing_is_known_of(promised):
    hashes = promised()
    hashes.begin("b", 0, 5)
    hashes.finish("b", 0, memoryview(b"12345"))
    assert not hashes.begun
