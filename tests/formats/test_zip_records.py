"""Our reading of zip archives agrees with Python's where an archive is sound, and refuses it where readers differ."""

from __future__ import annotations

import struct
import time
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zip_builder import Entry, build, padding

from shardctl.base.errors import HostileError, ShardctlError, SourceError, UnsupportedError
from shardctl.libraries.torch_save.zip_records import read_archive
from shardctl.storage.local import LocalSource


def archive(path, content: bytes, **window: int):
    path.write_bytes(content)
    source = LocalSource(path)
    try:
        return read_archive(source, path.name, **window)
    finally:
        source.close()


@pytest.fixture
def file(tmp_path):
    return tmp_path / "m.bin"


DATA = {"m/data.pkl": b"pickle", "m/byteorder": b"little", "m/data/0": bytes(range(100)), "m/data/1": b""}


def test_a_zip_of_python_is_read_as_python_reads_it(file):
    with zipfile.ZipFile(file, "w") as z:
        for name, data in DATA.items():
            z.writestr(name, data)
    content = file.read_bytes()
    found = archive(file, content)
    assert found.root == "m"
    assert {f"m/{name}": content[r.offset : r.offset + r.size] for name, r in found.records.items()} == DATA
    with zipfile.ZipFile(file) as z:
        assert {f"m/{name}": r.crc for name, r in found.records.items()} == {i.filename: i.CRC for i in z.infolist()}


def test_sizes_after_the_data_and_zip64_are_read(file):
    """Streams have zeros in the local header, and forced zip64 has the sizes in extra fields of both headers."""
    with zipfile.ZipFile(file, "w") as z:
        for name, data in DATA.items():
            with z.open(name, "w", force_zip64=True) as record:
                record.write(data)
    content = file.read_bytes()
    found = archive(file, content)
    assert {f"m/{name}": content[r.offset : r.offset + r.size] for name, r in found.records.items()} == DATA


@pytest.mark.parametrize("zip64", [False, True])
def test_an_archive_within_a_file(file, zip64):
    """Distributed checkpoints are torch.save archives one after another."""
    inner = build(*(Entry(name, data) for name, data in DATA.items()), zip64=zip64)
    content = b"x" * 77 + inner + b"y" * 55
    found = archive(file, content, start=77, size=len(inner))
    assert {f"m/{name}": content[r.offset : r.offset + r.size] for name, r in found.records.items()} == DATA


def test_data_starts_where_the_local_header_says(file):
    """Torch aligns data by an extra field that only the local header has."""
    content = build(Entry("m/data/0", b"abc", extra=padding(0, "m/data/0")))
    record = archive(file, content).records["data/0"]
    assert record.offset == 64
    assert content[record.offset :][: record.size] == b"abc"


def test_wide_numbers_come_from_the_zip64_field_in_order(file):
    wide = struct.pack("<2H2Q", 1, 16, 3, 3)
    entry = Entry("m/a", b"abc", central={"packed": 0xFFFFFFFF, "size": 0xFFFFFFFF}, central_extra=wide)
    assert archive(file, build(entry)).records["a"].size == 3
    entry = Entry("m/a", b"abc", central={"offset": 0xFFFFFFFF}, central_extra=struct.pack("<2HQ", 1, 8, 0))
    assert archive(file, build(entry)).records["a"].offset == 33


def test_folders_are_not_records(file):
    found = archive(file, build(Entry("m/"), Entry("m/data/"), Entry("m/data/0", b"abc")))
    assert list(found.records) == ["data/0"]


def test_a_crc_of_zero_means_that_none_was_computed(file):
    entry = Entry("m/a", b"abc", local={"crc": 0}, central={"crc": 0})
    assert archive(file, build(entry)).records["a"].crc == 0


