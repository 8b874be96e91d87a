"""One safetensors file: what is refused and why, what is accepted, and that the library agrees."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from safetensors_corpus import BAD, ODD, Bad, Odd, build

from shardctl.base.dtype import BY_NAME, DTYPES
from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.libraries.safetensors.header import (
    SafetensorsHeader,
    _ParsedHeader,
    encode_header,
    looks_like_header,
    read_header,
)
from shardctl.storage import read_bytes
from shardctl.storage.local import LocalSource


def header_of(content: bytes, path) -> SafetensorsHeader:
    path.write_bytes(content)
    source = LocalSource(path)
    try:
        return read_header(source, path.name)
    finally:
        source.close()


def verdict(content: bytes, path) -> tuple[SafetensorsHeader | None, str]:
    try:
        return header_of(content, path), ""
    except SourceError as error:
        return None, error.message


def is_refused_on_purpose(content: bytes) -> bool:
    """What shardctl refuses and the library accepts, as the module's first lines list it."""
    repeats = []

    def seen(pairs: list) -> dict:
        repeats.append(len(dict(pairs)) != len(pairs))
        return dict(pairs)

    entries = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")], object_pairs_hook=seen)
    entries.pop("__metadata__", None)
    return any(repeats) or any(
        len(name) > 10_000
        or not isinstance(entry, dict)
        or entry.keys() != {"dtype", "shape", "data_offsets"}
        or not isinstance(entry["dtype"], str)
        or len(entry["shape"]) > 32
        for name, entry in entries.items()
    )


def library_accepts(content: bytes) -> bool:
    try:
        safetensors.deserialize(content)
    except safetensors.SafetensorError:
        return False
    return True


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
def test_a_bad_file_gets_its_verdict(case: Bad, tmp_path):
    with pytest.raises(SourceError) as raised:
        header_of(case.content, tmp_path / "x.safetensors")
    assert type(raised.value) is case.error
    assert "x.safetensors" in raised.value.message
    assert case.message in raised.value.message
    assert not raised.value.message.endswith(".")
    assert len(raised.value.message) < 500


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
def test_the_library_agrees_except_where_it_is_said(case: Bad):
    assert library_accepts(case.content) == case.library_accepts


THREE = [f'"{name}":{{"dtype":"U8","shape":[4],"data_offsets":[{4 * n},{4 * n + 4}]}}' for n, name in enumerate("abc")]
"""As the library spells them."""


@pytest.mark.parametrize("head", ["", '"__metadata__":{"format":"pt"},'])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ('"b"', '"a"'),
        ('"b"', '"__metadata__"'),
        ('"b"', '""'),
        ('"b"', r'"\u0062"'),
        ('"b"', r'"\""'),
        ('"b"', '"x\ty"'),
        ('"b"', '"a":1,"b"'),
        ('"b"', '"' + "b" * 10_001 + '"'),
        ('"b"', '"},"'),
        ('"b":', '"b": '),
        ("[4,8]", "[4, 8]"),
        ("[4,8]", "[04,8]"),
        ("[4,8]", "[4,8.0]"),
        ("[4,8]", "[4,9]"),
        ("[4,8]", "[0,4]"),
        ('"shape":[4],"data_offsets":[4,8]', '"data_offsets":[4,8],"shape":[4]'),
        ('"U8","shape":[4],"data_offsets":[4', '"U8","shape":[2,2],"data_offsets":[4'),
        ('"U8","shape":[4],"data_offsets":[4', '"U8","shape":[04],"data_offsets":[4'),
        ('"U8","shape":[4],"data_offsets":[4', '"U8","shape":[4],"more":0,"data_offsets":[4'),
        ('"U8","shape":[4],"data_offsets":[4', '"F4","shape":[8],"data_offsets":[4'),
        ('"U8","shape":[4],"data_offsets":[4', '"F4","shape":[7],"data_offsets":[4'),
        ('"U8","shape":[4],"data_offsets":[4', '"V9","shape":[4],"data_offsets":[4'),
    ],
)
def test_entries_that_are_taken_at_one_go_mean_what_each_means(head, old, new, tmp_path, monkeypatch):
    """Two compact entries are taken before the last; whatever is odd about one is left to the general way."""
    for text in (",".join(THREE), ",".join([THREE[0], THREE[2], THREE[1]])):
        content = build(f"{{{head}{text.replace(old, new, 1) if old else text}}}", bytes(12))
        quick = verdict(content, tmp_path / "x.safetensors")
        with monkeypatch.context() as slow:
            slow.setattr(_ParsedHeader, "_take_compact", lambda _, at: at)
            assert verdict(content, tmp_path / "x.safetensors") == quick
        assert library_accepts(content) == (quick[0] is not None) or is_refused_on_purpose(content)


