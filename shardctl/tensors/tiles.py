"""Splits runs of a matrix's elements into tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

Span = tuple[int, int]
"""First index, and the one behind the last."""


def split_run(start: int, stop: int, width: int, most: int) -> Iterator[tuple[Span, Span]]:
    """Yield rows and columns of tiles that make up the elements from `start` to `stop` of rows of `width`, in order.

    A tile has at most `most` elements.

    >>> list(split_run(3, 14, 4, 100))
    [((0, 1), (3, 4)), ((1, 3), (0, 4)), ((3, 4), (0, 2))]
    """
    while start < stop:
        row, column = divmod(start, width)
        whole = (stop - row * width) // width
        if column or not whole or width > most:
            end = min(width, column + stop - start, column + most)
            yield (row, row + 1), (column, end)
            start = row * width + end
        else:
            rows = min(whole, max(most // width, 1))
            yield (row, row + rows), (0, width)
            start += rows * width
