"""Small tensors that lie next to each other are read and digested together, and give what each gives by itself."""

from __future__ import annotations

import json

import numpy as np
import pytest

from shardctl.base.dtype import BY_NAME, DTYPES
from shardctl.base.workers import ExecutionOptions
from shardctl.tensors.box import Box
from shardctl.tensors.digest import compute_box_sums, compute_stacked_sums
from shardctl.tensors.manifest import Chunk, Region, Tensor, compute_dense_strides
from shardctl.tensors.small_tensors import locate_small_tensor, split_runs
from shardctl.verify import content

SHAPES = ((), (1,), (7,), (40, 24), (1, 8), (300, 1), (3, 5, 8), (20_000, 2), (2, 300), (70, 128), (1 << 16,))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stacked_tensors_have_the_sums_that_each_has_by_itself(dtype):
    rng = np.random.default_rng(0)
    tried = 0
    for shape in SHAPES:
        if int(np.prod(shape)) * dtype.bits % 8 or (shape and shape[-1] % dtype.unit_elements):
            continue
        stack = rng.integers(0, 256, (3 if np.prod(shape) > 9_999 else 37, dtype.nbytes(shape)), np.uint8)
        found = compute_stacked_sums(stack, dtype, shape)
        for row, words in zip(stack, found, strict=True):
            assert compute_box_sums(row, dtype, Box.whole(shape), shape).words == tuple(words.tolist())
        tried += 1
    assert tried >= 4


@pytest.mark.parametrize("shape", [(0, 4), (1 << 17, 1), (1, 1 << 17)])
def test_stacked_tensors_of_more_than_one_tile_are_refused(shape):
    with pytest.raises(ValueError, match="not in one tile"):
        compute_stacked_sums(np.zeros((2, BY_NAME["U8"].nbytes(shape)), np.uint8), BY_NAME["U8"], shape)


class Memory:
    """A reader of one array of bytes that counts its calls."""

    def __init__(self, data):
        self.data, self.calls = data, []

    def read_at(self, path, offset, into):
        """Fill `into`."""
        assert path == "file"
        self.calls.append((offset, len(into)))
        into[:] = self.data[offset : offset + len(into)].data


def place(name, kind, shape, offset, strides=None):
    dtype = BY_NAME[kind]
    where = Region("file", offset, strides or compute_dense_strides(dtype, shape))
    return Tensor(name, dtype, shape, (Chunk(Box.whole(shape), dtype, where, name),))


def measure(tensors, data, *, block=8 << 20, values=True):
    reader = Memory(data)
    effort = ExecutionOptions(threads=2, block=block)
    return content.measure_content(tensors, reader, effort, values=values), reader


def test_a_run_is_read_by_one_call_and_each_of_its_tensors_is_what_it_is_alone():
    data = np.random.default_rng(1).integers(1, 100, 70_000, np.uint8)
    data[20_000:20_032] = 0
    data[30_000:30_004] = np.array([0x7FC0, 0xFF80], "<u2").view(np.uint8)  # NaN, and an infinity
    tensors = [
        place("odd offset", "BF16", (30, 10), 3),
        place("far", "F32", (30, 10), 16_000),
        place("zeros.weight", "I8", (32,), 20_000),
        place("next", "I8", (32,), 20_032),
        place("same bytes", "I8", (32,), 20_032),
        place("transposed", "BF16", (4, 8), 20_100, (2, 8)),
        place("infinite", "BF16", (30, 10), 30_000),
        place("finite", "BF16", (30, 10), 30_600),
        place("empty", "BF16", (0, 10), 31_200),
        place("narrow", "F4", (30, 10), 31_200),
        place("last", "F64", (), 31_350),
    ]
    found, reader = measure(tensors, data)
    assert sorted(reader.calls) == [
        *[(3, 600), (16_000, 4_064), (20_032, 32), (20_100, 64), (30_000, 1_200), (31_200, 158)]
    ]
    for number, tensor in enumerate(tensors):
        (alone,) = measure([tensor], data, block=4096)[0]
        assert found[number] == alone
        assert not measure([tensor], data, values=False)[0][0].zero or not tensor.size
    assert [(each.nans, each.infinities) for each in found] == [(0, 0)] * 6 + [(1, 1)] + [(0, 0)] * 4
    assert [each.zero for each in found] == [name in {"zeros.weight", "empty"} for name in (t.name for t in tensors)]


def test_runs_end_at_gaps_at_files_and_at_a_block():
    def locate(kind, shape, offset):
        tensor = place("t", kind, shape, offset)
        return locate_small_tensor(tensor, tensor.chunks), tensor.nbytes

    near = [locate("U8", (1_000,), 1_000 * n) for n in range(6)]
    assert [list(run.numbers) for run in split_runs(near, 4_096)] == [[0, 1, 2, 3], [4, 5]]
    gaps = [locate("U8", (10,), at) for at in (0, 4_106, 8_213, 8_213)]
    found = [(list(run.numbers), run.offset, run.size, run.payload) for run in split_runs(gaps, 1 << 20)]
    assert found == [([0, 1], 0, 4_116, 20), ([2], 8_213, 10, 10), ([3], 8_213, 10, 10)]
    assert [run.size for run in split_runs([locate("U8", (4_097,), 0)], 4_096)] == [0]
    large = [locate("U8", (1 << 16,), 0), locate("U8", ((1 << 16) + 1,), 1 << 16), locate("U16", (1 << 16,), 1 << 18)]
    assert [where is None for where, _ in large] == [False, True, True]
    assert [(list(run.numbers), run.size) for run in split_runs(large, 1 << 20)] == [([0], 1 << 16), ([1], 0), ([2], 0)]


def test_the_digest_of_many_small_tensors_is_that_of_the_definition(tmp_path):
    from shardctl.tensors.digest import compute_checkpoint_digest, compute_tensor_digest
    from shardctl.verbs.digest import digest

    rng, dtype = np.random.default_rng(2), BY_NAME["F16"]
    names = {f"layer.{n}": ((n % 3 + 1, 8) if n % 2 else (n % 5 + 1,)) for n in range(500)}
    header, data = {}, bytearray()
    for name, shape in names.items():
        begin = len(data)
        data += rng.bytes(dtype.nbytes(shape))
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    rows = []
    for name, shape in names.items():
        begin, end = header[name]["data_offsets"]
        sums = compute_box_sums(bytes(data[begin:end]), dtype, Box.whole(shape), shape)
        rows.append((name, dtype, shape, compute_tensor_digest(sums, dtype, shape)))
    assert digest(tmp_path).digest == compute_checkpoint_digest(rows)
