"""Boxes against NumPy masks: what is covered, what is left, and how fast it is found."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardctl.tensors.box import Box, BoxIndex, list_flat_boxes, make_disjoint, merge_boxes, subtract_all

SHAPE = (5, 4, 6)


@st.composite
def box_in(draw, shape=SHAPE):
    origin = [draw(st.integers(0, n)) for n in shape]
    return Box(tuple(origin), tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, origin, strict=True)))


def mask(boxes, shape=SHAPE):
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[box.slices()] += 1
    return counts


@given(box_in(), box_in())
def test_intersection_and_subtraction_are_the_set_operations(a, b):
    both = a.intersect(b)
    np.testing.assert_array_equal(mask([both] if both else []), mask([a]) & mask([b]))
    np.testing.assert_array_equal(mask(a.subtract(b)), mask([a]) * (1 - mask([b])))


@given(st.lists(box_in(), max_size=8))
def test_disjoint_keeps_the_union_and_counts_each_element_once(boxes):
    parts = make_disjoint(boxes)
    np.testing.assert_array_equal(mask([part for _, part in parts]), np.minimum(mask(boxes), 1))
    assert all(boxes[i].contains(part) for i, part in parts)


@given(box_in(), st.lists(box_in(), max_size=6))
def test_subtracting_many(box, others):
    np.testing.assert_array_equal(mask(subtract_all(box, others)), mask([box]) * (1 - np.minimum(mask(others), 1)))


@given(st.lists(box_in(), max_size=10), box_in())
def test_index_finds_exactly_the_overlaps(boxes, query):
    expected = [(i, b.intersect(query)) for i, b in enumerate(boxes) if b.intersect(query)]
    assert list(BoxIndex(boxes).find_overlaps(query)) == expected


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_flat_ranges_are_runs_of_the_row_major_order(shape, data):
    size = int(np.prod(shape))
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    boxes = list_flat_boxes(shape, start, stop)
    numbers = np.arange(size).reshape(shape)
    found = [n for box in boxes for n in numbers[(*box.slices(), ...)].ravel().tolist()]
    assert found == list(range(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


def test_a_large_join_is_found_quickly():
    rows = 1024 * 512
    index = BoxIndex([Box((i * (rows // 1024), 0), (rows // 1024, 8)) for i in range(1024)])
    began = time.process_time()
    hits = sum(1 for i in range(512) for _ in index.find_overlaps(Box((i * (rows // 512), 0), (rows // 512, 8))))
    assert hits == 1024
    assert time.process_time() - began < 0.5  # a quadratic search needs seconds; this one, some milliseconds


@pytest.mark.parametrize(("origin", "shape"), [((0,), (1, 1)), ((-1,), (1,)), ((0,), (-1,))])
def test_impossible_boxes_are_refused(origin, shape):
    with pytest.raises(ValueError, match="box"):
        Box(origin, shape)


@given(st.lists(box_in(), max_size=8))
def test_merged_boxes_hold_the_same_elements(boxes):
    parts = [box for _, box in make_disjoint(boxes)]
    joined = merge_boxes(parts)
    assert len(joined) <= len(parts)
    np.testing.assert_array_equal(mask(joined), mask(parts))


def test_boxes_that_touch_become_one():
    boxes = [Box((0, 0), (2, 2)), Box((0, 2), (2, 2)), Box((2, 0), (2, 4)), Box((5, 0), (1, 4))]
    assert merge_boxes(boxes) == [Box((0, 0), (4, 4)), Box((5, 0), (1, 4))]
    assert merge_boxes([]) == []
    assert merge_boxes([Box((), ())]) == [Box((), ())]
