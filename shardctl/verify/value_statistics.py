"""Adds up the values of tensors exactly, so that norms and means do not depend on the CPU, the threads or the bands.

Every number is an integer times a power of two. Bands of tensors are measured by several threads, their sums are
integers of any length, and these are the same in any order; a norm or a mean is rounded once, at the end.

>>> from shardctl.base.dtype import BY_NAME
>>> data = np.float32([3, -4, 0, np.nan]).view(np.uint8)
>>> sums = measure_values(data, BY_NAME["F32"])
>>> sums.describe()
ValueStatistics(elements=4, norm=5.0, mean=-0.3333333333333333, largest=4.0, zeros=1, nans=1, infinities=0)
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import combinations_with_replacement
from math import inf, isqrt
from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np

from shardctl.base.dtype import BY_NAME
from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import DTypeLike, NDArray

    from shardctl.base.dtype import DType

UNIT_EXPONENT: Final = -1074
"""The exponent of the unit of exact sums: that of the smallest number of float64, of which all others are multiples.

Sums of squares have twice the exponent."""
_SLICE_ELEMENTS: Final = 1 << 15
"""Elements that are added up at a time: their copies (256 KiB each) stay near the cores' caches."""
_LIMB_BITS: Final = 27
"""Bits of the integers that are added up in float64: 2**26 of them have an exact sum, more than a band has."""
_LIMB_MASK: Final = np.uint64((1 << _LIMB_BITS) - 1)
_WORD_BITS: Final = 32
_WORD_MASK: Final = (1 << _WORD_BITS) - 1
_ROOT_BITS: Final = 128
"""Bits of an integer whose root, cut off to an integer, has more bits than a float64 and one for the rounding."""
_CODE_TYPES: Final[dict[str, DTypeLike]] = {
    "BOOL": np.bool_,
    "F4": ml_dtypes.float4_e2m1fn,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}
"""Types of so few numbers that a table has them all."""
_CODE_FRACTION_BITS: Final = 11
"""Bits of the significands in such a table: F16 has the most."""
_FLOAT_LAYOUTS: Final = {"F32": (23, 150), "F64": (52, 1075)}
"""Bits of the fraction, and what is taken from the stored exponent for that of the fraction's last bit."""
_INTEGER_TYPES: Final = {"I16": "<i2", "U16": "<u2", "I32": "<i4", "U32": "<u4", "I64": "<i8", "U64": "<u8"}
COUNTABLE: Final = frozenset({*_CODE_TYPES, *_FLOAT_LAYOUTS, *_INTEGER_TYPES, "C64"})
"""The names of the types that are measured; those of 6 bits are packed in more than one order."""


@value_class
class ValueStatistics:
    """What the values of a tensor or of a layer are. The norm, the mean and the largest are those of finite values."""

    elements: int
    norm: float
    """The root of the sum of the squares, rounded once."""
    mean: float
    """Rounded once; 0 where no value is finite."""
    largest: float
    """The largest absolute value."""
    zeros: int
    nans: int
    infinities: int


@value_class
class ValueSums:
    """What is added up of values; sums over disjoint bands add up in any order."""

    elements: int = 0
    total: int = 0
    """The sum of the finite values, in units of `2**UNIT_EXPONENT`."""
    squares: int = 0
    """The sum of their squares, in units of `2**(2 * UNIT_EXPONENT)`."""
    largest: float = 0.0
    zeros: int = 0
    nans: int = 0
    infinities: int = 0

    def plus(self, other: ValueSums) -> ValueSums:
        """Return the sums over both."""
        return ValueSums(
            self.elements + other.elements,
            self.total + other.total,
            self.squares + other.squares,
            max(self.largest, other.largest),
            self.zeros + other.zeros,
            self.nans + other.nans,
            self.infinities + other.infinities,
        )

    def describe(self) -> ValueStatistics:
        """Return what the sums say."""
        finite = self.elements - self.nans - self.infinities
        mean = self.total / (max(finite, 1) << -UNIT_EXPONENT)
        norm = compute_root(self.squares)
        return ValueStatistics(self.elements, norm, mean, self.largest, self.zeros, self.nans, self.infinities)


