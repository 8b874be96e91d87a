"""Views against NumPy: whatever part of an array is stored, and however, the tensor's elements are found in it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import UnsupportedError
from shardctl.tensors.box import Box, merge_boxes
from shardctl.tensors.manifest import Chunk, ConstantFill, Region, compute_dense_strides
from shardctl.tensors.views import ArrayView

U16 = BY_NAME["U16"]


@st.composite
def placed(draw):
    """An array's shape, a tensor's shape and a view that places the tensor inside the array."""
    ndim = draw(st.integers(0, 4))
    axes = tuple(draw(st.permutations(range(ndim)))[: draw(st.integers(0, ndim))])
    origin = tuple(draw(st.integers(0, 3)) for _ in range(ndim))
    steps = tuple(draw(st.integers(1, 3)) for _ in axes)
    shape = tuple(draw(st.integers(1, 4)) for _ in axes)
    view = ArrayView(origin, axes, steps)
    room = tuple(stop + draw(st.integers(0, 2)) for stop in view.image(shape).stop)
    return room, shape, view


def taken(array, view, shape):
    """The tensor, by NumPy."""
    index = [slice(o, o + 1) for o in view.origin]
    for axis, step, extent in zip(view.axes, view.steps, shape, strict=True):
        start = view.origin[axis]
        index[axis] = slice(start, start + step * (extent - 1) + 1, step)
    rest = [d for d in range(array.ndim) if d not in view.axes]
    return array[tuple(index)].transpose([*view.axes, *rest]).reshape(shape)


def tiles(draw, shape):
    """Boxes that partition an array of `shape`."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 3)) if shape else 0):
        at = draw(st.integers(0, len(shape) - 1))
        place = draw(st.integers(0, shape[at]))
        split = []
        for box in boxes:
            for start, stop in ((0, place), (place, shape[at])):
                origin, extent = list(Box.whole(shape).origin), list(shape)
                origin[at], extent[at] = start, stop - start
                if all(extent) and (part := box.intersect(Box(tuple(origin), tuple(extent)))):
                    split.append(part)
        boxes = split
    return boxes


@given(placed(), st.data())
def test_every_element_is_found_where_numpy_finds_it(case, data):
    room, shape, view = case
    array = np.arange(np.prod(room, dtype=int), dtype="<u2").reshape(room)
    expected = taken(array, view, shape)
    part = Box(tuple(data.draw(st.integers(0, 5)) for _ in shape), shape)
    seen = np.zeros(shape, int)
    for number, box in enumerate(tiles(data.draw, room)):
        order = data.draw(st.permutations(range(len(room))))  # the storage may itself be permuted
        stored = array[box.slices()].transpose(order).copy(order="C")
        strides = [0] * len(room)
        for dim, stride in zip(order, stored.strides, strict=True):
            strides[dim] = stride
        pulled = view.map_chunk_part(Chunk(box, U16, Region("f", 0, tuple(strides)), f"tile{number}"), part)
        if pulled is None:
            continue
        assert pulled.name == f"tile{number}"
        assert part.contains(pulled.box)
        where = pulled.where
        found = np.ndarray(pulled.box.shape, "<u2", stored.tobytes(), where.offset, where.strides)
        assert (found == expected[pulled.box.slices(part.origin)]).all()
        seen[pulled.box.slices(part.origin)] += 1
    assert (seen == 1).all()


@given(placed(), st.data())
def test_the_image_is_the_smallest_box_that_holds_the_part(case, data):
    room, shape, view = case
    within = Box(
        tuple(data.draw(st.integers(0, n - 1)) for n in shape),
        shape,
    )
    within = within.intersect(Box.whole(shape)) or Box.whole(shape)
    marked = np.zeros(room, bool)
    for at in np.ndindex(*shape):
        if all(o <= i < o + n for i, o, n in zip(at, within.origin, within.shape, strict=True)):
            place = list(view.origin)
            for axis, step, i in zip(view.axes, view.steps, at, strict=True):
                place[axis] += step * i
            marked[tuple(place)] = True
    image = view.image(shape, within)
    found = np.argwhere(marked)
    if room:
        assert image.origin == tuple(found.min(0))
        assert image.stop == tuple(found.max(0) + 1)
    assert not view.dense or marked.sum() == image.size


def test_what_the_array_does_not_hold_is_not_there():
    view = ArrayView((2, 4, 0), (1, 2))
    whole = Box.whole((4, 8))

    def part(origin, shape):
        return view.map_chunk_part(
            Chunk(Box(origin, shape), U16, Region("f", 0, compute_dense_strides(U16, shape))), whole
        )

    assert part((0, 0, 0), (2, 16, 8)) is None  # experts 0 and 1
    assert part((2, 0, 0), (1, 4, 8)) is None  # the rows of the gate
    assert part((0, 0, 0), (4, 16, 8)).box == whole
    assert part((2, 6, 0), (1, 2, 8)).box == Box((2, 0), (2, 8))


def test_what_no_file_holds_stays_a_fill():
    chunk = Chunk(Box.whole((2, 4)), U16, ConstantFill(b"\0\0"))
    pulled = ArrayView((1, 0), (1,)).map_chunk_part(chunk, Box.whole((4,)))
    assert (pulled.box, pulled.where) == (Box.whole((4,)), chunk.where)


def test_elements_narrower_than_a_byte_are_taken_apart_between_bytes_only():
    f4 = BY_NAME["F4"]
    chunk = Chunk(Box.whole((2, 8)), f4, Region("f", 100, compute_dense_strides(f4, (2, 8))), "blocks")
    pulled = ArrayView((1, 2), (1,)).map_chunk_part(chunk, Box.whole((4,)))
    assert pulled.where == Region("f", 105, (1,))
    for view, shape in [
        (ArrayView((1, 1), (1,)), (4,)),
        (ArrayView((0, 0), (1,), (2,)), (4,)),
        (ArrayView((0, 0), (1, 0)), (8, 2)),
    ]:
        with pytest.raises(UnsupportedError, match="blocks is F4 and cannot be taken apart"):
            view.map_chunk_part(chunk, Box.whole(shape))


@pytest.mark.parametrize(("axes", "steps"), [((0, 0), ()), ((2,), ()), ((0,), (0,)), ((0,), (1, 1))])
def test_a_view_that_makes_no_sense_is_refused(axes, steps):
    with pytest.raises(ValueError, match=r"axes|steps"):
        ArrayView((0, 0), axes, steps)


def test_all_experts_of_both_halves_become_one_box():
    halves = [ArrayView((e, 4 * half, 0), (1, 2)) for e in range(8) for half in range(2)]
    assert merge_boxes(view.image((4, 6)) for view in halves) == [Box.whole((8, 8, 6))]
    rows = Box((1, 0), (2, 6))
    assert merge_boxes(view.image((4, 6), rows) for view in halves) == [
        Box((0, 1, 0), (8, 2, 6)),
        Box((0, 5, 0), (8, 2, 6)),
    ]
