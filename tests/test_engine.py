"""The engine against NumPy: any partition stored in any order becomes any other, with the digest of the whole."""

import threading
from collections import Counter
from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import DestinationError, Interrupted
from shardctl.base.workers import StopRequest
from shardctl.conversion.engine.budget import HostMemoryBudget
from shardctl.conversion.engine.engine import execute_plan
from shardctl.conversion.engine.journal import BandJournal
from shardctl.storage import UnpromisedSource
from shardctl.tensors.bands import get_unit_type
from shardctl.tensors.box import Box, list_flat_boxes
from shardctl.tensors.cast import cast_elements
from shardctl.tensors.copyplan import join_manifests
from shardctl.tensors.digest import DigestSums, compute_box_sums
from shardctl.tensors.manifest import (
    CheckpointFile,
    Chunk,
    ConstantFill,
    Manifest,
    Region,
    Tensor,
    compute_dense_strides,
)

U8, U16, F32, BF16, F4 = (BY_NAME[name] for name in ("U8", "U16", "F32", "BF16", "F4"))


class Files(UnpromisedSource):
    """Source and target in memory, which count what is asked of them."""

    def __init__(self, files=None):
        self.files = dict(files or {})
        self.created, self.synced = {}, Counter()
        self.reads, self.writes = Counter(), Counter()
        self._lock = threading.Lock()

    def create(self, path, size):
        self.created[path] = size
        if len(self.files.get(path, b"")) != size:
            self.files[path] = bytearray(size)

    def read_at(self, path, offset, into):
        assert offset + len(into) <= len(self.files[path]), "a read past the end"
        into[:] = self.files[path][offset : offset + len(into)]
        with self._lock:
            self.reads[path] += len(into)

    def write_at(self, path, offset, data):
        assert offset + len(data) <= len(self.files[path]), "a write past the end"
        self.files[path][offset : offset + len(data)] = data
        with self._lock:
            self.writes[path] += len(data)

    def sync(self, path):
        self.synced[path] += 1

    def close(self):
        pass


class Layout:
    """Lays boxes into files one after another, each with its own strides."""

    def __init__(self, dtype):
        self.dtype = dtype
        self.sizes = Counter()
        self.chunks = []

    def add(self, box, file="f", order=None, gaps=None, lead=0):
        """Store `box` with the dims of `order` from the fastest to the slowest, each step `gaps` times as long."""
        strides, step = [0] * len(box.shape), self.dtype.unit_bytes
        for dim in order if order is not None else reversed(range(len(box.shape))):
            strides[dim] = step * (gaps[dim] if gaps else 1)
            step = strides[dim] * max(self.dtype.unit_shape(box.shape)[dim], 1)
        offset = self.sizes[file] + lead
        self.sizes[file] = offset + step
        self.chunks.append(Chunk(box, self.dtype, Region(file, offset, tuple(strides)), "w"))

    def manifest(self, shape, name="t"):
        files = {path: CheckpointFile(path, size) for path, size in self.sizes.items()}
        return Manifest("x", {name: Tensor(name, self.dtype, tuple(shape), tuple(self.chunks))}, files)


def view(files, chunk):
    """A stored box as an array of its units."""
    return np.ndarray(
        chunk.dtype.unit_shape(chunk.box.shape), get_unit_type(chunk.dtype), files[chunk.where.file],
        chunk.where.offset, chunk.where.strides,
    )  # fmt: skip


def filled(manifest, values):
    """The files of a manifest with the values of its tensor in every chunk."""
    files = {path: bytearray(file.size) for path, file in manifest.files.items()}
    for _, chunk in manifest.arrays():
        if not isinstance(chunk.where, ConstantFill):
            view(files, chunk)[...] = values[(*chunk.box.slices(), ...)]
    return files


def budget(block=64, threads=1):
    return HostMemoryBudget(1 << 30, threads, block, 4 * block, 0, 4)


def values_of(shape, dtype=U16, seed=0):
    count = prod(shape) // dtype.unit_elements * dtype.unit_bytes
    data = np.random.default_rng(seed).integers(0, 256, count, np.uint8)
    return data.view(get_unit_type(dtype)).reshape(dtype.unit_shape(shape))


