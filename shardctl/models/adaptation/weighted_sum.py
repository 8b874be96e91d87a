"""Computes weighted sums of tensors, such as averages of checkpoints, so that every processor gets the same bits.

Each element is the exact sum `w1 * x1 + w2 * x2 + ...` of real numbers, rounded once to the type of the result, to the
nearest and on a tie to even. Float64 with a remainder decides almost every element: rounded to odd, a sum keeps the
side of a tie on which it lies. Integers of any length decide the others.

>>> from fractions import Fraction
>>> values = [np.float32([1, 2**-24, 3]), np.float32([2, 1, 3])]
>>> sum_weighted(values, [Fraction(1, 3), Fraction(2, 3)], "F32")
array([1.6666666, 0.6666667, 3.       ], dtype=float32)
"""

from __future__ import annotations

from fractions import Fraction
from math import inf, lcm, prod
from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np

from shardctl.base.errors import SourceError
from shardctl.base.value import value_class
from shardctl.tensors.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import DTypeLike, NDArray

    from shardctl.base.dtype import DType
    from shardctl.tensors.bands import BandBuffer, ByteReader, ChunkIndex

SUMMABLE: Final[Mapping[str, DTypeLike]] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}
"""The element types that are summed."""
_FLOAT_FORMAT_LIMITS: Final = {
    "F64": (53, -1074, 1024),
    "F32": (24, -149, 128),
    "F16": (11, -24, 16),
    "BF16": (8, -133, 128),
}
"""Bits of the significand, the exponent of the smallest number, and that of the power of two above all."""
_RUN_ELEMENTS: Final = 1 << 16
"""Elements that are summed at a time."""
_SMALL_BITS: Final = 26
"""Bits of integers by which a number of 24 bits is multiplied exactly in float64, and that divide half a float64."""
_VELTKAMP_SPLITTER: Final = 2.0**27 + 1
"""Splits a float64 into two halves of 26 bits (Veltkamp)."""
_UNIT_ROUNDOFF: Final = 2.0**-53
_LEAST_EXACT: Final = 2.0**-900
"""Magnitudes below which the error of a product may underflow."""
_MOST_EXACT: Final = 2.0**990
"""Magnitudes above which a product or its halves may overflow."""


def count_run_bytes(inputs: int) -> int:
    """Count the bytes that one thread needs for the sum of `inputs` tensors."""
    return _RUN_ELEMENTS * 8 * (20 + inputs)


@value_class
class WeightedSum:
    """A tensor that is the weighted sum of others, as if its elements were stored in a row."""

    name: str
    shape: tuple[int, ...]
    inputs: tuple[ChunkIndex, ...]
    """The tensors, each with all its elements."""
    weights: tuple[Fraction, ...]
    dtype: DType
    """The element type of the result."""

    def read_values(self, reader: ByteReader, buffer: BandBuffer, offset: int, into: memoryview) -> int:
        """Fill `into` with the bytes from `offset`; returns how many sums of finite values are infinite.

        Raises SourceError for elements that are not floating-point numbers and differ between the tensors.
        """
        item = self.dtype.unit_bytes
        out = np.frombuffer(into, np.uint8)
        first, last = offset // item, (offset + len(out)) // item
        overflowed = written = 0
        for box in split_elements(self.shape, first, last, _RUN_ELEMENTS):
            found = [self._read(reader, buffer, each, box) for each in self.inputs]
            place = out[written : written + box.size * item]
            written += box.size * item
            if self.dtype.name not in SUMMABLE:
                self._require_equal(found)
                place[:] = found[0]
                continue
            values = [
                each.view(SUMMABLE[index.chunks[0].dtype.name]) for each, index in zip(found, self.inputs, strict=True)
            ]
            total = sum_weighted(values, self.weights, self.dtype.name)
            finite = np.logical_and.reduce([np.isfinite(each) for each in values])
            overflowed += int(np.count_nonzero(finite & ~np.isfinite(total)))
            place[:] = total.view(np.uint8)
        return overflowed

    def _read(self, reader: ByteReader, buffer: BandBuffer, index: ChunkIndex, box: Box) -> NDArray[np.uint8]:
        into = np.empty(index.chunks[0].dtype.nbytes(box.shape), np.uint8)
        found = buffer.read(reader, index, box, into)
        assert found == box.size, f"{self.name} {box}: read {found} elements"  # noqa: S101
        return into

    def _require_equal(self, found: Sequence[NDArray[np.uint8]]) -> None:
        if any(not np.array_equal(found[0], other) for other in found[1:]):
            raise SourceError(
                f"{self.name} is {self.dtype} and differs between the checkpoints: there is no average of it",
                hint=f"leave it out with --exclude '^{self.name}$'",
            )