def compute_root(squares: int) -> float:
    """Compute the root of a sum of squares, which has their units, rounded once to the nearest float64.

    It is infinite where float64 does not hold it.

    >>> compute_root(2 << -2 * UNIT_EXPONENT)
    1.4142135623730951
    """
    shift = max(_ROOT_BITS - squares.bit_length() + 1, 0) // 2
    root = isqrt(squares << 2 * shift)
    rest = root * root != squares << 2 * shift  # a last bit that is set keeps the rounding from taking it for a tie
    try:
        return (2 * root + rest) / (1 << shift + 1 - UNIT_EXPONENT)
    except OverflowError:
        return inf


def measure_values(data: NDArray[np.uint8], dtype: DType, *, squares: bool = True) -> ValueSums:
    """Add up the elements that `data` has, bytes of a type in `COUNTABLE`; of complex numbers each part counts.

    Allocates at most 4 MiB while it runs. Without `squares`, their sum is zero.
    """
    if dtype.name == "C64":
        dtype = BY_NAME["F32"]
    if dtype.name in _CODE_TYPES:
        return _measure_codes(data, dtype)
    if dtype.name in _INTEGER_TYPES:
        return _measure_integers(data.view(_INTEGER_TYPES[dtype.name]))
    return _measure_floats(data.view(f"<u{dtype.unit_bytes}"), dtype, squares=squares)


@value_class
class _CodeTable:
    """What each bit pattern of a type means."""

    numbers: NDArray[np.float64]
    significands: NDArray[np.float64]
    """Integers, zero where the number is not finite."""
    exponents: NDArray[np.int64]
    """Those of two that they are multiplied with, less the lowest."""
    lowest: int


@cache
def _build_code_table(name: str) -> _CodeTable:
    bits = BY_NAME[name].bits
    codes = np.arange(1 << bits).astype(np.uint16 if bits > 8 else np.uint8)  # noqa: PLR2004 - bits of a byte
    with np.errstate(invalid="ignore"):
        numbers = (
            (codes != 0).astype(np.float64) if name == "BOOL" else codes.view(_CODE_TYPES[name]).astype(np.float64)
        )
    fractions, exponents = np.frexp(np.where(np.isfinite(numbers), numbers, 0))
    lowest = int(exponents.min())
    return _CodeTable(
        numbers,
        fractions * 2**_CODE_FRACTION_BITS,
        (exponents - lowest).astype(np.int64),
        lowest - _CODE_FRACTION_BITS,
    )


def _measure_codes(data: NDArray[np.uint8], dtype: DType) -> ValueSums:
    """Count how often each bit pattern occurs, and add up what they mean as often; a few values are taken as they are.

    To count them would take as long as to add up thousands.
    """
    table = _build_code_table(dtype.name)
    if data.size * dtype.unit_elements < len(table.numbers) // 8:
        codes: NDArray[Any] = np.concatenate(list(_read_codes(data, dtype)))
        times: NDArray[Any] = np.ones(len(codes), np.int64)
    else:
        counts = np.zeros(len(table.numbers), np.int64)
        for part in _read_codes(data, dtype):
            counts += np.bincount(part, minlength=len(counts))
        codes = np.flatnonzero(counts)
        times = counts[codes]
    numbers, exponents, significands = table.numbers[codes], table.exponents[codes], table.significands[codes]
    weights = times * significands
    total, squared = np.bincount(exponents, weights), np.bincount(exponents, weights * significands)
    finite = np.isfinite(numbers)
    return ValueSums(
        int(times.sum()),
        _join_exponents(total, table.lowest - UNIT_EXPONENT, 1),
        _join_exponents(squared, 2 * (table.lowest - UNIT_EXPONENT), 2),
        float(np.abs(numbers[finite]).max(initial=0.0)),
        int(times[numbers == 0].sum()),
        int(times[np.isnan(numbers)].sum()),
        int(times[np.isinf(numbers)].sum()),
    )


def _read_codes(data: NDArray[np.uint8], dtype: DType) -> Iterator[NDArray[Any]]:
    if dtype.unit_elements > 1:
        for start in range(0, data.size, _SLICE_ELEMENTS):
            pairs = data[start : start + _SLICE_ELEMENTS]
            yield pairs & np.uint8(15)
            yield pairs >> np.uint8(4)
        return
    codes = data.view(f"<u{dtype.unit_bytes}")
    for start in range(0, codes.size, 4 * _SLICE_ELEMENTS):
        yield codes[start : start + 4 * _SLICE_ELEMENTS]


