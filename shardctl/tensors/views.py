"""Describes how a tensor runs through a larger array: stacked, joined, permuted or interleaved.

>>> view = ArrayView((3, 0, 0), (1, 2))  # expert 3 of a stack
>>> view.image((4, 8))
Box(origin=(3, 0, 0), shape=(1, 4, 8))
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from shardctl.base.errors import UnsupportedError
from shardctl.base.value import value_class
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Chunk, ConstantFill, Region

if TYPE_CHECKING:
    from collections.abc import Sequence

NO_DIM: Final = -1
"""What stands for the dim of an array where a tensor's dim of one index runs along none."""


@value_class
class ArrayView:
    """A tensor, or a box of one, as it runs through an array.

    Element `i` of it is the element ``origin + sum(steps[d] * i[d] along axes[d])`` of the array. An expert of a stack
    lies at an index of dim 0, the up half of a fused gate and up at a row offset, a transposed weight has its axes
    swapped, and every second row has a step of 2:

    >>> ArrayView((3, 0, 0), (1, 2)).image((4, 8))  # expert 3
    Box(origin=(3, 0, 0), shape=(1, 4, 8))
    >>> ArrayView((0, 1), (1, 0), (1, 2)).image((8, 4))  # odd columns, transposed
    Box(origin=(0, 1), shape=(7, 8))
    """

    origin: tuple[int, ...]
    """Where the first element lies: one index a dim of the array."""
    axes: tuple[int, ...]
    """For each dim of the tensor, the dim of the array that it runs along; each at most once.

    `NO_DIM` for a dim of one index, which the array has not.
    """
    steps: tuple[int, ...] = ()
    """For each dim of the tensor, elements of the array from one index to the next; empty means all 1."""

    def __post_init__(self) -> None:
        axes = [axis for axis in self.axes if axis != NO_DIM]
        if len(set(axes)) != len(axes) or not all(0 <= a < len(self.origin) for a in axes):
            raise ValueError(f"axes {self.axes} are not distinct dims of an array of {len(self.origin)}")
        if not self.steps:
            object.__setattr__(self, "steps", (1,) * len(self.axes))
        if len(self.steps) != len(self.axes) or min(self.steps, default=1) < 1:
            raise ValueError(f"steps {self.steps} are not one positive number for each of the axes {self.axes}")

    @classmethod
    def whole(cls, ndim: int) -> ArrayView:
        """Return the view of a tensor that is the array."""
        return cls((0,) * ndim, tuple(range(ndim)))

    @property
    def dense(self) -> bool:
        """Whether the image of a box is that many elements and no others."""
        return all(step == 1 for step in self.steps)

    def image(self, shape: Sequence[int], within: Box | None = None) -> Box:
        """Return the smallest box of the array that holds the part `within` (default: all) of a tensor of `shape`."""
        box = within or Box.whole(shape)
        origin, extents = list(self.origin), [1] * len(self.origin)
        for axis, step, start, extent in zip(self.axes, self.steps, box.origin, box.shape, strict=True):
            if axis == NO_DIM:
                continue
            origin[axis] += step * start
            extents[axis] = step * (extent - 1) + 1 if extent else 0
        return Box(tuple(origin), tuple(extents))

    def map_chunk_part(self, chunk: Chunk, part: Box) -> Chunk | None:
        """Return what a chunk of the array, stored or yet to be written, holds of `part` of the tensor.

        None if nothing.

        `part` is the box of the tensor that runs through this view, its first element at `origin`. Raises
        UnsupportedError if that cuts through a unit of a type narrower than a byte.
        """
        if isinstance(chunk.where, Region) and chunk.dtype.unit_elements == 1:
            found = _pull_whole_bytes(self, chunk.box, part, chunk.where.strides)
            if found is None:
                return None
            box, shift, strides = found
            where = Region(chunk.where.file, chunk.where.offset + shift, strides)
            return Chunk(box, chunk.dtype, where, chunk.name, chunk.affine)
        within = self.within(chunk.box, part.shape)
        if within is None:
            return None
        box = Box(tuple(a + b for a, b in zip(part.origin, within.origin, strict=True)), within.shape)
        if isinstance(chunk.where, ConstantFill):
            return replace(chunk, box=box)
        first, per_unit = self.first(chunk.box, within), chunk.dtype.unit_elements
        if per_unit > 1 and first:
            self._check_units(chunk, first[-1], within, per_unit)
            first[-1] //= per_unit
        shift, strides = self.compute_strides(first, chunk.where.strides)
        return replace(chunk, box=box, where=replace(chunk.where, offset=chunk.where.offset + shift, strides=strides))

    def first(self, box: Box, within: Box) -> list[int]:
        """Return where in `box` of the array the tensor's part `within` begins."""
        first = [start - base for start, base in zip(self.origin, box.origin, strict=True)]
        for axis, step, start in zip(self.axes, self.steps, within.origin, strict=True):
            if axis != NO_DIM:
                first[axis] += step * start
        return first

    def compute_strides(self, first: Sequence[int], strides: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """Return the byte offset of the unit at `first` of an array of `strides`, and the tensor's strides."""
        shift = sum(a * b for a, b in zip(first, strides, strict=True))
        pairs = zip(self.axes, self.steps, strict=True)
        return shift, tuple(strides[axis] * step if axis != NO_DIM else 0 for axis, step in pairs)

    def within(self, box: Box, shape: Sequence[int]) -> Box | None:
        """Return the indices, from 0, of a tensor of `shape` whose elements lie in `box` of the array."""
        held = dict(zip(self.axes, zip(self.steps, shape, strict=True), strict=True))
        found: dict[int, tuple[int, int]] = {NO_DIM: (0, 1)}
        for dim, (origin, base, extent) in enumerate(zip(self.origin, box.origin, box.shape, strict=True)):
            step, count = held.get(dim, (1, 1))
            start = max(-((origin - base) // step), 0)
            stop = min(-((origin - base - extent) // step), count)
            if start >= stop:
                return None
            found[dim] = (start, stop - start)
        return Box(tuple(found[axis][0] for axis in self.axes), tuple(found[axis][1] for axis in self.axes))

    def _check_units(self, chunk: Chunk, first: int, within: Box, per_unit: int) -> None:
        last = len(self.origin) - 1
        runs = self.axes and self.axes[-1] == last and self.steps[-1] == 1
        whole = isinstance(chunk.where, ConstantFill) or len(chunk.where.strides) == len(self.origin)
        if not runs or not whole or first % per_unit or within.shape[-1] % per_unit:
            raise UnsupportedError(
                f"{chunk.name} is {chunk.dtype} and cannot be taken apart at {within}: bytes hold {per_unit} elements"
            )


@dataclass(frozen=True, slots=True, eq=False)
class ViewGroup:
    """How some tensors, or parts of them, run through one array; the arrays of all layers are alike, and share it."""

    views: tuple[ArrayView, ...]
    parts: tuple[Box, ...]
    """What of its tensor runs through each view."""
    _known: dict[object, list[PulledBox]] = field(default_factory=dict)

    def pulled(self, box: Box, strides: tuple[int, ...]) -> list[PulledBox]:
        """Return what a `box` of the array, in whole bytes with `strides`, holds of each tensor that it meets."""
        key = (box, strides)
        known = self._known.get(key)
        if known is None:
            parts = zip(self.views, self.parts, strict=True)
            found = (_pull_whole_bytes(view, box, part, strides) for view, part in parts)
            known = self._known[key] = [PulledBox(n, *one) for n, one in enumerate(found) if one is not None]
        return known


class PulledBox(NamedTuple):
    """What a stored box of an array holds of one tensor."""

    number: int
    """Which of the tensors."""
    box: Box
    """Its own elements."""
    shift: int
    """Bytes from the beginning of the stored box to its first element."""
    strides: tuple[int, ...]


@lru_cache(maxsize=1 << 14)  # the arrays of all layers are alike, and each holds hundreds of experts
def _pull_whole_bytes(
    view: ArrayView, box: Box, part: Box, strides: tuple[int, ...]
) -> tuple[Box, int, tuple[int, ...]] | None:
    """Return what `ArrayView.map_chunk_part` finds in whole bytes: the box, and its offset and strides in the chunk.

    None for nothing.
    """
    within = view.within(box, part.shape)
    if within is None:
        return None
    shift, found = view.compute_strides(view.first(box, within), strides)
    return Box(tuple(a + b for a, b in zip(part.origin, within.origin, strict=True)), within.shape), shift, found
