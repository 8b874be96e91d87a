"""Runs of small tensors arrive like tensors that are moved one by one, with fewer calls."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from shardctl.base.dtype import BY_NAME
from shardctl.conversion.engine.budget import HostMemoryBudget
from shardctl.conversion.engine.engine import execute_plan
from shardctl.conversion.engine.journal import BandJournal
from shardctl.storage import UnpromisedSource
from shardctl.tensors.box import Box
from shardctl.tensors.copyplan import join_manifests
from shardctl.tensors.digest import compute_box_sums
from shardctl.tensors.manifest import (
    CheckpointFile,
    Chunk,
    ConstantFill,
    Manifest,
    Region,
    Tensor,
    compute_dense_strides,
)

KINDS = ("BF16", "F32", "U8", "F4")


class Calls(UnpromisedSource):
    """Files in memory, and what was asked of them."""

    def __init__(self, files):
        self.files, self.reads, self.writes = files, [], []

    def create(self, path, size):
        """Make a file."""
        self.files.setdefault(path, bytearray(size))

    def read_at(self, path, offset, into):
        """Fill `into`."""
        self.reads.append((path, offset, len(into)))
        into[:] = self.files[path][offset : offset + len(into)]

    def write_at(self, path, offset, data):
        """Write."""
        self.writes.append((path, offset, len(data)))
        self.files[path][offset : offset + len(data)] = data

    def sync(self, path):
        """Do nothing."""


def store(rows, shares):
    """Lay tensors out in one file for each share; a share says which box of a tensor it has."""
    ends = [3] * len(shares)  # so that nothing is aligned
    tensors = {}
    for name, (dtype, shape) in rows.items():
        chunks = []
        for number, share in enumerate(shares):
            box = share(name, shape)
            if box is not None:
                where = Region(f"part {number}", ends[number], compute_dense_strides(dtype, box.shape))
                chunks.append(Chunk(box, dtype, where, name))
                ends[number] += dtype.nbytes(box.shape)
        tensors[name] = Tensor(name, dtype, shape, tuple(chunks))
    files = {f"part {n}": CheckpointFile(f"part {n}", end, ((0, b"abc"),)) for n, end in enumerate(ends)}
    return Manifest("safetensors", tensors, files)


def whole(_, shape):
    return Box.whole(shape)


def columns(part):
    return lambda _, shape: Box((0, part * (shape[1] // 2)), (shape[0], shape[1] // 2))


def even(name, shape):
    return Box.whole(shape) if int(name) % 2 == 0 else None


def make_rows(count=200):
    return {f"{n}": (BY_NAME[KINDS[n // 7 % len(KINDS)]], (n % 3 + 1, 8 * (n % 5 + 1))) for n in range(count)}


def make_files(manifest):
    rng = np.random.default_rng(0)
    return {path: rng.bytes(file.size) for path, file in manifest.files.items()}


def read_tensor(files, chunk):
    return files[chunk.where.file][chunk.where.offset :][: chunk.dtype.nbytes(chunk.box.shape)]


def copy(have, want, files, *, block=1 << 20, threads=1, journal=None):
    source, target = Calls(files), Calls({})
    budget = HostMemoryBudget(1 << 30, threads, block, 0, 0, 2)
    outcome = execute_plan(join_manifests(have, want), source, target, budget, journal=journal)
    return outcome, source, target


@pytest.mark.parametrize("threads", [1, 3])
def test_small_tensors_go_everywhere_with_few_calls(threads):
    rows = make_rows()
    have, want = store(rows, [whole]), store(rows, [columns(0), columns(1), whole, even])
    files = make_files(have)
    outcome, source, target = copy(have, want, files, threads=threads)
    assert len(source.reads) == 1
    assert len(target.writes) == 4 + 4  # the headers, and one for each file
    for name, (dtype, shape) in rows.items():
        data = read_tensor(files, have.tensors[name].chunks[0])
        units = np.frombuffer(data, f"V{dtype.unit_bytes}").reshape(dtype.unit_shape(shape))
        half = units.shape[1] // 2
        parts = [read_tensor(target.files, chunk) for chunk in want.tensors[name].chunks]
        expected = [units[:, :half].tobytes(), units[:, half:].tobytes(), *[bytes(data)] * (len(parts) - 2)]
        assert list(map(bytes, parts)) == expected
        sums = compute_box_sums(data, dtype, Box.whole(shape), shape)
        assert outcome.source_sums[name] == outcome.output_sums[name] == sums


def test_runs_have_the_size_of_a_block_at_most():
    rows = make_rows()
    have, want = store(rows, [whole]), store(rows, [whole])
    files = make_files(have)
    _, source, target = copy(have, want, files, block=512)
    assert max(size for _, _, size in source.reads) <= 512
    assert all(a[1] + a[2] == b[1] for a, b in pairwise(source.reads))
    assert target.files["part 0"][3:] == files["part 0"][3:]
    assert len(target.writes) == 1 + len(source.reads)


def test_what_is_no_dense_copy_is_moved_by_itself():
    dtype = BY_NAME["BF16"]
    rows = {f"{n}": (dtype, (4, 8)) for n in range(6)}
    have, want = store(rows, [whole]), store(rows, [whole])
    across = want.tensors["2"].chunks[0]
    where = Region(across.where.file, across.where.offset, (2, 8))
    tensors = {**want.tensors, "2": Tensor("2", dtype, (4, 8), (Chunk(across.box, dtype, where, "2"),))}
    fill = Chunk(Box.whole((4, 8)), dtype, ConstantFill(b"\1\0"), "4")
    stored = {**have.tensors, "4": Tensor("4", dtype, (4, 8), (fill,))}
    files = make_files(have)
    have = Manifest("safetensors", stored, have.files)
    outcome, source, target = copy(have, Manifest("safetensors", tensors, want.files), files)
    assert sorted(size for _, _, size in source.reads) == [
        64,
        128,
        192,
    ]  # the transposed one, those before it, and those behind it
    values = np.frombuffer(files["part 0"], "<u2", offset=3 + 128, count=32).reshape(4, 8)
    found = np.frombuffer(bytes(target.files["part 0"]), "<u2", offset=3)
    assert found[64:96].tolist() == values.T.ravel().tolist()
    assert found[128:160].tolist() == [1] * 32
    assert set(outcome.output_sums) == set(rows)


def test_a_chunk_without_elements_before_the_one_that_is_read():
    rows = make_rows(40)
    have, want = store(rows, [whole]), store(rows, [whole])
    files = make_files(have)
    tensors = {}
    for name, tensor in have.tensors.items():
        nothing = Box((0,) * len(tensor.shape), (0, *tensor.shape[1:]))
        strides = compute_dense_strides(tensor.dtype, nothing.shape)
        empty = Chunk(nothing, tensor.dtype, Region("part 0", 0, strides), name)
        tensors[name] = Tensor(name, tensor.dtype, tensor.shape, (empty, *tensor.chunks))
    _, _, target = copy(Manifest("safetensors", tensors, have.files), want, files)
    assert target.files["part 0"][3:] == files["part 0"][3:]


def test_an_interrupted_run_keeps_small_tensors_that_are_intact(tmp_path):
    rows = make_rows()
    have, want = store(rows, [whole]), store(rows, [columns(0), columns(1)])
    files = make_files(have)
    journal = BandJournal(tmp_path / "journal", {"plan": "p"})
    outcome, _, target = copy(have, want, files, journal=journal)
    journal.close()
    damaged = want.tensors["77"].chunks[1].where
    target.files[damaged.file][damaged.offset] ^= 1
    before = {path: bytes(data) for path, data in target.files.items()}
    journal = BandJournal(tmp_path / "journal", {"plan": "p"})
    assert len(journal) == len(rows)
    plan, source = join_manifests(have, want), Calls(files)
    budget = HostMemoryBudget(1 << 30, 2, 1 << 20, 0, 0, 2)
    again = execute_plan(plan, source, target, budget, journal=journal)
    journal.close()
    where = have.tensors["77"].chunks[0].where
    assert source.reads == [(where.file, where.offset, have.tensors["77"].nbytes)]
    assert again.output_sums == outcome.output_sums
    assert before != target.files
    target.files[damaged.file][damaged.offset] ^= 1
    assert before == target.files
