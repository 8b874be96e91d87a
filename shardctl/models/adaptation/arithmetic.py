"""Computes what adapters add to weights, so that every processor and every library gets the same bits.

The product `scaling * left @ right` is that of exact arithmetic, rounded once to float32. A product in float64, in
whatever order BLAS adds it up, decides almost every element: if its error is smaller than its distance from the next
number at which the rounding changes, the rounded element is right. Integers of any length decide the others.
Norms are added up in float64 by operations on elements, in an order that only the size of the matrix decides.

>>> left, right = np.float32([[1, 2**-24]]), np.float32([[1], [1]])
>>> multiply_low_rank(left, right, 1.0), multiply_low_rank(left, right, 3.0)
(array([[1.]], dtype=float32), array([[3.0000002]], dtype=float32))
"""

from __future__ import annotations

import threading
from math import copysign, frexp, fsum, inf, nextafter
from operator import mul
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_SERIAL_PRODUCTS: Final = 1 << 18
"""Products up to which OpenBLAS works in the thread that calls it (interface/gemm.c): its own threads would only wait
for each other's turn."""
_BLOCK_ELEMENTS: Final = 1 << 14
"""Elements of a product that are decided at a time: they fit a core's cache."""
_LOW_BLOCK: Final = 16
"""Rows that BLAS multiplies at a time."""
_WIDE_BLOCK: Final = 256
_NARROW_BLOCK: Final = 64
"""Columns that it multiplies at a time."""
_DESCRIBED_ELEMENTS: Final = 1 << 14
"""Elements of the second matrix that are described at a time."""
_FLOAT64_BITS: Final = 53
"""Bits of the integers that float64 holds; sums of products that stay within them are exact in any order."""
_OTHER_ROUNDINGS: Final = 8
"""Roundings besides those of the sums, generously: of the scaling, the products, the norms and the bounds."""
_SUM_ERROR: Final = 2.0**-50
"""The relative error of a number that was rounded to float64 three times or less."""
_UNDERFLOW_SCALING: Final = 2.0**-512
"""A scaling below which every product of numbers of float32 rounds to zero."""
_FLOAT32_MAGNITUDE_MASK: Final = 0x7FFF_FFFF
_FLOAT32_FRACTION_MASK: Final = 0x7F_FFFF
"""Bits of a float32."""
_FLOAT32_MIN_SUBNORMAL: Final = 2.0**-149
"""Every number of float32 is a multiple of this."""