def copied(have, want, values, **options):
    """Execute, and check everything that must hold of any copy without a cast."""
    (tensor,) = want.tensors.values()
    source, target = Files(filled(have, values)), Files()
    outcome = execute_plan(join_manifests(have, want), source, target, budget(**options))
    expected = filled(want, values)
    assert {path: bytes(data) for path, data in target.files.items()} == {p: bytes(d) for p, d in expected.items()}
    sums = compute_box_sums(values.tobytes(), tensor.dtype, Box.whole(tensor.shape), tensor.shape)
    assert outcome.source_sums == outcome.output_sums == {"t": sums}
    assert outcome.written_bytes == sum(c.dtype.nbytes(c.box.shape) for _, c in want.arrays())
    assert set(target.synced) == set(want.files), "every file is synced when it is complete"
    assert target.created == {path: file.size for path, file in want.files.items()}
    return source, target


@st.composite
def partitions(draw, shape):
    """Boxes that cover a tensor once: a grid of cuts, or the flat runs of ZeRO and FSDP1."""
    if draw(st.booleans()):
        cuts = [sorted(draw(st.sets(st.integers(1, max(n - 1, 1)), max_size=2)) | {0, n}) for n in shape]
        grid = [Box((), ())]
        for bounds in cuts:
            grid = [Box((*box.origin, a), (*box.shape, b - a)) for box in grid for a, b in pairwise(bounds) if b > a]
        return grid
    size = prod(shape)
    bounds = sorted([0, size, *draw(st.lists(st.integers(0, size), max_size=4))])
    return [box for a, b in pairwise(bounds) for box in list_flat_boxes(shape, a, b)]


@st.composite
def layouts(draw, shape, dtype):
    """A manifest that stores each box of a partition in any order of dims, with gaps, and some of them twice."""
    layout = Layout(dtype)
    boxes = draw(partitions(shape))
    boxes += draw(st.lists(st.sampled_from(boxes), max_size=2)) if boxes else []
    for box in draw(st.permutations(boxes)):
        layout.add(
            box,
            draw(st.sampled_from(["a", "b"])),
            draw(st.permutations(range(len(shape)))),
            [draw(st.sampled_from([1, 1, 1, 2, 3])) for _ in shape],
            draw(st.integers(0, 5)) * dtype.unit_bytes,
        )
    return layout.manifest(shape)


shapes = st.lists(st.integers(1, 9), max_size=4).map(tuple)


@settings(max_examples=300)
@given(shapes, st.sampled_from([U8, U16, F32]), st.integers(4, 300), st.integers(1, 3), st.data())
def test_any_partition_becomes_any_other(shape, dtype, block, threads, data):
    have, want = data.draw(layouts(shape, dtype)), data.draw(layouts(shape, dtype))
    copied(have, want, values_of(shape, dtype), block=block, threads=threads)


@settings(max_examples=100)
@given(shapes.filter(bool), st.integers(8, 300), st.integers(1, 3), st.data())
def test_a_cast_and_its_digest_are_those_of_the_whole_tensor(shape, block, threads, data):
    have, want = data.draw(layouts(shape, F32)), data.draw(layouts(shape, BF16))
    values = values_of(shape, F32)
    expected = np.empty(shape, np.uint16)
    report = cast_elements(values.view(np.uint8).reshape(-1), F32, BF16, expected.view(np.uint8).reshape(-1))
    target = Files()
    outcome = execute_plan(join_manifests(have, want), Files(filled(have, values)), target, budget(block, threads))
    assert {p: bytes(d) for p, d in target.files.items()} == {p: bytes(d) for p, d in filled(want, expected).items()}
    whole = Box.whole(shape)
    assert outcome.source_sums["t"] == compute_box_sums(values.tobytes(), F32, whole, shape)
    assert outcome.output_sums["t"] == compute_box_sums(expected.tobytes(), BF16, whole, shape)
    assert sum(outcome.overflowed.values()) == report.overflowed


def rows(shape, dtype=U16, **options):
    layout = Layout(dtype)
    layout.add(Box.whole(shape), **options)
    return layout.manifest(shape)


@pytest.mark.parametrize("block", [2, 6, 16, 30, 32, 34, 256, 1 << 12])
def test_a_transposed_target_is_filled_whatever_the_block(block):
    copied(rows((16, 15)), rows((16, 15), order=(0, 1)), values_of((16, 15)), block=block)
    copied(rows((16, 15), order=(0, 1)), rows((16, 15)), values_of((16, 15)), block=block)


