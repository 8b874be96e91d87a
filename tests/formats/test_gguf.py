"""GGUF headers: what llama.cpp's own package wrote is read as its reader reads it, and hostile headers are refused."""

from __future__ import annotations

import json
import random
import struct
import time
import tracemalloc
from pathlib import Path

import pytest

from shardctl.base.errors import SourceError
from shardctl.cli.program import run
from shardctl.libraries.gguf.header import read_header
from shardctl.storage.local import LocalSource

FIXTURES = Path(__file__).parents[2] / "fixtures" / "gguf"
HOSTILE = {
    "tensors": b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0),
    "settings": b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60),
    "a key": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 60),
    "a list": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 8, 1 << 60),
    "a list of lists": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 9, 4) + bytes(64),
    "an alignment of 0": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 17) + b"general.alignment" + struct.pack("<II", 4, 0),
    "dims": b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"a" + struct.pack("<I", 1 << 30) + bytes(64),
    "a shape": b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"a" + struct.pack("<IQQIQ", 2, 1 << 60, 1 << 60, 0, 0),
    "a type": b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"a" + struct.pack("<IQIQ", 1, 8, 999, 0) + bytes(64),
    "blocks": b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"a" + struct.pack("<IQIQ", 1, 8, 2, 0) + bytes(64),
    "a version": b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
    "nothing": b"GGUF",
}


@pytest.mark.parametrize("name", ["llama", "types"])
def test_tensors_are_those_that_its_own_reader_finds(name):
    header = read_header(LocalSource(FIXTURES / f"{name}.gguf"), f"{name}.gguf")
    found = {
        each.name: [each.dtype.name, list(each.shape), each.dtype.nbytes(each.shape), each.offset]
        for each in header.tensors
    }
    assert found == json.loads((FIXTURES / f"{name}.json").read_text())


def test_every_type_with_blocks_is_tried():
    from shardctl.libraries.gguf.header import BLOCK_TYPES

    blocks = {each.name for each in BLOCK_TYPES.values() if each.unit_elements > 1}
    assert blocks == set(json.loads((FIXTURES / "types.json").read_text()))


def test_inspect_and_plan_describe_it_and_reshard_refuses_it(tmp_path, capfd):
    path = str(FIXTURES / "llama.gguf")
    assert run(["inspect", path, "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    expected = json.loads((FIXTURES / "llama.json").read_text())
    assert document["tensor_bytes"] == sum(row[2] for row in expected.values())
    assert (document["format"], document["architecture"]) == ("gguf", "LlamaForCausalLM")
    assert run(["plan", path, "--for", "serve", "--seq-len", "64", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["weight_bytes"] == sum(row[2] for row in expected.values())
    cache = 2 * 64 * 2 * 64 * 2  # keys and values of 64 tokens, 2 heads of 64 elements, in 2 bytes
    assert str(cache) in json.dumps(document["needs"])
    for options in (["--tp", "2"], ["--fsdp", "2"], ["--search", "--gpus", "4", "--gpu", "h100-80g"]):
        assert run(["plan", path, *options]) == 4
        assert "how its engines divide one over devices is not known" in capfd.readouterr().err
    for verb in (["reshard", path, str(tmp_path / "out")], ["verify", path]):
        assert run(verb) == 4
        assert "GGUF" in capfd.readouterr().err


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused(tmp_path, name):
    (tmp_path / "a.gguf").write_bytes(HOSTILE[name])
    tracemalloc.start()
    began = time.monotonic()
    with pytest.raises(SourceError):
        read_header(LocalSource(tmp_path / "a.gguf"), "a.gguf")
    assert time.monotonic() - began < 5
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


def test_no_changed_header_ends_in_a_bug(tmp_path):
    whole, chance = (FIXTURES / "types.gguf").read_bytes(), random.Random(3)
    for _ in range(500):
        data = bytearray(whole[: chance.choice([len(whole), chance.randrange(len(whole))])])
        for _ in range(chance.randrange(1, 4)):
            if data:
                data[chance.randrange(min(len(data), 1250))] = chance.randrange(256)
        (tmp_path / "a.gguf").write_bytes(data)
        try:
            read_header(LocalSource(tmp_path / "a.gguf"), "a.gguf")
        except SourceError as error:
            assert error.message  # noqa: PT017


def test_a_file_that_is_cut_short_is_refused(tmp_path):
    whole = (FIXTURES / "llama.gguf").read_bytes()
    for size in (4, 20, 300, 1000, len(whole) - 200_000, len(whole) - 64):
        (tmp_path / "a.gguf").write_bytes(whole[:size])
        assert run(["inspect", str(tmp_path / "a.gguf")]) == 4


def test_one_file_of_several_says_so(tmp_path, capfd):
    setting = struct.pack("<Q", 11) + b"split.count" + struct.pack("<IH", 2, 3)
    whole = (FIXTURES / "types.gguf").read_bytes()
    count = struct.unpack("<Q", whole[16:24])[0]
    data = whole[:16] + struct.pack("<Q", count + 1) + setting + whole[24:] + bytes(64)
    (tmp_path / "a-00001-of-00003.gguf").write_bytes(data)
    assert run(["inspect", str(tmp_path / "a-00001-of-00003.gguf")]) == 0
    assert "one of 3 files" in capfd.readouterr().err
