"""Measures how far apart the values of two tensors are, with the same result on every processor.

Sums are exact, as those of `value_statistics`: neither the threads nor the size of the bands changes a digit.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

import numpy as np

from shardctl.base.dtype import BY_NAME, CASTABLE
from shardctl.base.value import value_class
from shardctl.tensors.cast import cast_elements
from shardctl.verify.value_statistics import UNIT_EXPONENT, measure_values

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardctl.base.dtype import DType

_MACHINE_EPSILONS: Final = {"F64": 2.0**-52, "F32": 2.0**-23, "F16": 2.0**-10, "BF16": 2.0**-7}
"""The distance from a number of the type to the next, at most, as a part of the number."""
_CANCELLATION_TOLERANCE: Final = 2.0**-16
"""How far rounding can move what is left of two numbers of F32 that almost cancel, as a part of the largest number.

That of a product that was added up in F32 is off by a few units in the last place, 2**-23 of it."""


@value_class
class ValueDistance:
    """How far apart two tensors are where they differ; only finite values count."""

    largest: float
    """The largest absolute difference of two elements."""
    mean: float
    """The mean absolute difference of the elements that differ."""
    relative: float
    """The sum of these differences by the sum of the absolute values of the second tensor there."""
    nonfinite: int = 0
    """Differing elements that are NaN or infinite in one of the two."""
    rounding: bool = False
    """Whether each pair is so near that one sum, rounded twice, can have become both."""

    def __str__(self) -> str:
        if not (self.largest or self.mean):
            return f"{self.nonfinite:,} of them not finite in one of the two" if self.nonfinite else "equal as numbers"
        text = f"apart by {self.largest:.3g} at most and {self.mean:.3g} in the mean, {self.relative:.2%} of their size"
        return text + (f", and {self.nonfinite:,} not finite" if self.nonfinite else "")


@value_class
class DistanceSums:
    """What is added up of elements that differ."""

    largest: float = 0.0
    apart: int = 0
    """The sum of the differences, in units of `2**UNIT_EXPONENT`."""
    size: int = 0
    """The sum of the absolute values of the second tensor, in the same units."""
    finite: int = 0
    nonfinite: int = 0
    magnitude: float = 0.0
    """The largest absolute value of the second tensor."""
    beyond: float = 0.0
    """By how much a difference exceeds the distance to the next number of the type, at most."""
    squares: int = 0
    """The sum of the squares of the differences, in units of `2**(2 * UNIT_EXPONENT)`."""

    def plus(self, other: DistanceSums) -> DistanceSums:
        """Return the sums over both."""
        return DistanceSums(
            max(self.largest, other.largest),
            self.apart + other.apart,
            self.size + other.size,
            self.finite + other.finite,
            self.nonfinite + other.nonfinite,
            max(self.magnitude, other.magnitude),
            max(self.beyond, other.beyond),
            self.squares + other.squares,
        )

    def divide(self) -> ValueDistance:
        """Return what the sums say."""
        relative = self.apart / self.size if self.size else inf if self.apart else 0.0
        mean = self.apart / (max(self.finite, 1) << -UNIT_EXPONENT)
        rounding = not self.nonfinite and self.beyond <= self.magnitude * _CANCELLATION_TOLERANCE
        return ValueDistance(self.largest, mean, relative, self.nonfinite, rounding)


def measure_distance(
    left: NDArray[np.uint8], right: NDArray[np.uint8], dtype: DType, stored: DType
) -> DistanceSums | None:
    """Measure how far the elements of a band that differ are apart; None for other than plain floats.

    Both are of `dtype`; the second may have been `stored` in another type.
    """
    if dtype.name not in CASTABLE:
        return None
    step = max(_MACHINE_EPSILONS[dtype.name], _MACHINE_EPSILONS.get(stored.name, 0.0))
    width = dtype.bits // 8
    words = left.view(f"<u{width}") != right.view(f"<u{width}")
    ours, theirs = (_read_numbers(each.view(f"<u{width}")[words].view(np.uint8), dtype) for each in (left, right))
    finite = np.isfinite(ours) & np.isfinite(theirs)
    with np.errstate(over="ignore"):
        ours, theirs = np.abs(ours[finite] - theirs[finite]), np.abs(theirs[finite])
    np.minimum(ours, np.finfo(np.float64).max, out=ours)
    count = int(finite.sum())
    apart = measure_values(ours.view(np.uint8), BY_NAME["F64"])
    return DistanceSums(
        apart.largest,
        apart.total,
        measure_values(theirs.view(np.uint8), BY_NAME["F64"], squares=False).total,
        count,
        int(words.sum()) - count,
        float(theirs.max(initial=0.0)),
        float((ours - theirs * step).max(initial=0.0)),
        apart.squares,
    )


def _read_numbers(data: NDArray[np.uint8], dtype: DType) -> NDArray[np.float64]:
    if dtype.name == "F64":
        return data.view(np.float64)
    wide = np.empty(data.size * 32 // dtype.bits, np.uint8)
    cast_elements(data, dtype, BY_NAME["F32"], wide)
    with np.errstate(invalid="ignore"):  # a NaN that signals is none of ours
        return wide.view(np.float32).astype(np.float64)
