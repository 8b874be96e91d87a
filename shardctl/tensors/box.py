"""Describes rectangular parts of a tensor's index space, and computes what they cover.

>>> from shardctl.tensors.box import Box, subtract_all
>>> subtract_all(Box((0, 0), (4, 8)), [Box((0, 0), (4, 6))])  # what remains
[Box(origin=(0, 6), shape=(4, 2))]
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING

from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


@value_class
class Box:
    """A half-open rectangular region of a tensor, in elements: `origin` included, `origin + shape` excluded.

    Raises ValueError if origin and shape differ in rank, or if a number is negative.

    >>> box = Box((0, 2), (4, 3))
    >>> box.stop, box.size
    ((4, 5), 12)
    >>> print(box.intersect(Box((2, 0), (4, 4))))
    [2:4, 2:4]
    """

    origin: tuple[int, ...]
    """First index along each dim, in elements."""
    shape: tuple[int, ...]
    """Extent along each dim, in elements; zero is an empty box."""

    def __post_init__(self) -> None:
        if len(self.origin) == len(self.shape) and min(self.origin, default=0) >= 0 and min(self.shape, default=0) >= 0:
            return
        if len(self.origin) != len(self.shape):
            raise ValueError(f"box origin {self.origin} and shape {self.shape} differ in rank")
        for dim, (start, extent) in enumerate(zip(self.origin, self.shape, strict=True)):
            if start < 0 or extent < 0:
                raise ValueError(f"box dim {dim} has origin {start} and extent {extent}; neither may be negative")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of all elements of a tensor of `shape`."""
        return _build_whole_box(tuple(shape))

    @property
    def stop(self) -> tuple[int, ...]:
        """One past the last index along each dim."""
        return tuple(o + s for o, s in zip(self.origin, self.shape, strict=True))

    @property
    def size(self) -> int:
        """Number of elements; a 0-d box has one."""
        return prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Return the common part, or None if no element is common.

        >>> Box((0,), (4,)).intersect(Box((2,), (5,)))
        Box(origin=(2,), shape=(2,))
        """
        if self == other:
            return self if self.size else None
        origin, shape = [], []
        for a, n, b, m in zip(self.origin, self.shape, other.origin, other.shape, strict=True):
            start, stop = max(a, b), min(a + n, b + m)
            if start >= stop:
                return None
            origin.append(start)
            shape.append(stop - start)
        return Box(tuple(origin), tuple(shape))

    def subtract(self, other: Box) -> list[Box]:
        """Return what remains of this box without `other`: at most two disjoint boxes a dim.

        >>> Box((0, 0), (2, 3)).subtract(Box((0, 1), (2, 1)))
        [Box(origin=(0, 0), shape=(2, 1)), Box(origin=(0, 2), shape=(2, 1))]
        """
        if self == other:
            return []
        common = self.intersect(other)
        if common is None:
            return [self] if self.size else []
        rest: list[Box] = []
        origin, shape = list(self.origin), list(self.shape)
        for dim, (start, extent) in enumerate(zip(common.origin, common.shape, strict=True)):
            before, after = start - origin[dim], origin[dim] + shape[dim] - start - extent
            if before:
                rest.append(Box(tuple(origin), (*shape[:dim], before, *shape[dim + 1 :])))
            if after:
                rest.append(
                    Box((*origin[:dim], start + extent, *origin[dim + 1 :]), (*shape[:dim], after, *shape[dim + 1 :]))
                )
            origin[dim], shape[dim] = start, extent
        return rest

    def contains(self, other: Box) -> bool:
        """Return whether every element of `other` lies in this box; an empty box lies in every box that spans it."""
        return all(
            a <= b and b + m <= a + n
            for a, n, b, m in zip(self.origin, self.shape, other.origin, other.shape, strict=True)
        )

    def slices(self, within: Sequence[int] | None = None) -> tuple[slice, ...]:
        """Return NumPy slices of this box, relative to the origin `within` (default: the tensor's own)."""
        base = within if within is not None else (0,) * len(self.origin)
        return tuple(slice(o - b, o - b + s) for o, s, b in zip(self.origin, self.shape, base, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(self.origin, self.shape, strict=True)) + "]"


@lru_cache(maxsize=4096)
def _build_whole_box(shape: tuple[int, ...]) -> Box:
    """Build the box once: layers repeat a few shapes, so most boxes are one object, for half the time of a scan."""
    return Box((0,) * len(shape), shape)


def list_flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """List the boxes, in order, that hold elements `start` to `stop` of the row-major flattening of `shape`.

    At most ``2 * ndim - 1`` boxes: ZeRO and FSDP1 store such runs, and a band is one.

    >>> [str(b) for b in list_flat_boxes((3, 4), 2, 9)]
    ['[0:1, 2:4]', '[1:2, 0:4]', '[2:3, 0:1]']
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"flat range [{start}, {stop}) is not inside a tensor of shape {tuple(shape)}")
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    row = prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    inner = shape[1:]

    def within_row(index: int, a: int, b: int) -> list[Box]:
        return [Box((index, *box.origin), (1, *box.shape)) for box in list_flat_boxes(inner, a, b)]

    if first == last:
        return within_row(first, head, tail)
    boxes: list[Box] = []
    if head:
        boxes += within_row(first, head, row)
        first += 1
    if first < last:
        boxes.append(Box((first, *(0,) * len(inner)), (last - first, *inner)))
    if tail:
        boxes += within_row(last, 0, tail)
    return boxes


class BoxIndex:
    """Finds the boxes that overlap a given box in logarithmic time plus the number of hits along one dim.

    The boxes are sorted along the dim with the most distinct origins; a running maximum of their ends lets a
    query stop at the first box that can still reach it.
    """

    __slots__ = ("_dim", "_order", "_reach", "_starts", "boxes")

    def __init__(self, boxes: Sequence[Box]) -> None:
        self.boxes = tuple(boxes)
        if len(self.boxes) < 2:  # noqa: PLR2004 - one box needs no order
            self._dim = -1
            return
        ndim = len(self.boxes[0].origin)
        self._dim = max(range(ndim), key=lambda d: len({b.origin[d] for b in self.boxes}), default=-1)
        d = self._dim
        self._order = sorted(range(len(self.boxes)), key=lambda i: self.boxes[i].origin[d] if d >= 0 else 0)
        self._starts = [self.boxes[i].origin[d] for i in self._order] if d >= 0 else []
        self._reach = list(accumulate((self.boxes[i].stop[d] for i in self._order), max)) if d >= 0 else []

    def find_overlaps(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yield each ``(position, common part)`` of the boxes that share an element with `box`, in position order."""
        if self._dim < 0:
            hits: Iterable[int] = range(len(self.boxes))
        else:
            first = bisect_right(self._reach, box.origin[self._dim])
            last = bisect_left(self._starts, box.stop[self._dim])
            hits = sorted(self._order[first:last])
        for position in hits:
            common = self.boxes[position].intersect(box)
            if common is not None:
                yield position, common


def subtract_all(box: Box, others: Iterable[Box]) -> list[Box]:
    """Return what remains of `box` when each of `others` is taken away."""
    rest = [box] if box.size else []
    for other in others:
        rest = [piece for part in rest for piece in part.subtract(other)]
        if not rest:
            break
    return rest


def make_disjoint(boxes: Sequence[Box]) -> list[tuple[int, Box]]:
    """Return disjoint boxes with the same union, each with the position of the box it came from; earlier boxes win.

    >>> make_disjoint([Box((0,), (4,)), Box((2,), (4,)), Box((0,), (4,))])
    [(0, Box(origin=(0,), shape=(4,))), (1, Box(origin=(4,), shape=(2,)))]
    """
    if len(boxes) == 1:
        return [(0, boxes[0])] if boxes[0].size else []
    index = BoxIndex(boxes)
    seen: set[Box] = set()
    parts: list[tuple[int, Box]] = []
    for position, box in enumerate(boxes):
        if box in seen:
            continue
        seen.add(box)
        earlier = (index.boxes[i] for i, _ in index.find_overlaps(box) if i < position)
        parts += [(position, piece) for piece in subtract_all(box, earlier)]
    return parts


def subtract_indexed(box: Box, index: BoxIndex) -> list[Box]:
    """Return what no box of `index` covers of `box`."""
    return subtract_all(box, (common for _, common in index.find_overlaps(box)))


def merge_boxes(boxes: Iterable[Box]) -> list[Box]:
    """Join disjoint boxes that touch along one dim and agree in all others; the result is sorted by origin.

    >>> [str(box) for box in merge_boxes([Box((1, 0), (1, 2)), Box((0, 0), (1, 2)), Box((0, 2), (2, 2))])]
    ['[0:2, 0:4]']
    """
    found, before = list(boxes), -1
    while len(found) != before:
        before = len(found)
        for dim in reversed(range(len(found[0].origin) if found else 0)):
            rows: dict[object, list[Box]] = {}
            for box in found:
                rest = (box.origin[:dim], box.origin[dim + 1 :], box.shape[:dim], box.shape[dim + 1 :])
                rows.setdefault(rest, []).append(box)
            found = [joined for row in rows.values() for joined in _join_along_dim(row, dim)]
    return sorted(found, key=lambda box: (box.origin, box.shape))


def _join_along_dim(row: list[Box], dim: int) -> list[Box]:
    """Join the adjacent ones of boxes that differ along `dim` only."""
    joined: list[Box] = []
    for box in sorted(row, key=lambda b: b.origin[dim]):
        if joined and joined[-1].origin[dim] + joined[-1].shape[dim] == box.origin[dim]:
            before = joined.pop()
            extent = before.shape[dim] + box.shape[dim]
            joined.append(Box(before.origin, (*box.shape[:dim], extent, *box.shape[dim + 1 :])))
        else:
            joined.append(box)
    return joined
