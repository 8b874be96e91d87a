"""Storage: bytes at offsets, whatever mixture of direct and ordinary calls moves them, and what the system refuses."""

import contextlib
import ctypes
import errno
import os
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardctl.base.errors import AccessError, DestinationError, SourceError
from shardctl.conversion.engine.lock import DestinationLock
from shardctl.storage import direct, linux, local, read_bytes
from shardctl.storage.addresses import open_source
from shardctl.storage.durable import make_directories, sync_directory, write_file
from shardctl.storage.local import LocalSource, LocalTarget
from shardctl.tensors.bands import allocate_aligned

PAGE = 4096
LARGE = local._MIN_DIRECT_IO_BYTES
BOUNCE = direct._BOUNCE_BUFFER_BYTES
EDGES = [0, 1, 511, 512, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, LARGE - 1, LARGE, LARGE + 1, BOUNCE - 1, BOUNCE + PAGE + 1]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("storage")


NOISE = np.random.default_rng(0).integers(0, 256, 3 * BOUNCE, np.uint8)
near = st.sampled_from(EDGES).flatmap(lambda edge: st.integers(max(edge - 2, 0), edge + 2))


@settings(max_examples=60)
@given(near, near, st.integers(0, 3 * PAGE))
@example(0, BOUNCE, 0)
@example(1, BOUNCE + 1, 1)
@example(PAGE - 1, LARGE, 0)
def test_what_is_written_at_any_offset_is_read_back_and_nothing_else_changes(place, offset, size, tail):
    before = NOISE[::-1][: offset + size + tail].tobytes()
    path = place / "f"
    path.write_bytes(before)
    target = LocalTarget(place)
    target.create("f", len(before))
    data = NOISE[:size].tobytes()
    target.write_at("f", offset, data)
    back = bytearray(size)
    target.read_at("f", offset, memoryview(back))
    target.sync("f")
    target.close()
    assert back == data
    assert path.read_bytes() == before[:offset] + data + before[offset + size :]


@settings(max_examples=40)
@given(near, near, st.booleans())
def test_any_range_is_read_cached_or_not(place, offset, size, cold):
    path = place / "g"
    content = NOISE[: offset + size].tobytes()
    path.write_bytes(content)
    if cold:
        forget(path)
    source = LocalSource(place)
    try:
        assert read_bytes(source, "g", offset, size) == content[offset:]
        with pytest.raises(SourceError, match=f"g ends at byte {offset + size}"):
            read_bytes(source, "g", offset, size + 1)
    finally:
        source.close()


