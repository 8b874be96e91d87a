"""Describes an array by the slices of tensors that it consists of, and rearranges such arrays without their elements.

>>> stack = HubArray.of_tensor(0, (4, 6, 8))  # the experts of a layer, as one tensor
>>> [half.shape for half in split_evenly(stack, 1, 2)]
[(4, 3, 8), (4, 3, 8)]
>>> unstack(stack, 0)[2].slices[0].box
Box(origin=(2, 0, 0), shape=(1, 6, 8))
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from shardctl.base.value import value_class
from shardctl.tensors.box import Box
from shardctl.tensors.views import NO_DIM, ArrayView

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class TensorSlice(NamedTuple):
    """A box of a tensor, and how it runs through an array."""

    tensor: int
    """The tensor's number."""
    box: Box
    view: ArrayView

    def find_dim(self, axis: int) -> int | None:
        """Find the dim of the tensor that runs along a dim of the array; None if all of the slice has one index."""
        return self.view.axes.index(axis) if axis in self.view.axes else None

    def count_along(self, axis: int) -> tuple[int, int, int]:
        """Return the first index along a dim of the array, the step, and how many indices there are."""
        dim = self.find_dim(axis)
        origin = self.view.origin[axis]
        return (origin, 1, 1) if dim is None else (origin, self.view.steps[dim], self.box.shape[dim])

    def narrow(self, axis: int, start: int, stop: int) -> TensorSlice | None:
        """Return what lies between two indices of a dim of the array, in its index space; None if nothing does."""
        origin, step, count = self.count_along(axis)
        first, last = max(-((origin - start) // step), 0), min(-((origin - stop) // step), count)
        if first >= last:
            return None
        dim = self.find_dim(axis)
        if dim is None or (first, last) == (0, count):
            return self
        box = Box(
            (*self.box.origin[:dim], self.box.origin[dim] + first, *self.box.origin[dim + 1 :]),
            (*self.box.shape[:dim], last - first, *self.box.shape[dim + 1 :]),
        )
        return self.move(axis, origin + step * first)._replace(box=box)

    def move(self, axis: int, origin: int, factor: int = 1) -> TensorSlice:
        """Return the slice from `origin` on along a dim of the array, with `factor` times its steps."""
        view = self.view
        steps = tuple(s * factor if a == axis else s for a, s in zip(view.axes, view.steps, strict=True))
        return self._replace(view=ArrayView(_set_item(view.origin, axis, origin), view.axes, steps))


@value_class
class HubArray:
    """An array made of slices of tensors; where it has none, it has zeros."""

    shape: tuple[int, ...]
    """In elements."""
    slices: tuple[TensorSlice, ...]

    @classmethod
    def of_tensor(cls, tensor: int, shape: tuple[int, ...]) -> HubArray:
        """Return a tensor of this shape as an array."""
        return cls(shape, (TensorSlice(tensor, Box.whole(shape), ArrayView.whole(len(shape))),))


def cut(array: HubArray, axis: int, start: int, stop: int) -> HubArray:
    """Return the indices from `start` to `stop` of a dim."""
    found = (each.narrow(axis, start, stop) for each in array.slices)
    moved = (each.move(axis, each.view.origin[axis] - start) for each in found if each is not None)
    return HubArray(_set_item(array.shape, axis, stop - start), tuple(moved))


def split_evenly(array: HubArray, axis: int, count: int) -> list[HubArray]:
    """Split a dim into at most `count` equal parts, the last perhaps shorter, as `torch.chunk` does."""
    extent = array.shape[axis]
    size = max(-(-extent // count), 1)
    return [cut(array, axis, start, min(start + size, extent)) for start in range(0, extent, size)]


def join(arrays: Sequence[HubArray], axis: int) -> HubArray:
    """Join arrays along a dim."""
    slices: list[TensorSlice] = []
    start = 0
    for array in arrays:
        slices += [each.move(axis, each.view.origin[axis] + start) for each in array.slices]
        start += array.shape[axis]
    return HubArray(_set_item(arrays[0].shape, axis, start), tuple(slices))


def unstack(array: HubArray, axis: int) -> list[HubArray]:
    """Return the array of each index of a dim, without that dim."""
    found: dict[int, list[TensorSlice]] = defaultdict(list)
    for each in array.slices:
        origin, step, count = each.count_along(axis)
        for index in range(origin, origin + step * count, step):
            one = each if count == 1 else each.narrow(axis, index, index + 1)
            if one is not None:
                found[index].append(_drop_dim(one, axis))
    shape = (*array.shape[:axis], *array.shape[axis + 1 :])
    return [HubArray(shape, tuple(found[index])) for index in range(array.shape[axis])]


def transpose(array: HubArray, first: int, second: int) -> HubArray:
    """Swap two dims."""
    order = list(range(len(array.shape)))
    order[first], order[second] = order[second], order[first]
    slices = []
    for each in array.slices:
        axes = tuple(axis if axis == NO_DIM else order[axis] for axis in each.view.axes)
        view = ArrayView(tuple(each.view.origin[dim] for dim in order), axes, each.view.steps)
        slices.append(each._replace(view=view))
    return HubArray(tuple(array.shape[dim] for dim in order), tuple(slices))


def interleave(array: HubArray, axis: int, groups: int, runs: int) -> HubArray:
    """Interleave the `runs` equal runs of each of `groups` equal groups of a dim: first element of each, then second.

    It is what a reshape to `(groups, runs, length)`, a transposition of the last two and the way back give.
    """
    length = array.shape[axis] // (groups * runs)
    slices = []
    for each in array.slices:
        for run, inside in _split_slice(each, axis, length):
            group, position = divmod(run, runs)
            within = inside.view.origin[axis] - run * length
            slices.append(inside.move(axis, group * runs * length + within * runs + position, runs))
    return replace(array, slices=tuple(slices))


def flatten_first(array: HubArray) -> HubArray:
    """Merge the first two dims."""
    rows = unstack(array, 0)
    return join(rows, 0) if rows else HubArray((0, *array.shape[2:]), ())


def add_first_dim(array: HubArray) -> HubArray:
    """Add a dim of one index before the others."""
    slices = []
    for each in array.slices:
        axes = tuple(axis if axis == NO_DIM else axis + 1 for axis in each.view.axes)
        slices.append(each._replace(view=ArrayView((0, *each.view.origin), axes, each.view.steps)))
    return HubArray((1, *array.shape), tuple(slices))


def pad_end(array: HubArray, axis: int, extent: int) -> HubArray:
    """Add zeros at the end of a dim, so that it has this extent."""
    return replace(array, shape=_set_item(array.shape, axis, extent))


def _split_slice(each: TensorSlice, axis: int, length: int) -> Iterator[tuple[int, TensorSlice]]:
    """Yield what of a slice lies in each run of `length` indices of a dim, with the run's number."""
    origin, step, count = each.count_along(axis)
    for run in range(origin // length, (origin + step * (count - 1)) // length + 1):
        inside = each.narrow(axis, run * length, (run + 1) * length)
        if inside is not None:
            yield run, inside


def _drop_dim(each: TensorSlice, axis: int) -> TensorSlice:
    """Return a slice of one index along a dim in an array without that dim."""
    view = each.view
    axes = tuple(NO_DIM if a == axis else a - (a > axis) for a in view.axes)
    return each._replace(view=ArrayView((*view.origin[:axis], *view.origin[axis + 1 :]), axes, view.steps))


def _set_item(items: tuple[int, ...], position: int, value: int) -> tuple[int, ...]:
    return (*items[:position], value, *items[position + 1 :])