def multiply_low_rank(left: NDArray[np.float32], right: NDArray[np.float32], scaling: float) -> NDArray[np.float32]:
    """Multiply `[rows, rank]` by `[rank, columns]` and a number, rounding each element once; all must be finite.

    What float32 does not hold becomes infinite. Zeros are positive.
    """
    (rows, rank), columns = left.shape, right.shape[1]
    product = np.empty((rows, columns), np.float32)
    if abs(scaling) < _UNDERFLOW_SCALING:
        product.fill(0)
        return product
    low = min(_LOW_BLOCK, rows)
    wide = _WIDE_BLOCK if rank * _WIDE_BLOCK * low <= _SERIAL_PRODUCTS else _NARROW_BLOCK
    high = max(_BLOCK_ELEMENTS // (wide * low), 1) * low
    many = max(_DESCRIBED_ELEMENTS // (rank * wide), 1) * wide
    factors = _describe_factors(np.pad(left, ((0, -rows % low), (0, 0))), 1, scaling)
    with np.errstate(over="ignore"):
        for column in range(0, columns, wide):
            if not column % many:
                others = _describe_factors(right[:, column : column + many], 0)
            several = others.take(np.s_[column % many : column % many + wide], 1)
            for row in range(0, rows, high):
                some = factors.take(np.s_[row : row + high], 0)
                block = product[row : row + high, column : column + wide]
                for i, j in _multiply_block(some, several, low, block):
                    block[i, j] = _round_product(left[row + i], right[:, column + j], scaling)
    product += np.float32(0)
    return product


def _multiply_block(left: _Factors, right: _Factors, low: int, out: NDArray[np.float32]) -> Iterator[tuple[int, int]]:
    """Multiply some rows by some columns, `low` rows at a time, and yield the elements that remain to be decided."""
    rows, columns = len(left.values), right.values.shape[1]
    sums, errors, ends = (each[: rows * columns].reshape(rows, columns) for each in _scratch.blocks)
    np.matmul(left.values.reshape(-1, low, len(right.values)), right.values, out=sums.reshape(-1, low, columns))
    sums = sums[: len(out)]
    if not _bound_errors(left, right, errors):
        out[...] = sums
        return
    errors, ends = errors[: len(out)], ends[: len(out)]
    out[...] = np.subtract(sums, errors, out=ends)
    high = _scratch.rounded[: out.size].reshape(out.shape)
    high[...] = np.add(sums, errors, out=ends)
    for place in np.flatnonzero(out != high).tolist():
        yield divmod(place, columns)


class _Scratch(threading.local):
    """Memory of a thread for blocks of products, which the allocator would give back to the system each time."""

    def __init__(self) -> None:
        self.blocks = np.empty((3, _BLOCK_ELEMENTS))
        self.rounded = np.empty(_BLOCK_ELEMENTS, np.float32)


_scratch = _Scratch()


@value_class
class _Factors:
    """Rows, or columns, of a matrix in float64, and what bounds the errors of their products."""

    values: NDArray[np.float64]
    bounds: NDArray[np.float64]
    """Bounds of their norms, whose products bound sums of absolute products."""
    spans: NDArray[Any]
    """The bits of each norm as a multiple of the last bit that is set in any element."""

    def take(self, some: slice, dim: int) -> _Factors:
        """Take some of the vectors, which are along the other dim."""
        return _Factors(self.values[(slice(None),) * dim + (some,)], self.bounds[some], self.spans[some])


def _bound_errors(left: _Factors, right: _Factors, out: NDArray[np.float64]) -> bool:
    """Bound the errors of products, added up in any order; returns whether there are any."""
    if left.spans.max() + right.spans.max() <= _FLOAT64_BITS:
        return False
    roundings = (len(right.values) + _OTHER_ROUNDINGS) * 2.0**-_FLOAT64_BITS
    np.multiply(left.bounds[:, None] * roundings, right.bounds, out=out)
    if left.spans.min() + right.spans.min() <= _FLOAT64_BITS:
        out[left.spans[:, None] + right.spans <= _FLOAT64_BITS] = 0
    return True


def _describe_factors(stored: NDArray[np.float32], axis: int, scaling: float = 1.0) -> _Factors:
    """Describe vectors along an axis, times a number."""
    values = stored.astype(np.float64)
    norms = np.sqrt(np.square(values).sum(axis)) * (abs(scaling) * (1 + 2.0**-20))
    bits = stored.view(np.int32)
    fractions = np.bitwise_or.reduce(bits, axis) & _FLOAT32_FRACTION_MASK | _FLOAT32_FRACTION_MASK + 1
    _, lowest = np.frexp(fractions & -fractions)  # how many bits the elements lack at their ends, plus one
    magnitudes = (bits & _FLOAT32_MAGNITUDE_MASK) - 1  # those of zeros wrap around
    exponents = np.maximum(magnitudes.view(np.uint32).min(axis, initial=_FLOAT32_MAGNITUDE_MASK) + 1 >> 23, 1).astype(
        np.int32
    )
    _, tops = np.frexp(norms)
    spans = tops - (exponents + lowest - 151 + _find_last_bit(scaling))
    return _Factors(values if scaling == 1 else values * scaling, norms, spans)


def _find_last_bit(number: float) -> int:
    """Find the exponent of the last bit of a number.

    >>> _find_last_bit(6.0), _find_last_bit(0.75)
    (1, -2)
    """
    numerator, denominator = number.as_integer_ratio()
    return (numerator & -numerator).bit_length() - denominator.bit_length()


def _round_product(left: NDArray[np.float32], right: NDArray[np.float32], scaling: float) -> np.float32:
    """Compute one element, and round it once: from its rounded sum if that decides it, else in integers."""
    near = fsum((left.astype(np.float64) * right).tolist()) * scaling
    found, other = (np.float32(near * (1 + end)) for end in (-_SUM_ERROR, _SUM_ERROR))
    if found == other:
        return found
    first, second = ([int(each / _FLOAT32_MIN_SUBNORMAL) for each in vector.tolist()] for vector in (left, right))
    numerator, denominator = scaling.as_integer_ratio()
    top, bottom = sum(map(mul, first, second)) * numerator, denominator << 298
    near = top / bottom
    over, under = near.as_integer_ratio()
    rest = top * under - over * bottom
    if rest and not int(frexp(near)[0] * 2**_FLOAT64_BITS) & 1:  # to odd, after which rounding again is the same
        near = nextafter(near, copysign(inf, rest))
    return np.float32(near)


def compute_row_norms(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Compute the Euclidean norm of each row: squares in float64, of which each half is added to the other, rounded."""
    rows, columns = values.shape
    squares = np.zeros((rows, 1 << max(columns - 1, 0).bit_length()))
    np.square(values, out=squares[:, :columns], dtype=np.float64)
    while squares.shape[1] > 1:
        half = squares.shape[1] // 2
        squares = squares[:, :half] + squares[:, half:]
    return round_norms(squares[:, 0])


def add_squares(total: NDArray[np.float64], values: NDArray[np.float32]) -> None:
    """Add the squares of each row in turn to `total`, in place."""
    for row in values:
        total += np.square(row, dtype=np.float64)


def round_norms(squares: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the norms of which these are the squares."""
    return np.sqrt(squares).astype(np.float32)