def forget(path):
    """Drop a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def test_neighbouring_writes_that_share_pages_do_not_disturb_each_other(tmp_path):
    """Ragged ends go through the page cache and whole blocks past it, from several threads, in the same file."""
    bounds = [0, 700_001, 1_100_003, 1_900_000, 2_500_009, 3_300_000]
    content = NOISE[: bounds[-1]].tobytes()
    for _ in range(10):
        target = LocalTarget(tmp_path)
        target.create("f", len(content))
        parts = list(pairwise(bounds))
        threads = [threading.Thread(target=target.write_at, args=("f", a, content[a:b])) for a, b in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        target.sync("f")
        target.close()
        assert (tmp_path / "f").read_bytes() == content
        (tmp_path / "f").unlink()


@pytest.mark.parametrize("where", ["open", "write"])
def test_a_file_system_without_direct_io_is_written_by_ordinary_calls(tmp_path, monkeypatch, where):
    refused = []

    def refuse(*_):
        refused.append(1)
        raise OSError(errno.EINVAL, "Invalid argument")

    if where == "write":
        monkeypatch.setattr(direct, "write_direct", refuse)
        monkeypatch.setattr(direct, "read_direct", refuse)
    else:
        actual = os.open
        flag = getattr(os, "O_DIRECT", 0)
        monkeypatch.setattr(os, "open", lambda p, f, *m: refuse() if flag and f & flag else actual(p, f, *m))
    target = LocalTarget(tmp_path)
    target.create("f", 3 * LARGE)
    for offset in (0, LARGE, 2 * LARGE):
        target.write_at("f", offset, NOISE[:LARGE].tobytes())
    target.close()
    assert (tmp_path / "f").read_bytes() == NOISE[:LARGE].tobytes() * 3
    assert len(refused) <= 1, "one refusal is enough to know"


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="direct I/O is Linux's")
@pytest.mark.parametrize("offset", [0, 8, PAGE - 8, 3 * PAGE + 200])
def test_what_begins_at_the_same_byte_of_a_page_in_memory_and_in_the_file_is_not_copied(tmp_path, offset):
    memory = allocate_aligned(BOUNCE)[offset % PAGE :][: BOUNCE - 100]
    memory[:] = NOISE[: len(memory)]
    direct._bounce.memory[:] = 7
    target = LocalTarget(tmp_path)
    target.create("f", offset + len(memory))
    target.write_at("f", offset, memory.data)
    target.close()
    assert (direct._bounce.memory == 7).all()
    assert (tmp_path / "f").read_bytes()[offset:] == memory.tobytes()


def test_a_cold_file_is_read_without_filling_the_cache(tmp_path):
    path = tmp_path / "f"
    write_file(path, NOISE.tobytes())
    size = NOISE.nbytes
    with path.open("rb") as file:
        if linux.measure_cached_share(file.fileno(), 0, size) is None:
            pytest.skip("the system does not say what is cached")
        assert linux.measure_cached_share(file.fileno(), 0, size) == 1
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if linux.measure_cached_share(file.fileno(), 0, PAGE):
            pytest.skip("this file system keeps its pages")
        source, found = LocalSource(tmp_path), np.empty(size, np.uint8)
        for at in range(0, size, BOUNCE):
            source.read_at("f", at, found[at : at + BOUNCE].data)
        source.close()
        assert (found == NOISE).all()
        cached = [linux.measure_cached_share(file.fileno(), at, PAGE) for at in range(0, size, PAGE)]
        assert sum(cached) == 0


def test_direct_writes_that_move_less_than_asked_go_on(tmp_path, monkeypatch):
    actual, calls = os.pwrite, []

    def some(descriptor, data, offset):
        calls.append(len(data))
        aligned = len(data) % PAGE == 0 and offset % PAGE == 0
        return actual(
            descriptor, memoryview(data)[: max(len(data) // 2 // PAGE * PAGE, PAGE)] if aligned else data, offset
        )

    monkeypatch.setattr(os, "pwrite", some)
    target = LocalTarget(tmp_path)
    target.create("f", BOUNCE + 77)
    target.write_at("f", 5, NOISE[: BOUNCE + 72].tobytes())
    target.close()
    assert len(calls) > 10
    assert (tmp_path / "f").read_bytes() == bytes(5) + NOISE[: BOUNCE + 72].tobytes()


def test_a_file_that_shrinks_under_the_reader_is_an_error_and_not_a_signal(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(NOISE[:LARGE].tobytes())
    source = LocalSource(tmp_path)
    read_bytes(source, "f", 0, LARGE)
    os.truncate(path, 1000)
    with pytest.raises(SourceError, match="f ends at byte 1000"):
        source.read_at("f", 0, memoryview(bytearray(LARGE)))
    source.close()


class TestDescriptors:
    @pytest.fixture(autouse=True)
    def few(self, monkeypatch):
        monkeypatch.setattr(local, "choose_descriptor_count", lambda: 4)

    def make(self, tmp_path, count):
        for number in range(count):
            (tmp_path / f"{number:03d}").write_bytes(f"{number:03d}".encode())
        return [f"{number:03d}" for number in range(count)]

    def test_far_more_files_than_descriptors_are_read_by_threads(self, tmp_path):
        names = self.make(tmp_path, 40)
        source = LocalSource(tmp_path)
        wrong = []

        def work(seed):
            order = np.random.default_rng(seed).permutation(np.repeat(names, 5))
            wrong.extend(n for n in order if read_bytes(source, n, 0, 3) != n.encode())

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert len(source._file._ordinary._open) <= 4 + len(threads)
        source.close()

    def test_only_the_least_recently_used_is_closed(self, tmp_path):
        names = self.make(tmp_path, 6)
        held = local.DescriptorPool(os.O_RDONLY)
        for name in (*names[:4], names[0], names[4]):
            with held.use(tmp_path / name):
                pass
        assert [path.name for path in held._open] == ["002", "003", "000", "004"]
        held.close()

    def test_one_in_use_is_never_closed(self, tmp_path):
        names = self.make(tmp_path, 12)
        held = local.DescriptorPool(os.O_RDONLY)
        with contextlib.ExitStack() as stack:
            users = [stack.enter_context(held.use(tmp_path / name)) for name in names]
            assert [os.pread(user, 3, 0).decode() for user in users] == names
        held.close()

    def test_a_written_file_is_flushed_before_its_descriptor_goes_and_a_failure_is_remembered(
        self, tmp_path, monkeypatch
    ):
        """The kernel tells of a failed writeback only those who had the file open."""
        failing = []

        def flush(descriptor):
            if Path(f"/proc/self/fd/{descriptor}").readlink().name == "000" and not failing:
                failing.append(1)
                raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(local, "sync_descriptor", flush)
        target = LocalTarget(tmp_path)
        for name in self.make(tmp_path, 4):
            target.write_at(name, 0, b"x")
        (tmp_path / "more").write_bytes(b"")
        with pytest.raises(DestinationError, match="Input/output error"):
            target.write_at("more", 0, b"x")
        with pytest.raises(DestinationError, match="cannot be trusted"):
            target.sync("000")
        target.sync("001")
        target.close()


def test_a_failed_sync_fails_for_every_later_caller(tmp_path, monkeypatch):
    target = LocalTarget(tmp_path)
    target.create("f", 3)
    codes = iter([errno.EIO])
    actual = os.fsync

    def fsync(descriptor):
        for code in codes:
            raise OSError(code, os.strerror(code))
        actual(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    for _ in range(3):
        with pytest.raises(DestinationError):
            target.sync("f")
    target.create("g", 3)
    target.sync("g")
    target.close()


def test_space_is_reserved_when_a_file_is_made(tmp_path):
    target = LocalTarget(tmp_path)
    target.create("sub/f", 1 << 20)
    assert (tmp_path / "sub" / "f").stat().st_size == 1 << 20
    if linux.reserve_space(os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT), 4096):
        assert (tmp_path / "sub" / "f").stat().st_blocks * 512 >= 1 << 20
    (tmp_path / "sub" / "f").write_bytes(b"x" * (1 << 20))
    target.create("sub/f", 1 << 20)
    assert (tmp_path / "sub" / "f").read_bytes(), "a file of the right size is kept"
    target.create("sub/f", 10)
    assert (tmp_path / "sub" / "f").read_bytes() == bytes(10), "any other is made anew"
    target.create("empty", 0)
    assert (tmp_path / "empty").stat().st_size == 0


def calls_that_return(monkeypatch, *codes):
    """Make the C library's functions fail with these codes, then succeed."""
    left = list(codes)

    def call(*_):
        ctypes.set_errno(left.pop(0) if left else 0)
        return -1 if ctypes.get_errno() else 0

    monkeypatch.setattr(linux, "_find_libc_function", lambda _: call)
    return left