A = Entry("m/a", b"abc")
FULL = 0xFFFFFFFF
BAD = {
    # what is not there
    "empty": (b"", SourceError, "cut off"),
    "truncated": (build(A)[:-5], SourceError, "does not end with its directory"),
    "tail": (build(A, tail=b"x"), SourceError, "does not end with its directory"),
    "comment": (build(A, comment=b"hello"), SourceError, "does not end with its directory"),
    "comment-that-is-an-end": (build(A, comment=build()), SourceError, "directory end at byte 0"),
    "prefix": (b"#!/bin/sh\n" + build(A), SourceError, "directory end at byte"),
    # the end records
    "count-too-large": (build(A, count=2), SourceError, "fewer records than the 2"),
    "count-too-small": (build(A, A, count=1), SourceError, "more records than the 1"),
    "directory-elsewhere": (build(A, first=5), SourceError, "directory end at byte"),
    "directory-negative": (build(A, first=FULL), SourceError, "directory end at byte"),
    "disks": (build(A, disk=1), UnsupportedError, "several disks"),
    "disk-of-record": (build(Entry("m/a", central={"disk": 1})), UnsupportedError, "several disks"),
    "end64-elsewhere": (build(A, zip64=True, end64_at=0), SourceError, "zip64 end record at byte 0"),
    "end64-disagrees": (build(A, zip64=True, narrow=(1, 48, 37)), SourceError, "disagree"),
    "directory-huge": (
        build(A, zip64=True, count=1 << 40, narrow=(0xFFFF, FULL, FULL)),
        HostileError,
        "1,099,511,627,776",
    ),
    "directory-signature": (
        build(Entry("m/a", central={"signature": b"PK\x01\x03"})),
        SourceError,
        "malformed directory",
    ),
    # a record described twice, differently
    "local-name": (build(Entry("m/a", b"abc", local={"name": b"m/b"})), SourceError, "in two ways"),
    "local-name-longer": (build(Entry("m/a", b"abc", local={"name": b"m/ab"})), SourceError, "in two ways"),
    "local-signature": (build(Entry("m/a", b"abc", local={"signature": b"PK\3\5"})), SourceError, "in two ways"),
    "local-method": (build(Entry("m/a", b"abc", local={"method": 8})), SourceError, "in two ways"),
    "local-size": (build(Entry("m/a", b"abc", local={"size": 2})), SourceError, "in two ways"),
    "local-size-zero": (build(Entry("m/a", b"abc", local={"size": 0})), SourceError, "in two ways"),
    "local-crc": (build(Entry("m/a", b"abc", local={"crc": 1})), SourceError, "in two ways"),
    "local-elsewhere": (build(Entry("m/a", b"abc" * 20, central={"offset": 3})), SourceError, "in two ways"),
    "local-beyond": (build(Entry("m/a", b"abc", central={"offset": 1 << 20})), SourceError, "inside or after its dir"),
    "sizes-differ": (build(Entry("m/a", b"abc", central={"size": 1 << 30})), SourceError, "two sizes"),
    # lies that would read what is not the record's
    "size-too-large": (
        build(Entry("m/a", b"abc", local={"size": 500, "packed": 500}, central={"size": 500, "packed": 500})),
        HostileError,
        "overlap",
    ),
    "bomb-of-nested-records": (
        build(
            Entry("m/a", build(Entry("m/b", b"x" * 90))[:-22], local={}),
            Entry("m/b", b"x" * 90, central={"offset": 33}),
        ),
        HostileError,
        "overlap",
    ),
    "zip64-missing": (
        build(Entry("m/a", b"abc", central={"size": FULL, "packed": FULL})),
        SourceError,
        "lacks the zip64",
    ),
    "zip64-short": (
        build(Entry("m/a", b"abc", central={"size": FULL, "packed": FULL}, central_extra=struct.pack("<2HQ", 1, 8, 3))),
        SourceError,
        "lacks the zip64",
    ),
    "zip64-huge": (
        build(
            Entry(
                "m/a",
                b"abc",
                local={"size": FULL, "packed": FULL},
                central={"size": FULL, "packed": FULL},
                central_extra=struct.pack("<2H2Q", 1, 16, 1 << 62, 1 << 62),
            )
        ),
        HostileError,
        "overlap",
    ),
    "zip64-twice": (build(Entry("m/a", central_extra=struct.pack("<2HQ", 1, 8, 3) * 2)), SourceError, "two zip64"),
    "extra-cut": (build(Entry("m/a", central_extra=b"\1\0\x09")), SourceError, "malformed extra"),
    "extra-long": (build(Entry("m/a", central_extra=b"\2\0\xff\0")), SourceError, "malformed extra"),
    # names
    "twice": (build(A, A), SourceError, "'m/a' twice"),
    "twice-but-for-case": (build(A, Entry("m/A", b"xyz")), SourceError, "'m/A' twice"),
    "dot-dot": (build(Entry("m/../../etc/passwd", b"x")), HostileError, "may leave its folder"),
    "dot": (build(Entry("m/./a", b"x")), HostileError, "may leave its folder"),
    "absolute": (build(Entry("/etc/passwd", b"x")), HostileError, "may leave its folder"),
    "double-slash": (build(Entry("m//a", b"x")), HostileError, "may leave its folder"),
    "drive": (build(Entry("C:/a", b"x")), HostileError, "may leave its folder"),
    "backslash": (build(Entry("m\\..\\a", b"x")), HostileError, "may leave its folder"),
    "nul": (build(Entry("m/a\0.txt", b"x")), HostileError, "may leave its folder"),
    "no-name": (build(Entry("", b"x")), HostileError, "may leave its folder"),
    "folder-with-data": (build(Entry("m/a/", b"x")), HostileError, "may leave its folder"),
    "no-folder": (build(Entry("data.pkl", b"x")), SourceError, "outside of any folder"),
    "two-folders": (build(A, Entry("n/b", b"x")), SourceError, "more than one folder: 'm/a' and 'n/b'"),
    "not-utf8": (build(Entry(b"m/\xff", b"x")), SourceError, "not UTF-8"),
    # what is not read
    "deflated": (build(Entry("m/a", b"x", local={"method": 8}, central={"method": 8})), UnsupportedError, "compressed"),
    "encrypted": (build(Entry("m/a", b"x", central={"flags": 1})), UnsupportedError, "encrypted"),
    "encrypted-locally": (build(Entry("m/a", b"x", local={"flags": 1})), SourceError, "in two ways"),
    "masked": (build(Entry("m/a", b"x", central={"flags": 1 << 13})), UnsupportedError, "encrypted"),
}


