"""Computes which elements of a tensor a rank holds, from the placements of a DTensor.

Placements apply from the first axis of the mesh to the last, each to what those before it left (torch
`distributed/tensor/_utils.py`, `compute_local_shape_and_global_offset`). `Shard` is `torch.chunk`: parts of ceil size,
the last ones shorter or empty. `_StridedShard` chunks into `factor` parts first and takes its share of each, so that
what a rank has need not be one box (torch `distributed/tensor/placement_types.py`).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, product
from math import prod
from typing import Final

from shardctl.base.errors import HostileError
from shardctl.base.value import value_class
from shardctl.tensors.box import Box

_MOST: Final = 1 << 12
"""Boxes of one tensor on one rank; a fused projection under tensor parallelism has two or three."""
_Runs = tuple[tuple[int, int], ...]
"""First index and number of indices of each stretch, in the order in which a rank has them."""


@value_class
class AxisPlacement:
    """What one axis of the mesh does to a tensor."""

    size: int
    """Ranks along the axis."""
    index: int
    """This rank's, among them."""
    dim: int | None = None
    """The dim of the tensor that it cuts; None for none."""
    factor: int = 1
    """Parts of which it takes a share each (`_StridedShard`)."""


@lru_cache(maxsize=1 << 14)  # layers are alike
def list_local_boxes(
    shape: tuple[int, ...], placements: tuple[AxisPlacement, ...]
) -> tuple[tuple[Box, tuple[int, ...]], ...]:
    """List the boxes that a rank has of a tensor of `shape`, and where each begins in its own, local tensor.

    >>> [str(b) for b, _ in list_local_boxes((8, 3), (AxisPlacement(2, 1, 0, 2), AxisPlacement(2, 0, 0)))]
    ['[2:4, 0:3]']

    Raises HostileError for placements that divide a tensor into very many boxes.
    """
    runs = _compute_runs(shape, placements)
    if prod(map(len, runs)) > _MOST:
        raise HostileError(f"placements that divide a tensor of {list(shape)} into more than {_MOST:,} boxes")
    starts = [list(accumulate((count for _, count in each), initial=0))[:-1] for each in runs]
    return tuple(
        (Box(tuple(run[0] for run in chosen), tuple(run[1] for run in chosen)), at)
        for chosen, at in zip(product(*runs), product(*starts), strict=True)
    )


@lru_cache(maxsize=1 << 14)
def compute_local_shape(shape: tuple[int, ...], placements: tuple[AxisPlacement, ...]) -> tuple[int, ...]:
    """Compute the shape of what a rank has of a tensor of `shape`."""
    return tuple(sum(count for _, count in each) for each in _compute_runs(shape, placements))


def _compute_runs(shape: tuple[int, ...], placements: tuple[AxisPlacement, ...]) -> list[_Runs]:
    """Compute the stretches of each dim that a rank has."""
    runs: list[_Runs] = [((0, extent),) if extent else () for extent in shape]
    for placement in placements:
        if placement.dim is not None:
            runs[placement.dim] = _share_runs(runs[placement.dim], placement)
    return runs


def _share_runs(runs: _Runs, placement: AxisPlacement) -> _Runs:
    """Return what one rank gets of the stretches that the axes before left."""
    total = sum(count for _, count in runs)
    piece = -(-total // placement.factor)
    if total > piece * _MOST:
        raise HostileError(f"a placement divides a dim of {total:,} into more than {_MOST:,} parts")
    shares: list[tuple[int, int]] = []
    for start in range(0, total, max(piece, 1)):
        stop = min(start + piece, total)
        part = -(-(stop - start) // placement.size)
        first = min(start + part * placement.index, stop)
        for begin, count in _slice_runs(runs, first, min(first + part, stop)):
            if shares and sum(shares[-1]) == begin:
                shares[-1] = (shares[-1][0], shares[-1][1] + count)
            else:
                shares.append((begin, count))
        if len(shares) > _MOST:
            raise HostileError(f"placements divide a dim of {total:,} into more than {_MOST:,} stretches")
    return tuple(shares)


def _slice_runs(runs: _Runs, start: int, stop: int) -> _Runs:
    """Return the part of the stretches, taken as one, from `start` to `stop`."""
    found, at = [], 0
    for first, count in runs:
        low, high = max(start - at, 0), min(stop - at, count)
        if low < high:
            found.append((first + low, high - low))
        at += count
    return tuple(found)
