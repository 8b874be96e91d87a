"""The piece algebra against NumPy: every expression is worked out twice, on pieces and on arrays."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import PartitionError
from shardctl.libraries.arrays.composite import CompositeArray, interleave_arrays, join_arrays, stack_arrays
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Chunk, Region, compute_dense_strides

if TYPE_CHECKING:
    from numpy.typing import NDArray

DTYPE = BY_NAME["I32"]


@dataclass
class Both:
    """An expression, and the array that NumPy makes of the same one."""

    pieces: CompositeArray
    array: NDArray[np.int32]


def tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, NDArray[np.int32]]:
    """Every element of every tensor is another number, and none is 0."""
    start, made = 1, {}
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        made[name] = np.arange(start, start + size, dtype=np.int32).reshape(shape)
        start += size
    return made


def leaf(name: str, values: NDArray[np.int32]) -> Both:
    return Both(CompositeArray.whole(name, values.shape), values)


def filled(composite: CompositeArray, values: dict[str, NDArray[np.int32]]) -> NDArray[np.int32]:
    """The array that a writer makes of the pieces: each chunk copied by its strides, all else zero."""
    buffer = np.zeros(composite.size, np.int32)
    stored = Chunk(
        Box.whole(composite.shape), DTYPE, Region("f", 0, compute_dense_strides(DTYPE, composite.shape)), "a"
    )
    for piece in composite.pieces:
        chunk = piece.view.map_chunk_part(stored, piece.box)
        assert chunk is not None
        assert chunk.box == piece.box
        assert isinstance(chunk.where, Region)
        view = np.ndarray(chunk.box.shape, np.int32, buffer, chunk.where.offset, chunk.where.strides)
        assert not view.any(), "no element is written twice"
        view[...] = values[piece.tensor][piece.box.slices()]
    return buffer.reshape(composite.shape)


@st.composite
def expressions(draw: st.DrawFn) -> tuple[Both, dict[str, NDArray[np.int32]]]:
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    values = tensors(dict.fromkeys("abcd", (rows, columns)))
    made = [leaf(name, array) for name, array in values.items()]
    for _ in range(draw(st.integers(0, 6))):
        operation = draw(st.sampled_from(["join", "stack", "interleave", "part", "share", "permuted", "pad"]))
        one = made.pop(draw(st.integers(0, len(made) - 1)))
        ndim = one.array.ndim
        dim = draw(st.integers(0, ndim - 1))
        alike = [m for m in made if m.array.shape == one.array.shape]
        if operation in {"join", "stack", "interleave"}:
            group = [one, *alike]
            made = [m for m in made if all(m is not other for other in alike)]
            pieces, arrays = [m.pieces for m in group], [m.array for m in group]
            if operation == "join":
                one = Both(join_arrays(pieces, dim), np.concatenate(arrays, dim))
            elif operation == "stack":
                one = Both(stack_arrays(pieces), np.stack(arrays))
            else:
                turns = np.stack(arrays, dim + 1)
                shape = list(one.array.shape)
                shape[dim] *= len(arrays)
                one = Both(interleave_arrays(pieces, dim), turns.reshape(shape))
        elif operation == "part":
            start = draw(st.integers(0, one.array.shape[dim] - 1))
            stop = draw(st.integers(start + 1, one.array.shape[dim]))
            one = Both(one.pieces.part(dim, start, stop), np.take(one.array, range(start, stop), dim))
        elif operation == "share" and one.array.shape[dim] % 2 == 0:
            which = draw(st.integers(0, 1))
            one = Both(one.pieces.share(dim, which, 2), np.split(one.array, 2, dim)[which])
        elif operation == "permuted":
            axes = draw(st.permutations(range(ndim)))
            one = Both(one.pieces.permute_dims(axes), one.array.transpose(axes))
        elif operation == "pad":
            more = draw(st.integers(1, 3))
            if draw(st.booleans()):
                last = [one.array, *[one.array[-1:]] * more]
                one = Both(one.pieces.padded_with_last(len(one.array) + more), np.concatenate(last))
        made.append(one)
    return made[draw(st.integers(0, len(made) - 1))], values


@settings(max_examples=300, deadline=None)
@given(expressions())
def test_pieces_are_what_numpy_makes_of_the_same_expression(case):
    both, values = case
    assert both.pieces.shape == both.array.shape
    np.testing.assert_array_equal(filled(both.pieces, values), both.array)
    assert both.pieces.padding == 0


def test_zeros_fill_what_is_padded_and_are_counted():
    values = tensors({"a": (5, 3)})
    padded = leaf("a", values["a"]).pieces.pad_rows(8)
    assert padded.padding == 9
    np.testing.assert_array_equal(filled(padded, values), np.pad(values["a"], ((0, 3), (0, 0))))
    first, second = padded.shares(0, 2)
    assert (first.padding, second.padding) == (0, 9)
    np.testing.assert_array_equal(filled(second, values)[1:], 0)
    assert not padded.part(0, 6, 8).pieces
    assert padded.part(0, 6, 8).padding == 6


def test_a_hole_is_a_mistake_and_never_padding():
    row = leaf("a", tensors({"a": (2, 3)})["a"]).pieces
    holed = CompositeArray((5, 3), join_arrays([row.pad_rows(3), row]).pieces)
    with pytest.raises(ValueError, match="leave holes"):
        _ = holed.padding


def test_stretches_that_go_on_are_one_piece_again():
    heads = leaf("q", tensors({"q": (64, 4)})["q"]).pieces.shares(0, 16)
    assert len(join_arrays(heads).pieces) == 1
    assert len(join_arrays(list(reversed(heads))).pieces) == 16


def test_an_index_of_a_stack_is_the_array_that_was_stacked():
    values = tensors({"a": (2, 3), "b": (2, 3)})
    both = stack_arrays([leaf(n, v).pieces for n, v in values.items()])
    np.testing.assert_array_equal(filled(both.at(0, 1), values), values["b"])
    np.testing.assert_array_equal(filled(both.at(1, 1), values), np.stack([v[1] for v in values.values()]))


def test_parts_that_take_turns_are_set_apart_and_stacked_again():
    values = tensors({"both": (3, 4, 6)})
    whole = CompositeArray.whole("both", (3, 4, 6)).unfold_dim(2)
    apart = whole.permute_dims((3, 0, 2, 1)).split()
    stacked = stack_arrays([each.at(0, expert) for expert in range(3) for each in apart])
    assert {piece.turns for piece in stacked.pieces} == {2}
    wanted = [values["both"][expert, :, part::2].T for expert in range(3) for part in range(2)]
    unfolded = {"both": values["both"].reshape(3, 4, 3, 2)}
    np.testing.assert_array_equal(filled(stacked, unfolded), np.stack(wanted))
    np.testing.assert_array_equal(filled(stacked.part(1, 1, 3), unfolded), np.stack(wanted)[:, 1:3])


def test_parts_that_would_not_be_equal_are_refused_by_name():
    whole = CompositeArray.whole("model.norm.weight", (6, 2))
    with pytest.raises(
        PartitionError, match=re.escape("model.norm.weight: 6 rows or columns cannot be divided into 4 equal parts")
    ):
        whole.share(0, 1, 4)
    with pytest.raises(PartitionError, match="no part 4:9"):
        whole.part(0, 4, 9)
    with pytest.raises(PartitionError, match="cannot be padded to 4"):
        whole.pad_rows(4)
