"""The join of two manifests: everything wanted has exactly one source, or an error says what is missing and where."""

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import CoverageError, SourceError, UnsupportedError
from shardctl.tensors.box import Box, BoxIndex, list_flat_boxes
from shardctl.tensors.copyplan import cover_tensor, join_manifests
from shardctl.tensors.manifest import (
    CheckpointFile,
    Chunk,
    ConstantFill,
    Manifest,
    Region,
    Tensor,
    compute_dense_strides,
    narrow_chunk,
)

BF16, F32, F4 = BY_NAME["BF16"], BY_NAME["F32"], BY_NAME["F4"]


def stored(boxes, shape, *, dtype=BF16, name="w", affine=""):
    """A manifest with each box dense in a file of its own, named after its position."""
    chunks = tuple(
        Chunk(box, dtype, Region(f"shard-{i}", 0, compute_dense_strides(dtype, box.shape)), name, affine)
        for i, box in enumerate(boxes)
    )
    files = {f"shard-{i}": CheckpointFile(f"shard-{i}", dtype.nbytes(box.shape)) for i, box in enumerate(boxes)}
    return Manifest("x", {name: Tensor(name, dtype, tuple(shape), chunks)}, files)


def list_strided_copies(copy):
    """Every `(from, to)`: equal boxes with a stride rule on both sides, as the engine fills each wanted box."""
    index = BoxIndex([chunk.box for chunk in copy.reads])
    return [
        (narrow_chunk(copy.reads[position], common), narrow_chunk(wanted, common))
        for wanted in copy.target.chunks
        for position, common in index.find_overlaps(wanted.box)
    ]


def rows(count, shape):
    """Boxes that divide dim 0 into equal parts."""
    each = shape[0] // count
    return [Box((i * each, *(0 for _ in shape[1:])), (each, *shape[1:])) for i in range(count)]


def columns(count, shape):
    each = shape[1] // count
    return [Box((0, i * each), (shape[0], each)) for i in range(count)]


WHOLE = [Box.whole((8, 8))]


def test_a_missing_shard_is_named_with_its_tensor_its_box_and_where_the_rest_is():
    four = rows(4, (8, 8))
    have = stored([four[0], four[1], four[3]], (8, 8), name="layers.0.w")
    with pytest.raises(CoverageError) as raised:
        join_manifests(have, stored(WHOLE, (8, 8), name="layers.0.w"))
    assert raised.value.message == "layers.0.w [8, 8]: elements [4:6, 0:8] are stored in no file"
    assert raised.value.hint == "the rest of it is in shard-0 ... shard-2 (3 files); is a shard missing?"
    assert raised.value.exit_code == 4


def test_further_holes_are_counted():
    with pytest.raises(CoverageError, match=r"elements \[1:2, 0:8\] are stored in no file \(and 1 more holes\)"):
        join_manifests(stored([Box((0, 0), (1, 8)), Box((2, 0), (1, 8))], (4, 8)), stored([Box.whole((4, 8))], (4, 8)))


def test_a_single_missing_element_in_the_middle_is_found():
    hole = Box((3, 5), (1, 1))
    with pytest.raises(CoverageError, match=r"\[3:4, 5:6\]"):
        join_manifests(stored(WHOLE[0].subtract(hole), (8, 8)), stored(WHOLE, (8, 8)))


def test_an_absent_tensor_is_named():
    with pytest.raises(CoverageError, match="b is not in the source, but the result needs it"):
        join_manifests(stored(WHOLE, (8, 8), name="a"), stored(WHOLE, (8, 8), name="b"))


def test_a_tensor_that_is_stored_nowhere_says_so():
    with pytest.raises(CoverageError) as raised:
        join_manifests(stored([], (8, 8)), stored(WHOLE, (8, 8)))
    assert "no file at all" in raised.value.hint


def test_shapes_must_agree():
    with pytest.raises(SourceError, match=r"w is \[8, 8\] in the source, but the result needs \[8, 9\]"):
        join_manifests(stored(WHOLE, (8, 8)), stored([Box.whole((8, 9))], (8, 9)))


def test_one_tensor_has_one_stored_dtype():
    (tensor,) = stored(rows(2, (8, 8)), (8, 8)).tensors.values()
    first, second = tensor.chunks
    mixed = Tensor("w", BF16, (8, 8), (first, Chunk(second.box, F32, second.where)))
    with pytest.raises(UnsupportedError, match=r"stored as F32 at \[4:8, 0:8\] but as BF16 elsewhere"):
        join_manifests(Manifest("x", {"w": mixed}, {}), stored(WHOLE, (8, 8)))


def test_a_named_change_is_no_hindrance_whichever_side_has_it():
    plain, shifted = stored(WHOLE, (8, 8)), stored(WHOLE, (8, 8), affine="gamma-1")
    for have, want in ((shifted, plain), (plain, shifted), (shifted, shifted)):
        (copy,) = join_manifests(have, want).copies
        assert [chunk.affine for chunk in copy.reads] == [chunk.affine for chunk in have.tensors["w"].chunks]


def test_a_cut_inside_a_byte_is_refused():
    halves = [Box((0, 0), (4, 5)), Box((0, 5), (4, 3))]
    want = Manifest(
        "x",
        {"w": Tensor("w", F4, (4, 8), tuple(Chunk(b, F4, Region("f", 0, (4, 1)), "w") for b in halves))},
        {"f": CheckpointFile("f", 16)},
    )
    have = stored([Box.whole((4, 8))], (4, 8), dtype=F4)
    with pytest.raises(UnsupportedError, match="cannot be cut"):
        list_strided_copies(join_manifests(have, want).copies[0])