def test_interleaved_targets_share_a_file():
    """Gate and up of one matrix, row by row in turn, as Megatron's fused `linear_fc1` is for some families."""
    have = rows((8, 6))
    halves = [
        Chunk(Box((4 * half, 0), (4, 6)), U16, Region("f", 12 * half, (24, 2)), "w") for half in (0, 1)
    ]  # fmt: skip
    want = Manifest("x", {"t": Tensor("t", U16, (8, 6), tuple(halves))}, {"f": CheckpointFile("f", 96)})
    values = values_of((8, 6))
    _, target = copied(have, want, values, block=20)
    stored = np.frombuffer(target.files["f"], np.uint16).reshape(4, 2, 6)
    np.testing.assert_array_equal(stored[:, 0], values[:4])
    np.testing.assert_array_equal(stored[:, 1], values[4:])


def test_replicas_are_read_once_and_all_written():
    layout = Layout(U16)
    for rank in range(4):
        layout.add(Box.whole((10, 10)), f"rank{rank}")
    source, target = copied(rows((10, 10)), layout.manifest((10, 10)), values_of((10, 10)), block=40)
    assert source.reads == {"f": 200}
    assert target.writes == {f"rank{rank}": 200 for rank in range(4)}


def test_columns_for_many_ranks_are_read_once():
    layout = Layout(U16)
    for rank in range(8):
        layout.add(Box((0, 4 * rank), (16, 4)), f"rank{rank}")
    source, _ = copied(rows((16, 32)), layout.manifest((16, 32)), values_of((16, 32)), block=128, threads=2)
    assert source.reads == {"f": 1024}


def test_fills_are_written_and_not_read():
    stored = Chunk(Box((0, 0), (3, 4)), U16, Region("f", 0, (8, 2)))
    padding = Chunk(Box((3, 0), (2, 4)), U16, ConstantFill(b"\x07\x01"))
    have = Manifest("x", {"t": Tensor("t", U16, (5, 4), (stored, padding))}, {"f": CheckpointFile("f", 24)})
    values = values_of((5, 4))
    values[3:] = 0x0107
    source, _ = copied(have, rows((5, 4)), values, block=12)
    assert source.reads == {"f": 24}


def test_narrow_types_are_moved_by_units():
    columns = Layout(F4)
    columns.add(Box((0, 0), (6, 4)), "a")
    columns.add(Box((0, 4), (6, 12)), "b")
    want = columns.manifest((6, 16))
    values = values_of((6, 16), F4)
    source, target = Files({"f": bytearray(values.tobytes())}), Files()
    outcome = execute_plan(join_manifests(rows((6, 16), F4), want), source, target, budget(5))
    np.testing.assert_array_equal(np.frombuffer(target.files["a"], np.uint8).reshape(6, 2), values[:, :2])
    np.testing.assert_array_equal(np.frombuffer(target.files["b"], np.uint8).reshape(6, 6), values[:, 2:])
    assert outcome.output_sums["t"] == compute_box_sums(values.tobytes(), F4, Box.whole((6, 16)), (6, 16))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0, 2), ()])
def test_tensors_without_elements_or_without_dims_go_through(shape):
    copied(rows(shape), rows(shape), values_of(shape))


def test_the_literals_of_a_file_are_written_and_a_file_of_nothing_else_is_synced():
    want = rows((4,), lead=10)
    files = {
        "f": CheckpointFile("f", want.files["f"].size, ((0, b"header"),)),
        "index": CheckpointFile("index", 5, ((0, b"index"),)),
    }
    target = Files()
    values = values_of((4,))
    plan = join_manifests(rows((4,)), Manifest("x", want.tensors, files))
    outcome = execute_plan(plan, Files({"f": bytearray(values.tobytes())}), target, budget())
    assert bytes(target.files["f"]) == b"header" + bytes(4) + values.tobytes()
    assert bytes(target.files["index"]) == b"index"
    assert set(target.synced) == {"f", "index"}
    assert outcome.written_bytes == 8


