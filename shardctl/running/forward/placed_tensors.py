"""Shows a tensor as one rank has it: as long as the whole with zeros elsewhere, or dense."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

from shardctl.base.errors import CoverageError
from shardctl.running.forward.lazy_state_dict import LazyTensor
from shardctl.tensors.box import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Array = Any


class PlacedTensor(LazyTensor):
    """A tensor of which a rank has some boxes, and the rest is zero."""

    __slots__ = ("_boxes", "_fail", "_read", "runs")

    def __init__(
        self,
        whole: LazyTensor,
        boxes: list[Box],
        runs: Sequence[Sequence[tuple[int, int]]],
        read: Callable[[Box], Array],
        fail: Callable[[CoverageError], None],
    ) -> None:
        super().__init__(whole.name, whole.elements, whole.shape)
        self._boxes, self._read, self._fail = boxes, read, fail
        self.runs = tuple(tuple(dim) for dim in runs)
        """For each dim the intervals that the rank has, in order."""

    def read(self, box: Box) -> Array:
        """Return the elements of `box`, zeros where the rank is to have none, no numbers where its files lack some."""
        import torch

        if self._boxes == [Box.whole(self._shape)]:
            return self.read_held(box)
        result = torch.zeros(box.shape, dtype=self.dtype)
        for held in self._boxes:
            common = held.intersect(box) if box.size else None
            if common is not None:
                result[common.slices(box.origin)] = self.read_held(common)
        return result

    def read_held(self, box: Box) -> Array:
        """Return the elements of a `box` that the rank has."""
        import torch

        try:
            return self._read(box)
        except CoverageError as error:  # it is told at the end, and nobody waits for a rank that stops
            self._fail(error)
            return torch.full(box.shape, float("nan") if self.dtype.is_floating_point else 0).to(self.dtype)


class RankPart(LazyTensor):
    """What a rank has of a tensor, dense and in its order: what its module would have as weight."""

    __slots__ = ("_whole",)

    def __init__(self, whole: PlacedTensor) -> None:
        super().__init__(whole.name, whole.elements, [sum(b - a for a, b in dim) for dim in whole.runs])
        self._whole = whole

    def read(self, box: Box) -> Array:
        """Return the elements of `box` of the rank's own tensor."""
        import torch

        result = torch.empty(box.shape, dtype=self.dtype)
        runs = self._whole.runs
        for stretch in product(*(_split_stretches(*dim) for dim in zip(runs, box.origin, box.shape, strict=True))):
            place = tuple(slice(at, at + extent) for at, _, extent in stretch)
            wanted = Box(tuple(start for _, start, _ in stretch), tuple(extent for _, _, extent in stretch))
            result[place] = self._whole.read_held(wanted)
        return result


def _split_stretches(runs: Sequence[tuple[int, int]], origin: int, extent: int) -> list[tuple[int, int, int]]:
    """Split a range of a rank's dim: where each part begins in the range, where in the whole dim, how long it is."""
    found, position = [], 0
    for start, stop in runs:
        low, high = max(origin, position), min(origin + extent, position + stop - start)
        if low < high:
            found.append((low - origin, start + low - position, high - low))
        position += stop - start
    return found