def test_replicas_are_read_once():
    have = stored([Box.whole((8, 8))] * 5, (8, 8))
    plan = join_manifests(have, stored(WHOLE * 3, (8, 8)))
    assert plan.read_bytes == 128
    assert [chunk.where.file for chunk in plan.copies[0].reads] == ["shard-0"]
    assert len(list_strided_copies(plan.copies[0])) == 3


def test_overlapping_boxes_are_read_without_their_common_part_twice():
    have = stored([Box((0, 0), (5, 8)), Box((3, 0), (5, 8))], (8, 8))
    assert join_manifests(have, stored(WHOLE, (8, 8))).read_bytes == 128


def test_fills_cost_no_reading():
    real = Chunk(Box((0, 0), (6, 8)), BF16, Region("f", 0, (16, 2)))
    have = Manifest(
        "x", {"w": Tensor("w", BF16, (8, 8), (real, Chunk(Box((6, 0), (2, 8)), BF16, ConstantFill(b"\0\0"))))}, {}
    )
    assert join_manifests(have, stored(WHOLE, (8, 8))).read_bytes == 96


def test_tensors_are_copied_in_the_order_in_which_they_are_stored():
    def manifest(offsets):
        return Manifest("x", {
            name: Tensor(name, BF16, (2,), (Chunk(Box((0,), (2,)), BF16, Region(file, offset, (2,)), name),))
            for name, (file, offset) in offsets.items()
        }, {})  # fmt: skip

    have = manifest({"a": ("two", 0), "b": ("one", 8), "c": ("one", 4)})
    assert [copy.source.name for copy in join_manifests(have, have).copies] == ["c", "b", "a"]


@st.composite
def covers(draw, shape):
    """Boxes that together cover a tensor, some twice, from flat runs and from cuts."""
    size = int(np.prod(shape))
    bounds = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=5))})
    boxes = [box for a, b in pairwise(bounds) for box in list_flat_boxes(shape, a, b)]
    return draw(st.permutations(boxes + draw(st.lists(st.sampled_from(boxes), max_size=3))))


shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


@settings(max_examples=200)
@given(shapes, st.data())
def test_every_wanted_element_has_exactly_one_source(shape, data):
    have, want = stored(data.draw(covers(shape)), shape), stored(data.draw(covers(shape)), shape)
    (copy,) = join_manifests(have, want).copies
    seen = {position: np.zeros(shape, int) for position in range(len(want.files))}
    for source, target in list_strided_copies(copy):
        assert source.box == target.box
        seen[int(target.where.file.removeprefix("shard-"))][source.box.slices()] += 1
    for position, chunk in enumerate(want.tensors["w"].chunks):
        expected = np.zeros(shape, int)
        expected[chunk.box.slices()] = 1
        np.testing.assert_array_equal(seen[position], expected)
    assert copy.read_bytes == BF16.nbytes(shape)


@settings(max_examples=200)
@given(shapes, st.data())
def test_a_hole_anywhere_is_found(shape, data):
    boxes = data.draw(covers(shape))
    lost = data.draw(st.sampled_from(boxes))
    rest = [box for box in boxes if box.intersect(lost) is None]
    with pytest.raises(CoverageError):
        join_manifests(stored(rest, shape), stored([Box.whole(shape)], shape))
    with pytest.raises(CoverageError):
        cover_tensor(stored(rest, shape).tensors["w"])


def seconds(action):
    began = time.process_time()
    result = action()
    return time.process_time() - began, result


@pytest.mark.parametrize(
    ("have", "want"),
    [
        (rows(512, (16384, 16384)), rows(1024, (16384, 16384))),
        (columns(512, (16384, 16384)), columns(1024, (16384, 16384))),
        (list_flat_boxes((16384, 16384), 0, 1 << 28), rows(1024, (16384, 16384))),
        ([b for i in range(512) for b in list_flat_boxes((16381, 77), i * 2464, min((i + 1) * 2464, 16381 * 77))],
         rows(1, (16381, 77))),
    ],
)  # fmt: skip
def test_hundreds_of_ranks_join_hundreds_in_a_moment(have, want):
    shape = max(box.stop for box in want)
    took, plan = seconds(lambda: join_manifests(stored(have, shape), stored(want, shape)))
    assert took < 2
    assert plan.copies[0].read_bytes == BF16.nbytes(shape)


def test_rows_become_columns_as_strided_copies_and_not_as_runs():
    """Llama-405B's largest matrices to tp8: millions of contiguous runs, and one copy per pair of boxes."""
    shape = (16384, 53248)
    took, plan = seconds(lambda: join_manifests(stored([Box.whole(shape)], shape), stored(columns(8, shape), shape)))
    copies = list_strided_copies(plan.copies[0])
    assert len(copies) == 8
    assert sum(source.box.shape[0] for source, _ in copies) == 8 * 16384  # runs
    assert {source.where.strides for source, _ in copies} == {(2 * 53248, 2)}
    assert took < 2


def test_a_grid_of_boxes_meets_another_grid():
    shape = (4096, 4096)

    def grid(a, b):
        return [
            Box((i * 4096 // a, j * 4096 // b), (4096 // a, 4096 // b)) for i in range(a) for j in range(b)
        ]  # fmt: skip

    took, plan = seconds(lambda: join_manifests(stored(grid(32, 16), shape), stored(grid(16, 64), shape)))
    assert took < 2
    assert len(list_strided_copies(plan.copies[0])) == 32 * 64