@pytest.mark.parametrize(("content", "error", "fragment"), BAD.values(), ids=BAD)
def test_malformed_and_hostile_archives_have_a_verdict(file, content, error, fragment):
    with pytest.raises(error) as caught:
        archive(file, content)
    assert type(caught.value) is error
    assert fragment in caught.value.message
    assert caught.value.message.startswith("m.bin: ")


def test_a_zip_bomb_is_refused_by_its_compression_alone(file):
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("m/data.pkl", bytes(100_000_000))
    begun = time.process_time()
    with pytest.raises(UnsupportedError, match="compressed"):
        archive(file, file.read_bytes())
    assert time.process_time() - begun < 1


SEED = build(*(Entry(n, d, extra=b"FB\4\0ZZZZ") for n, d in DATA.items()), zip64=True)


@given(
    st.lists(st.tuples(st.integers(0, len(SEED) - 1), st.integers(0, 255)), min_size=1, max_size=4), st.integers(0, 40)
)
@settings(max_examples=300, deadline=None)
def test_mutants_raise_nothing_but_our_own_errors_and_stay_inside_the_file(tmp_path_factory, changes, cut):
    mutant = bytearray(SEED)
    for at, byte in changes:
        mutant[at] = byte
    content = bytes(mutant[: len(mutant) - (cut if cut < 20 else 0)])
    try:
        found = archive(tmp_path_factory.getbasetemp() / "mutant.bin", content)
    except ShardctlError:
        return
    assert all(r.offset + r.size <= len(content) for r in found.records.values())
