"""Computes which stretch of each parameter a rank's flat partition holds.

Stages 1 and 2: DeepSpeed `runtime/zero/stage_1_and_2.py` (constructor, `get_data_parallel_partitions`), stage 3:
`runtime/zero/partition_parameters.py` (`_partition_param`) and `runtime/zero/stage3.py`.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

from shardctl.base.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class ElementRun(NamedTuple):
    """A stretch of a parameter's row-major elements, in a flat array."""

    start: int
    """First element, in the parameter."""
    stop: int
    """One past the last."""
    at: int
    """Where in the flat array the first one is."""


class FlatPartition(NamedTuple):
    """One of the equal parts of a group of parameters."""

    rank: int
    parts: int
    kind: int = 0
    """Which of several ranks that have other parameters each (experts) under the same names."""
    divided: int = 1
    """How many of those there are."""


def list_joined_runs(
    shapes: Mapping[str, tuple[int, ...]], part: FlatPartition, length: int, paddings: Sequence[int] = ()
) -> Iterator[tuple[str, ElementRun]]:
    """List what is in a part of stages 1 and 2: the parameters follow one another, and the whole is cut in equal parts.

    Args:
        shapes: The parameters, in order.
        part: Which part.
        length: Elements of each part, padding included.
        paddings: Zeros after each parameter.

    Raises:
        SourceError: the parts are too short for the parameters.
    """
    begin, end = part.rank * length, (part.rank + 1) * length
    offset = 0
    for number, (name, shape) in enumerate(shapes.items()):
        size = prod(shape)
        start, stop = max(offset, begin), min(offset + size, end)
        if start < stop:
            yield name, ElementRun(start - offset, stop - offset, start - begin)
        offset += size + (paddings[number] if paddings else 0)
    if offset > part.parts * length:
        raise SourceError(
            f"{part.parts} parts of {length:,} elements hold less than the {offset:,} of the parameters in them"
        )


def list_scattered_runs(shapes: Mapping[str, tuple[int, ...]], part: FlatPartition) -> Iterator[tuple[str, ElementRun]]:
    """List what is in a part of stage 3: each parameter is cut in equal parts, the last ones shorter or empty.

    >>> list(list_scattered_runs({"a": (5,), "b": (2, 2)}, FlatPartition(1, 2)))
    [('a', ElementRun(start=3, stop=5, at=0)), ('b', ElementRun(start=2, stop=4, at=3))]
    """
    offset = 0
    for name, shape in shapes.items():
        size = prod(shape)
        share = -(-size // part.parts)
        start, stop = min(part.rank * share, size), min((part.rank + 1) * share, size)
        if start < stop:
            yield name, ElementRun(start, stop, offset)
        offset += share
