"""Computes where parameters begin in the buffers of Megatron-LM's distributed optimizer.

As `_compute_per_buffer_param_layout` of `optimizer/distrib_optimizer.py` (core 0.19; before, `_ParamAndGradBuffer` of
`distributed/param_and_grad_buffer.py`). What pads a bucket's end is in no file, so it is left out here, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.libraries.arrays.composite import round_up_to_multiple

if TYPE_CHECKING:
    from collections.abc import Sequence

ALIGNMENT: Final = 64
"""Elements, of a multiple of which every parameter begins in its bucket."""


def place_parameters(
    counts: Sequence[int], shared: Sequence[bool], limit: int | None = None
) -> tuple[tuple[int, ...], int]:
    """Place parameters of so many elements, in the module's order, the last one first; returns starts and the size.

    Those that are `shared` with another stage have a bucket of their own, and other buckets end behind the parameter
    with which they have `limit` elements.

    >>> place_parameters([100, 30], [False, False])
    ((64, 0), 164)
    >>> place_parameters([100, 30], [False, False], 10), place_parameters([100, 30, 5], [False, True, False])
    (((30, 0), 130), ((94, 64, 0), 194))
    """
    starts: list[int] = []
    before, at = 0, 0  # what earlier buckets hold, and what this one does
    for count, alone in zip(reversed(counts), reversed(shared), strict=True):
        start = round_up_to_multiple(at, ALIGNMENT)
        if alone and at:
            before, start = before + start, 0
        starts.append(before + start)
        at = start + count
        if alone or (limit is not None and at >= limit):
            before, at = before + at, 0
    return tuple(reversed(starts)), before + at