@pytest.mark.parametrize("case", ODD, ids=lambda case: case.name)
def test_an_odd_file_is_read_bit_for_bit(case: Odd, tmp_path):
    header = header_of(case.content, tmp_path / "x.safetensors")
    found = {a.name: (a.dtype.name, a.shape, case.content[a.offset : a.offset + a.nbytes]) for a in header.arrays}
    assert found == case.arrays
    assert list(found) == list(case.arrays)


@pytest.mark.parametrize("case", ODD, ids=lambda case: case.name)
def test_the_library_reads_the_odd_file_too(case: Odd):
    found = {n: (i["dtype"], tuple(i["shape"]), bytes(i["data"])) for n, i in safetensors.deserialize(case.content)}
    assert found == case.arrays


def test_metadata_is_given_as_it_is(tmp_path):
    metadata = {"format": "pt", "a key": 'a\n"value"', "": "", "模": "型"}
    header = header_of(build(json.dumps({"__metadata__": metadata})), tmp_path / "x.safetensors")
    assert header.metadata == metadata


def test_all_dtypes_are_those_of_the_library(tmp_path):
    for dtype in DTYPES:
        encoded = encode_header([("a", dtype, (2, 8))], {})
        content = encoded.header + bytes(encoded.size - len(encoded.header))
        ((_, info),) = safetensors.deserialize(content)
        assert (info["dtype"], info["shape"], len(info["data"])) == (dtype.name, [2, 8], dtype.nbytes((2, 8)))
        (array,) = header_of(content, tmp_path / "x.safetensors").arrays
        assert (array.dtype, array.shape) == (dtype, (2, 8))


NAMES = st.text(st.characters(exclude_categories=("Cs",)), max_size=6).filter(lambda n: n != "__metadata__")
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
ARRAYS = st.dictionaries(NAMES, st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=6)


def whole_bytes(arrays) -> bool:
    return all(torch.Size(shape).numel() * dtype.bits % 8 == 0 for dtype, shape in arrays.values())


@given(ARRAYS.filter(whole_bytes), st.dictionaries(NAMES, NAMES, max_size=3), st.randoms())
def test_what_is_written_loads_and_reads_back(tmp_path_factory, arrays, metadata, random):
    items = [(name, dtype, shape) for name, (dtype, shape) in arrays.items()]
    encoded = encode_header(items, metadata)
    random.shuffle(items)
    assert encode_header(items, metadata) == encoded
    data = random.randbytes(encoded.size - len(encoded.header))
    content = encoded.header + data
    loaded = dict(safetensors.deserialize(content))
    assert {n: (i["dtype"], tuple(i["shape"])) for n, i in loaded.items()} == {
        n: (d.name, s) for n, (d, s) in arrays.items()
    }
    for name, info in loaded.items():
        start = encoded.offsets[name]
        assert bytes(info["data"]) == content[start : start + len(info["data"])]
    header = header_of(content, tmp_path_factory.getbasetemp() / "written.safetensors")
    assert {a.name: a.offset for a in header.arrays} == encoded.offsets
    assert list(encoded.offsets) == [a.name for a in header.arrays]
    assert header.metadata == metadata
    assert len(encoded.header) % 8 == 0