def test_an_interrupted_reservation_is_repeated(monkeypatch):
    left = calls_that_return(monkeypatch, errno.EINTR, errno.EINTR)
    assert linux.reserve_space(0, 10)
    assert not left


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_what_is_unsupported_is_said_and_not_raised(monkeypatch, code):
    for call in (lambda: linux.reserve_space(0, 10), lambda: linux.exchange_names(Path("a"), Path("b"))):
        calls_that_return(monkeypatch, code)
        assert not call()


def test_a_full_disk_is_not_called_unsupported(monkeypatch):
    calls_that_return(monkeypatch, errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        linux.reserve_space(0, 10)


def test_names_are_swapped_and_taken_only_if_free(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("1")
    two.write_text("2")
    if not linux.exchange_names(one, two):
        pytest.skip("this file system cannot exchange names")
    assert (one.read_text(), two.read_text()) == ("2", "1")
    with pytest.raises(FileExistsError):
        linux.rename_without_replacing(one, two)
    assert linux.rename_without_replacing(one, tmp_path / "three")
    assert two.read_text() == "1"


def test_targets_do_not_follow_links(tmp_path):
    """In a directory that others can write, a link could lead our bytes into any file."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "f").symlink_to(victim)
    target = LocalTarget(tmp_path / "out")
    with pytest.raises(DestinationError):
        target.create("f", 3)
    with pytest.raises(DestinationError):
        target.write_at("f", 0, b"bad")
    with pytest.raises(OSError, match="symbolic links"):
        write_file(tmp_path / "out" / "f", b"bad")
    assert victim.read_text() == "precious"


def test_directories_are_made_with_all_their_parents(tmp_path):
    make_directories(tmp_path / "a" / "b" / "c")
    make_directories(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    sync_directory(tmp_path / "a")


def test_the_files_of_a_source_leave_out_what_is_not_a_checkpoint(tmp_path):
    for name in ("b/x", "a", ".git/config", ".shardctl/data/a", ".cache/y"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to("nowhere")
    assert list(LocalSource(tmp_path).files()) == ["a", "b/x"]
    assert list(LocalSource(tmp_path / "a").files()) == ["a"]
    with pytest.raises(SourceError, match="does not exist"):
        LocalSource(tmp_path / "none")
    with pytest.raises(SourceError, match="neither a regular file"):
        LocalSource(tmp_path / "pipe")


def test_the_version_of_a_file_changes_with_it(tmp_path):
    path = tmp_path / "f"
    path.write_text("one")
    source = LocalSource(tmp_path)
    before = source.files()["f"]
    assert source.stat_file("f") == before
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert source.stat_file("f") != before
    path.unlink()
    assert source.stat_file("f") is None


def test_a_lock_is_held_once_and_left_behind_for_nobody(tmp_path):
    path = tmp_path / "stage" / "lock"
    first, second = DestinationLock(path, "writing x"), DestinationLock(path, "writing x")
    first.acquire()
    assert first.held
    with pytest.raises(DestinationError, match=f"process {os.getpid()} on .*is writing x"):
        second.acquire()
    second.release()
    assert path.exists(), "who does not hold it cannot let it go"
    first.release()
    assert not path.exists()
    second.acquire()
    second.release()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_an_access_error(tmp_path):
    (tmp_path / "f").write_text("x")
    (tmp_path / "f").chmod(0)
    with pytest.raises(AccessError):
        read_bytes(LocalSource(tmp_path), "f", 0, 1)


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("models/lama", "models/llama"),
        ("modles/llama", "models/llama"),
        ("models/llama@main", "models/llama"),
        ("./models/lama", "models/llama"),
        ("models/llama/model.safetensor", "models/llama/model.safetensors"),
    ],
)
def test_a_mistyped_path_is_not_looked_for_on_the_hub(tmp_path, monkeypatch, asked, meant):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "llama").mkdir(parents=True)
    (tmp_path / "models" / "llama" / "model.safetensors").write_bytes(b"")
    with pytest.raises(SourceError, match="does not exist") as raised:
        open_source(asked)
    assert f"did you mean {meant}?" in raised.value.hint


def test_another_path_is_not_suggested(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "llama").mkdir(parents=True)
    with pytest.raises(SourceError, match="does not exist") as raised:
        open_source("./models/mistral")
    assert raised.value.hint is None


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="direct I/O is Linux's")
@pytest.mark.parametrize("offset", [0, 8, PAGE - 8, 3 * PAGE + 200])
@pytest.mark.parametrize("size", [LARGE, BOUNCE + 12, direct._AT_ONCE - 8, direct._AT_ONCE + LARGE + 5])
@pytest.mark.parametrize("rest", [0, 1, PAGE])
def test_cold_bytes_that_lie_in_pages_as_in_the_file_are_read_to_their_place(tmp_path, monkeypatch, offset, size, rest):
    content = np.resize(NOISE, offset + size + rest)
    write_file(tmp_path / "f", content.tobytes())
    monkeypatch.setattr(linux, "measure_cached_share", lambda *_: 0.0)
    memory = allocate_aligned(size + PAGE)
    memory[:] = 7
    into = memory[offset % PAGE :][:size]
    direct._bounce.memory[:] = 7
    source = LocalSource(tmp_path)
    source.read_at("f", offset, into.data)
    source.close()
    assert (into == content[offset:][:size]).all()
    assert (memory[: offset % PAGE] == 7).all()
    assert (memory[offset % PAGE + size :] == 7).all(), "nothing beside the memory that was given is written"
    assert (direct._bounce.memory[2 * PAGE :] == 7).all(), "whole blocks are not copied"


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_what_is_mostly_cached_is_read_from_the_cache(tmp_path, monkeypatch, share):
    write_file(tmp_path / "f", NOISE.tobytes())
    monkeypatch.setattr(linux, "measure_cached_share", lambda *_: share)
    opened, actual = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, *more: opened.append(fd) or actual(fd, *more))
    source, found = LocalSource(tmp_path), np.empty(LARGE, np.uint8)
    source.read_at("f", 5, found.data)
    with source._file._direct.use(tmp_path / "f") as descriptor:
        assert (descriptor in opened) is (share < direct._MIN_CACHED_FRACTION)
    source.close()
    assert (found == NOISE[5:][:LARGE]).all()