def _measure_integers(values: NDArray[Any]) -> ValueSums:
    """Add up integers by halves of 32 bits, whose sums and products 64 bits hold."""
    total = squares = largest = zeros = 0
    for start in range(0, values.size, _SLICE_ELEMENTS):
        part = values[start : start + _SLICE_ELEMENTS]
        wide = part.astype(np.uint64 if part.dtype.kind == "u" else np.int64)
        size = np.abs(wide).view(np.uint64)
        total += (int((wide >> _WORD_BITS).sum()) << _WORD_BITS) + int((wide & _WORD_MASK).sum())
        high, low = size >> _WORD_BITS, size & _WORD_MASK
        for shift, product in ((2 * _WORD_BITS, high * high), (_WORD_BITS + 1, high * low), (0, low * low)):
            squares += int((product >> _WORD_BITS).sum()) << shift + _WORD_BITS
            squares += int((product & _WORD_MASK).sum()) << shift
        largest = max(largest, int(size.max()))
        zeros += int(np.count_nonzero(part == 0))
    unit = -UNIT_EXPONENT
    return ValueSums(values.size, total << unit, squares << 2 * unit, float(largest), zeros)


def _measure_floats(words: NDArray[Any], dtype: DType, *, squares: bool) -> ValueSums:
    """Add up the significands of each exponent, as integers in one or two limbs."""
    fraction_bits, bias = _FLOAT_LAYOUTS[dtype.name]
    sign_bit, top = dtype.bits - 1, (1 << dtype.bits - 1 - fraction_bits) - 1
    totals, products = Counter[int](), Counter[int]()
    sums: dict[tuple[bool, int], NDArray[np.float64]] = {}
    largest = zeros = nans = infinities = 0
    for start in range(0, words.size, _SLICE_ELEMENTS):
        part = words[start : start + _SLICE_ELEMENTS].astype(np.uint64)
        size = part & np.uint64((1 << sign_bit) - 1)
        exponents = (size >> np.uint64(fraction_bits)).astype(np.int64)
        fractions = size & np.uint64((1 << fraction_bits) - 1)
        zeros += int(np.count_nonzero(size == 0))
        if exponents.max() == top:
            odd = exponents == top
            infinity = int(np.count_nonzero(odd & (fractions == 0)))
            infinities, nans = infinities + infinity, nans + int(np.count_nonzero(odd)) - infinity
            keep = ~odd
            part, size, exponents, fractions = part[keep], size[keep], exponents[keep], fractions[keep]
        largest = max(largest, int(size.max(initial=0)))
        significands = fractions | ((exponents > 0).astype(np.uint64) << np.uint64(fraction_bits))
        limbs = [(0, significands)]
        if fraction_bits >= _LIMB_BITS:
            limbs = [(0, significands & _LIMB_MASK), (_LIMB_BITS, significands >> np.uint64(_LIMB_BITS))]
        signs = 1 - 2 * (part >> np.uint64(sign_bit)).astype(np.float64)
        for shift, limb in limbs:
            _add_by_exponent(sums, (False, shift), exponents, limb * signs, top)
        for (one, left), (two, right) in combinations_with_replacement(limbs, 2) if squares else ():
            product, shift = left * right, one + two + (one != two)
            _add_by_exponent(sums, (True, shift), exponents, product & _LIMB_MASK, top)
            _add_by_exponent(sums, (True, shift + _LIMB_BITS), exponents, product >> np.uint64(_LIMB_BITS), top)
    for (squared, shift), found in sums.items():
        for exponent in np.flatnonzero(found).tolist():
            place = max(exponent, 1) - bias - UNIT_EXPONENT
            (products if squared else totals)[shift + place * (1 + squared)] += int(found[exponent])
    number = np.array([largest], f"<u{dtype.unit_bytes}").view(f"<f{dtype.unit_bytes}")
    total, squared_total = (sum(value << shift for shift, value in each.items()) for each in (totals, products))
    return ValueSums(words.size, total, squared_total, float(number[0]), zeros, nans, infinities)


def _add_by_exponent(
    sums: dict[tuple[bool, int], NDArray[np.float64]],
    key: tuple[bool, int],
    exponents: NDArray[np.int64],
    integers: NDArray[Any],
    top: int,
) -> None:
    found: NDArray[Any] = np.bincount(exponents, integers, minlength=top)
    sums[key] = sums[key] + found if key in sums else found


def _join_exponents(found: NDArray[Any], place: int, step: int) -> int:
    return sum(int(value) << place + step * exponent for exponent, value in enumerate(found.tolist()) if value)