TORCH = [d for d in DTYPES if d.torch and d.bits >= 8]


@given(
    st.dictionaries(NAMES, st.tuples(st.sampled_from(TORCH), SHAPES), max_size=6),
    st.dictionaries(NAMES, NAMES, max_size=1),
)
def test_the_bytes_are_those_the_library_writes(arrays, metadata):
    tensors = {n: torch.zeros(s, dtype=torch.uint8).to(getattr(torch, d.torch)) for n, (d, s) in arrays.items()}
    encoded = encode_header([(n, d, s) for n, (d, s) in arrays.items()], metadata)
    assert save(tensors, metadata or None) == encoded.header + bytes(encoded.size - len(encoded.header))


def test_metadata_keys_are_sorted_where_the_library_is_random():
    keys = [f"k{i}" for i in range(9)]
    text = encode_header([], dict.fromkeys(reversed(keys), "v")).header[8:]
    assert list(json.loads(text)["__metadata__"]) == keys


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ([("__metadata__", BY_NAME["U8"], (1,))], "cannot hold a tensor named"),
        ([("\ud800", BY_NAME["U8"], (1,))], "lone surrogate"),
        ([("a", BY_NAME["F4"], (3,))], "do not end on a byte"),
    ],
)
def test_what_no_file_can_hold_is_not_written(arrays, message):
    with pytest.raises(UnsupportedError, match=message):
        encode_header(arrays, {})


def test_a_header_over_the_limit_is_not_written():
    with pytest.raises(UnsupportedError, match="safetensors allows 100,000,000"):
        encode_header([], {"a": "b" * 100_000_000})


# Mutants: the library is the oracle of what is a legal header.

SEEDS = tuple(case.content for case in ODD) + tuple(case.content for case in BAD if len(case.content) < 300)
TOKENS = (
    b'"', b"{", b"}", b"[", b"]", b",", b":", b" ", b"\n", b"\\", b"0", b"1", b"-", b"4", b".", b"e", b"null", b"true",
    b'"dtype"', b'"shape"', b'"data_offsets"', b'"__metadata__"', b'"U8"', b'"F4"', b"\\u0061", b"\\ud800", b"\xff",
    b"\0", b"18446744073709551615", b"18446744073709551616", b'"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]},',
)  # fmt: skip


@st.composite
def mutants(draw) -> bytes:
    content = draw(st.sampled_from(SEEDS))
    text = bytearray(content[8:])
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(text)))
        cut = draw(st.integers(0, 3))
        text[at : at + cut] = draw(st.sampled_from(TOKENS) | st.binary(max_size=2))
    length = int.from_bytes(content[:8], "little") + len(text) - len(content) + 8
    length += draw(st.sampled_from((0, 0, 0, 0, -1, 1)))
    return min(max(length, 0), 2**64 - 1).to_bytes(8, "little") + bytes(text)


@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutants())
def test_mutants_are_accepted_if_and_only_if_the_library_accepts_them(tmp_path_factory, content):
    header, message = verdict(content, tmp_path_factory.getbasetemp() / "mutant.safetensors")
    if not library_accepts(content):
        assert header is None
    elif header is None:
        assert is_refused_on_purpose(content), message
    else:
        loaded = {n: (i["dtype"], tuple(i["shape"]), bytes(i["data"])) for n, i in safetensors.deserialize(content)}
        assert loaded == {
            a.name: (a.dtype.name, a.shape, content[a.offset : a.offset + a.nbytes]) for a in header.arrays
        }


@pytest.mark.parametrize("case", ODD, ids=lambda case: case.name)
def test_a_file_cut_anywhere_is_refused(case: Odd, tmp_path):
    for length in range(len(case.content)):
        with pytest.raises(SourceError):
            header_of(case.content[:length], tmp_path / "x.safetensors")


