"""Describes arrays that hold several tensors, as transformers 5 holds all experts of a layer in two."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from shardctl.box import Box, BoxIndex
from shardctl.value import value_class
from shardctl.views import ArrayView

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardctl.manifest import Chunk, Tensor


@dataclass(frozen=True, slots=True, eq=False)
class FusionPlaces:
    """Where each of some tensors lies in one array; the layers of a model share it."""

    shape: tuple[int, ...]
    """Of the array, in elements."""
    views: tuple[ArrayView, ...]
    """Of each tensor, which together fill the array."""
    boxes: tuple[Box, ...]
    """Each tensor, whole, in its own index space."""
    index: BoxIndex
    """The tensors' boxes within the array."""

    @classmethod
    def of(cls, views: Sequence[ArrayView], shapes: Sequence[tuple[int, ...]]) -> FusionPlaces:
        """Return the places of tensors of `shapes`, one view each."""
        images = [view.image(shape) for view, shape in zip(views, shapes, strict=True)]
        shape = tuple(max(image.stop[dim] for image in images) for dim in range(len(images[0].origin)))
        return cls(shape, tuple(views), tuple(map(Box.whole, shapes)), BoxIndex(images))


@value_class
class TensorFusion:
    """One array and the tensors it holds; a single one, if only the name differs."""

    name: str
    """The array's name in the state dict of transformers' class."""
    tensors: tuple[str, ...]
    """Canonical names."""
    places: FusionPlaces
    """Where each of them lies."""
    stored: bool = False
    """Whether only files have it; see `FusedArray.stored`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array, in elements."""
        return self.places.shape

    @property
    def renames(self) -> bool:
        """Whether it is one tensor as it is, and only its name differs."""
        return len(self.tensors) == 1 and self.places.views[0].axes == tuple(range(len(self.shape)))

    def taken_apart(self, stored: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield each canonical name, with what `stored`, which is this array, holds of that tensor.

        Raises UnsupportedError if the array's elements are narrower than a byte and share one.
        """
        chunks: list[list[Chunk]] = [[] for _ in self.tensors]
        places = self.places
        for chunk in stored.chunks:
            for position, _ in places.index.overlapping(chunk.box):
                part = places.views[position].pull(chunk, places.boxes[position])
                if part is not None:
                    chunks[position].append(part)
        for name, box, found in zip(self.tensors, places.boxes, chunks, strict=True):
            yield name, replace(stored, shape=box.shape, chunks=tuple(found))


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