class Failing(Files):
    """Fails at the n-th write."""

    def __init__(self, at):
        super().__init__()
        self.left = at

    def write_at(self, path, offset, data):
        self.left -= 1
        if self.left < 0:
            raise DestinationError("no space")
        super().write_at(path, offset, data)


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_in_any_thread_is_raised_and_what_was_done_is_journalled(tmp_path, threads):
    values = values_of((64, 64))
    plan = join_manifests(rows((64, 64)), rows((64, 64)))
    journal = BandJournal(tmp_path / "journal", {})
    target = Failing(40)
    with pytest.raises(DestinationError, match="no space"):
        execute_plan(plan, Files({"f": bytearray(values.tobytes())}), target, budget(128, threads), journal=journal)
    journal.close()
    again = BandJournal(tmp_path / "journal", {})
    assert len(again) == 40
    good = Files(target.files)
    outcome = execute_plan(plan, Files({"f": bytearray(values.tobytes())}), good, budget(128, threads), journal=again)
    again.close()
    assert outcome.kept_bytes == 40 * 128
    assert outcome.written_bytes == 24 * 128
    assert bytes(good.files["f"]) == values.tobytes()
    assert outcome.output_sums["t"] == compute_box_sums(values.tobytes(), U16, Box.whole((64, 64)), (64, 64))


@settings(max_examples=60)
@given(shapes.filter(lambda s: prod(s) > 1), st.sampled_from([U16, BF16]), st.integers(8, 64), st.data())
def test_a_second_run_keeps_what_is_intact_and_mends_the_rest(tmp_path_factory, shape, wanted, block, data):
    """Whatever was damaged in between is found, also after a cast and in any replica."""
    source_type = F32 if wanted is BF16 else U16
    have, want = data.draw(layouts(shape, source_type)), data.draw(layouts(shape, wanted))
    values = values_of(shape, source_type)
    files, plan = filled(have, values), join_manifests(have, want)
    path = tmp_path_factory.mktemp("journal") / "journal"
    target = Files()
    journal = BandJournal(path, {})
    first = execute_plan(plan, Files(files), target, budget(block), journal=journal)
    journal.close()
    complete = {name: bytes(content) for name, content in target.files.items()}
    for _ in range(data.draw(st.integers(0, 3))):
        name = data.draw(st.sampled_from(sorted(complete)))
        position = data.draw(st.integers(0, len(complete[name]) - 1))
        target.files[name][position] ^= 0x40
    again = BandJournal(path, {})
    second = execute_plan(plan, Files(files), target, budget(block), journal=again)
    again.close()
    gapless = {n: view(complete, c).copy() for n, c in enumerate(c for _, c in want.arrays())}
    for number, (_, chunk) in enumerate(want.arrays()):
        np.testing.assert_array_equal(view(target.files, chunk), gapless[number])
    assert second.kept_bytes + second.written_bytes == first.written_bytes
    assert (second.source_sums, second.output_sums) == (first.source_sums, first.output_sums)


class Stopping(Files):
    """Asks for a stop after a few writes."""

    def __init__(self, stop):
        super().__init__()
        self.stop = stop

    def write_at(self, path, offset, data):
        super().write_at(path, offset, data)
        if self.writes[path] > 1000:
            self.stop.signal = 15


def test_a_stop_is_heeded_after_the_band_at_hand(tmp_path):
    values = values_of((64, 64))
    stop = StopRequest()
    target = Stopping(stop)
    journal = BandJournal(tmp_path / "journal", {})
    with pytest.raises(Interrupted) as raised:
        execute_plan(
            join_manifests(rows((64, 64)), rows((64, 64))), Files({"f": bytearray(values.tobytes())}), target,
            budget(128), journal=journal, stop=stop,
        )  # fmt: skip
    journal.close()
    assert raised.value.exit_code == 143
    assert target.writes["f"] <= 1000 + 128
    assert len(BandJournal(tmp_path / "journal", {})) == target.writes["f"] // 128


def test_an_empty_plan_is_done_at_once():
    outcome = execute_plan(join_manifests(Manifest("x", {}, {}), Manifest("x", {}, {})), Files(), Files(), budget())
    assert outcome.source_sums == {}


def test_a_tensor_that_no_element_was_seen_of_has_a_sum_all_the_same():
    outcome = execute_plan(
        join_manifests(rows((0, 3), F32), rows((0, 3), BF16)), Files({"f": bytearray()}), Files(), budget()
    )
    assert outcome.source_sums == {"t": DigestSums.zero(F32)}
    assert outcome.output_sums == {"t": DigestSums.zero(BF16)}


def test_strides_of_the_layout_helper_are_those_of_numpy():
    (chunk,) = rows((3, 4)).tensors["t"].chunks
    assert chunk.where.strides == compute_dense_strides(U16, (3, 4))