# Cost: a hostile file must get its verdict within 20 s and 1 GiB; a large honest one is read in about a second.

BOMBS = {
    "lists": 'b\'{"a":\' + b"[]," * 30_000_000',
    "flat-lists-in-shape": 'b\'{"a":{"shape":[\' + b"[]," * 30_000_000',
    "metadata-lists": 'b\'{"__metadata__":{"a":\' + b"[[]]," * 19_000_000',
    "empty-tensors": 'b"{" + b",".join(b\'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}\' % i '
    'for i in range(1_600_000)) + b"}"',
    "spaces": 'b" " * 99_000_000',
    "one-name": "b'{\"' + b\"a\" * 99_000_000 + b'\":1}'",
    "wide-text": 'b\'{"__metadata__":{"a":"\' + "😀".encode() * 20_000_000 + b\'",}}\'',
    "unicode-escapes": 'b\'{"__metadata__":{"a":"\' + b"\\\\u00e9" * 16_000_000 + b\'",}}\'',
    "nested": "b'{\"a\":' * 18_000_000",
}
CHILD = """
import resource, sys
from pathlib import Path
from shardctl.base.errors import SourceError
from shardctl.libraries.safetensors.header import read_header
from shardctl.storage.local import LocalSource
path = Path(sys.argv[1])
try:
    read_header(LocalSource(path), path.name)
except SourceError as error:
    assert len(str(error)) < 500
    status = Path("/proc/self/status")
    if status.exists():  # Linux counts the parent's peak into ru_maxrss
        print(1024 * int(status.read_text().split("VmHWM:")[1].split()[0]))
    else:
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_hostile_header_gets_its_verdict_in_bounded_time_and_memory(bomb, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(build(eval(BOMBS[bomb])))  # noqa: S307 - the literal above
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    child = subprocess.run(
        [sys.executable, "-c", CHILD, path], capture_output=True, text=True, check=False, timeout=300
    )
    assert child.returncode == 0, child.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 20
    assert int(child.stdout) < 1 << 30


def test_a_hundred_thousand_tensors_are_read_quickly(tmp_path):
    names = [f"model.layers.{i // 800}.mlp.experts.{i % 800}.down_proj.weight" for i in range(100_000)]
    encoded = encode_header([(n, BY_NAME["BF16"], (2, 2)) for n in names], {"format": "pt"})
    path = tmp_path / "x.safetensors"
    path.write_bytes(encoded.header + bytes(encoded.size - len(encoded.header)))
    before = resource.getrusage(resource.RUSAGE_SELF)
    header = read_header(LocalSource(path), path.name)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert {a.name: a.offset for a in header.arrays} == encoded.offsets
    assert after.ru_utime - before.ru_utime < 5, "about 0.7 s is usual"


def test_a_file_is_known_by_its_first_bytes(tmp_path):
    for case in ODD:
        (tmp_path / "blob").write_bytes(case.content)
        assert looks_like_header(LocalSource(tmp_path / "blob"), "blob"), case.name
    for content in (b"", b"{}", b"GGUF" + bytes(60), bytes(60), build("[1]"), b"PK\x03\x04" + bytes(60)):
        (tmp_path / "blob").write_bytes(content)
        assert not looks_like_header(LocalSource(tmp_path / "blob"), "blob"), content


def test_only_the_header_is_read(tmp_path):
    class Counting(LocalSource):
        read = 0

        def read_at(self, path, offset, into):
            self.read += len(into)
            super().read_at(path, offset, into)

    path = tmp_path / "x.safetensors"
    path.write_bytes(build('{"a":{"dtype":"U8","shape":[10000000],"data_offsets":[0,10000000]}}', bytes(10_000_000)))
    source = Counting(path)
    read_header(source, path.name)
    assert source.read <= 1 << 16
    assert read_bytes(source, path.name, 8, 4) == b'{"a"'
