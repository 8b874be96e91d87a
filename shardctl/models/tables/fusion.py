"""Describes arrays that hold several tensors or parts of some, as transformers 5 holds a layer's experts in two."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import TYPE_CHECKING

from shardctl.base.errors import UnsupportedError
from shardctl.base.value import value_class
from shardctl.tensors.box import Box, BoxIndex
from shardctl.tensors.manifest import Region, compute_dense_strides
from shardctl.tensors.turns import count_turns
from shardctl.tensors.views import ArrayView

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardctl.tensors.manifest import Chunk, Tensor


@dataclass(frozen=True, slots=True, eq=False)
class FusionPlaces:
    """Where each of some tensors, or of their parts, lies in one array; the layers of a model share it."""

    shape: tuple[int, ...]
    """Of the array, in elements."""
    views: tuple[ArrayView, ...]
    """Of each part, which together fill the array."""
    shapes: tuple[tuple[int, ...], ...]
    """Of the tensor that each part belongs to."""
    boxes: tuple[Box, ...]
    """What each part is of its tensor; most are all of it. One that takes turns has a dim more; see `turns.py`."""
    index: BoxIndex
    """The parts' boxes within the array."""
    declared: tuple[int, ...]
    """The shape in which the array is stored: `shape`, or that with its last dims merged into one."""

    @classmethod
    def of(
        cls,
        views: Sequence[ArrayView],
        shapes: Sequence[tuple[int, ...]],
        boxes: Sequence[Box] = (),
        declared: tuple[int, ...] = (),
    ) -> FusionPlaces:
        """Return the places of `boxes` (default: all) of tensors of `shapes`, one view each."""
        parts = tuple(boxes) or tuple(map(Box.whole, shapes))
        images = [view.image(part.shape) for view, part in zip(views, parts, strict=True)]
        shape = tuple(max(image.stop[dim] for image in images) for dim in range(len(images[0].origin)))
        return cls(shape, tuple(views), tuple(shapes), parts, BoxIndex(images), declared or shape)

    def merge_dims(self, box: Box) -> Box:
        """Return a box of the array in the index space of its declared shape.

        Raises UnsupportedError for one that cuts the dims that are merged.
        """
        kept = len(self.declared) - 1
        if self.declared == self.shape:
            return box
        if box.shape[kept:] != self.shape[kept:]:
            raise UnsupportedError(f"an array of {list(self.declared)} cannot be cut at {box} of {list(self.shape)}")
        return Box((*box.origin[:kept], 0), (*box.shape[:kept], self.declared[-1]))

    def split_dims(self, chunk: Chunk) -> Chunk:
        """Return a chunk of the declared array in the index space of `shape`.

        Raises UnsupportedError for one that is not stored so that its last dim can be seen as several.
        """
        kept = len(self.declared) - 1
        if self.declared == self.shape:
            return chunk
        box, merged, where = chunk.box, self.shape[kept:], chunk.where
        if box.shape[-1] != self.declared[-1] or (
            isinstance(where, Region) and where.strides[-1] != chunk.dtype.nbytes((1,))
        ):
            raise UnsupportedError(f"{chunk.name} is not stored row by row, so it cannot be seen in another shape")
        if isinstance(where, Region):
            where = replace(where, strides=(*where.strides[:-1], *compute_dense_strides(chunk.dtype, merged)))
        return replace(chunk, box=Box((*box.origin[:-1], *(0,) * len(merged)), (*box.shape[:-1], *merged)), where=where)


@value_class
class TensorFusion:
    """One array and the tensors it holds; a single one, if only the name differs."""

    name: str
    """The array's name in the state dict of transformers' class."""
    tensors: tuple[str, ...]
    """Canonical names, of each part one."""
    places: FusionPlaces
    """Where each of them lies."""
    stored: bool = False
    """Whether only files have it; see `FusedArray.stored`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array, in elements."""
        return self.places.shape

    @property
    def declared(self) -> tuple[int, ...]:
        """The array's shape as it is stored, in elements."""
        return self.places.declared

    @property
    def renames(self) -> bool:
        """Whether it is one tensor as it is, and only its name differs."""
        places = self.places
        whole = len(self.tensors) == 1 and places.shapes[0] == places.boxes[0].shape == places.declared
        return whole and places.views[0].axes == tuple(range(len(self.shape)))

    def taken_apart(self, stored: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of each part's tensor, with what `stored`, which is this array, holds of that part.

        Raises UnsupportedError if the array's elements are narrower than a byte and share one.
        """
        chunks: list[list[Chunk]] = [[] for _ in self.tensors]
        places = self.places
        for each in stored.chunks:
            chunk = places.split_dims(each)
            for position, _ in places.index.find_overlaps(chunk.box):
                part = places.views[position].map_chunk_part(chunk, places.boxes[position])
                if part is not None:
                    turns = count_turns(places.shapes[position], places.boxes[position])
                    chunks[position].append(part if turns == 1 else replace(part, turns=turns))
        for name, shape, found in zip(self.tensors, places.shapes, chunks, strict=True):
            yield name, replace(stored, shape=shape, chunks=tuple(found))


@cache
def stack_tensors(shapes: tuple[tuple[int, ...], ...], count: int) -> FusionPlaces:
    """Return `count` groups of tensors of `shapes`: the groups stacked along dim 0, each joined along its first dim.

    >>> stack_tensors(((4, 6), (4, 6)), 8).shape
    (8, 8, 6)
    """
    views, axes = [], tuple(range(1, len(shapes[0]) + 1))
    for group in range(count):
        start = 0
        for shape in shapes:
            views.append(ArrayView((group, start, *(0,) * (len(shape) - 1)), axes))
            start += shape[0]
    return FusionPlaces.of(views, shapes * count)


@cache
def join_tensors(shapes: tuple[tuple[int, ...], ...]) -> FusionPlaces:
    """Return tensors of `shapes` joined along their first dim; one tensor is itself.

    >>> join_tensors(((4, 6), (2, 6))).shape
    (6, 6)
    """
    views, axes, start = [], tuple(range(len(shapes[0]))), 0
    for shape in shapes:
        views.append(ArrayView((start, *(0,) * (len(shape) - 1)) if shape else (), axes))
        start += shape[0] if shape else 0
    return FusionPlaces.of(views, shapes)


@cache
def transpose_tensor(shape: tuple[int, ...]) -> FusionPlaces:
    """Return a tensor of `shape` with its last two dims swapped.

    >>> transpose_tensor((8, 4, 6)).shape
    (8, 6, 4)
    """
    *rest, before, last = range(len(shape))
    return FusionPlaces.of([ArrayView((0,) * len(shape), (*rest, last, before))], (shape,))


@cache
def cut_rows(shape: tuple[int, ...], start: int, stop: int) -> FusionPlaces:
    """Return some rows of a tensor of `shape`, which by themselves are an array.

    >>> cut_rows((12, 6), 4, 8).shape
    (4, 6)
    """
    box = Box((start, *(0,) * (len(shape) - 1)), (stop - start, *shape[1:]))
    return FusionPlaces.of([ArrayView.whole(len(shape))], (shape,), (box,))


@cache
def merge_last_dims(shape: tuple[int, ...]) -> FusionPlaces:
    """Return a tensor of `shape` as a matrix of as many rows, as a convolution over patches is a linear layer.

    >>> merge_last_dims((12, 3, 2, 4, 4)).declared
    (12, 96)
    """
    return FusionPlaces.of([ArrayView.whole(len(shape))], (shape,), declared=(shape[0], prod(shape[1:])))