def split_elements(shape: tuple[int, ...], start: int, stop: int, limit: int) -> Iterator[Box]:
    """Split the elements from `start` to `stop`, in row-major order, into boxes of at most `limit` elements.

    >>> [str(box) for box in split_elements((3, 4), 2, 11, 8)]
    ['[0:1, 2:4]', '[1:2, 0:4]', '[2:3, 0:3]']
    """
    inner = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    while start < stop:
        most = min(stop - start, limit)
        dim = next((d for d, size in enumerate(inner) if not start % size and size <= most), 0)
        origin = tuple(start // size % extent for size, extent in zip(inner, shape, strict=True))
        count = min(most // inner[dim], shape[dim] - origin[dim]) if shape else 1
        box = Box(origin, (*(1,) * dim, count, *shape[dim + 1 :]) if shape else ())
        yield box
        start += box.size


def sum_weighted(values: Sequence[NDArray[Any]], weights: Sequence[Fraction], dtype: str) -> NDArray[Any]:
    """Sum arrays of one shape, each times its weight, and round each element once to `dtype`, a key of `SUMMABLE`.

    An exact sum of zero is positive unless every product is a negative zero. Where a value is not finite, the sum is
    what float64 makes of it; what `dtype` does not hold becomes infinite.
    """
    with np.errstate(all="ignore"):
        near = _Remainders.of(values, weights)
        if dtype == "F64":
            rounded, wrong = near.sums.copy(), near.find_undecided()
        elif near.exact:
            rounded, wrong = _round_odd(near.sums, near.sides, dtype), near.unknown
        else:
            down, rounded = (_round_odd(near.sums, np.where(near.sides, near.sides, side), dtype) for side in (-1, 1))
            wrong = near.unknown | ~_is_same(down, rounded)
        plain = ~np.isfinite(near.plain) | ((near.sums == 0) & (near.plain == 0) & ~wrong)  # for the sign of zero
        if plain.any():
            rounded[plain] = near.plain[plain].astype(SUMMABLE[dtype])
    for place in np.flatnonzero(wrong & ~plain):
        total = sum((w * Fraction(float(v[place])) for w, v in zip(weights, values, strict=True)), Fraction())
        rounded[place] = _round_fraction(total, dtype)
    return rounded.astype(SUMMABLE[dtype], copy=False)


@value_class
class _Remainders:
    """Sums in float64, and what is known of how they differ from the exact ones, by less than their last bit."""

    sums: NDArray[np.float64]
    rests: NDArray[np.float64]
    """The exact sum less `sums`, up to `bounds`."""
    bounds: NDArray[np.float64]
    sides: NDArray[np.int8]
    """The sign of what is to be added for the exact sum; 0 if that is nothing, or too little to tell the sign."""
    exact: bool
    """Whether 0 means nothing."""
    unknown: NDArray[np.bool_]
    """Where none of this is known."""
    plain: NDArray[np.float64]
    """The sums as float64 computes them, which say where values are not finite."""

    @classmethod
    def of(cls, values: Sequence[NDArray[Any]], weights: Sequence[Fraction]) -> _Remainders:
        """Compute them, exactly if the weights are quotients of small integers and the values have at most 24 bits."""
        below = lcm(*(weight.denominator for weight in weights))
        above = [int(weight * below) for weight in weights]
        narrow = all(each.dtype != np.float64 for each in values)
        if narrow and max(below, *(abs(each) for each in above)) < 1 << _SMALL_BITS:
            return cls._of_integers(values, above, below)
        return cls._of_fractions(values, weights)

    @classmethod
    def _of_integers(cls, values: Sequence[NDArray[Any]], above: Sequence[int], below: int) -> _Remainders:
        """Add exact products up, with the exact error of each sum, and divide with the sign of the remainder."""
        shape = values[0].shape
        total, rest, lost = np.zeros(shape), np.zeros(shape), np.zeros(shape, bool)
        for number, (each, factor) in enumerate(zip(values, above, strict=True)):
            product = each.astype(np.float64) * factor
            total, error = _add(total, product) if number else (product, rest)
            rest, further = _add(rest, error)
            lost |= further != 0
        plain = total / below
        total, rest = _add(total, rest)
        quotient = total / below
        high = _take_high_half(quotient)
        left, error = _add(total - high * below, -(quotient - high) * below)
        left, further = _add(left, rest)
        sides = np.sign(np.where(left == 0, error + further, left)).astype(np.int8)
        doubtful = lost | ((left != 0) & (np.abs(error + further) >= np.abs(left)))
        nothing = np.zeros_like(quotient)
        return cls(quotient, nothing, nothing, sides, True, doubtful, plain)

    @classmethod
    def _of_fractions(cls, values: Sequence[NDArray[Any]], weights: Sequence[Fraction]) -> _Remainders:
        """Add products up in twice the bits of float64, with a bound of the error."""
        total = rest = plain = magnitude = np.zeros(values[0].shape)
        odd = np.zeros(values[0].shape, bool)
        for number, (each, weight) in enumerate(zip(values, weights, strict=True)):
            high = float(weight)
            low = float(weight - Fraction(high))
            wide = each.astype(np.float64)
            product, error = _multiply(wide, high)
            size = np.abs(product)
            odd |= ((size < _LEAST_EXACT) & (wide != 0)) | (np.maximum(size, np.abs(wide)) > _MOST_EXACT)
            plain = plain + product if number else product
            total, carried = _add(total, product) if number else (product, rest)
            rest = rest + (carried + (error + low * wide))
            magnitude = magnitude + size
        total, rest = _add(total, rest)
        bounds = magnitude * ((4 * len(values) ** 2 + 8) * _UNIT_ROUNDOFF**2)
        sides = np.where(np.abs(rest) > bounds, np.sign(rest), 0).astype(np.int8)
        return cls(total, rest, bounds, sides, False, odd, plain)

    def find_undecided(self) -> NDArray[np.bool_]:
        """Find where the sum that is nearest to the exact one may be another float64."""
        half = (np.abs(self.sums) - np.nextafter(np.abs(self.sums), 0)) / 2
        return self.unknown | ((np.abs(self.rests) + self.bounds >= half) & (self.bounds > 0))


def _add(one: NDArray[np.float64], two: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return a sum and its error, which together are exact (Knuth)."""
    total = one + two
    part = total - one
    return total, (one - (total - part)) + (two - part)


def _take_high_half(value: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a float64 rounded to 26 bits, from which it differs by a number of at most 26 bits (Veltkamp)."""
    spread = value * _VELTKAMP_SPLITTER
    return spread - (spread - value)


def _multiply(values: NDArray[np.float64], factor: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return products and their errors, which together are exact unless they over- or underflow (Dekker)."""
    product = values * factor
    high, factor_high = _take_high_half(values), float(_take_high_half(np.asarray(factor)))
    low, factor_low = values - high, factor - factor_high
    return product, ((high * factor_high - product) + high * factor_low + low * factor_high) + low * factor_low


def _round_odd(sums: NDArray[np.float64], sides: NDArray[np.int8], dtype: str) -> NDArray[Any]:
    """Round sums that are less (-1) or more (+1) by too little for float64, or exact (0), to a narrower type.

    A float64 with an odd last bit is on the right side of every number at which the rounding of fewer bits changes.
    """
    even = ((sums.view(np.int64) & 1) == 0) & (sides != 0)
    moved = np.where(even, np.nextafter(sums, np.where(sides < 0, -inf, inf)), sums)
    if dtype != "BF16":
        return moved.astype(SUMMABLE[dtype])
    single = moved.astype(np.float32)
    back = single.astype(np.float64)
    even = ((single.view(np.int32) & 1) == 0) & (back != moved) & np.isfinite(back)
    single = np.where(even, np.nextafter(single, np.where(moved > back, inf, -inf).astype(np.float32)), single)
    return single.astype(ml_dtypes.bfloat16)


def _is_same(one: NDArray[Any], two: NDArray[Any]) -> NDArray[np.bool_]:
    """Return where two arrays of floating-point numbers have the same bits."""
    bits = f"u{one.dtype.itemsize}"
    same: NDArray[np.bool_] = one.view(bits) == two.view(bits)
    return same


def _round_fraction(value: Fraction, dtype: str) -> float:
    """Round a rational number to the nearest number of a type, on a tie to the even one.

    >>> _round_fraction(Fraction(1, 3), "BF16"), _round_fraction(Fraction(10) ** 6, "F16")
    (0.333984375, inf)
    """
    bits, least, above = _FLOAT_FORMAT_LIMITS[dtype]
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    step = Fraction(2) ** max(exponent - bits + 1, least)
    rounded = round(size / step) * step
    found = inf if rounded >= Fraction(2) ** above else float(rounded)
    return -found if value < 0 else found
