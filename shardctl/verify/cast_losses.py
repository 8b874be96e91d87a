"""Measures what a cast or a quantization changed: how far values are from those before, and which became infinite."""

from __future__ import annotations

import threading
from dataclasses import field
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from shardctl.base.amounts import format_plural
from shardctl.base.dtype import BY_NAME
from shardctl.base.value import state_class, value_class
from shardctl.tensors.cast import cast_elements

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardctl.base.dtype import DType

_F32_DTYPE: Final = BY_NAME["F32"]
_SLICE_ELEMENTS: Final = 1 << 16
"""Elements that are measured at a time: their copies in float64 (512 KiB each) stay near the cores' caches."""


@value_class
class UnroundedDistance:
    """How far the tensors of a checkpoint are from those of its source before these were cast or quantized.

    The figures have six digits: how a processor adds up thousands of differences moves the last ones.
    """

    change: Literal["cast", "quantized"]
    """What was done to them."""
    tensors: int
    """How many there are."""
    largest: float
    """The largest absolute difference of two finite elements."""
    tensor: str
    """The tensor with that element."""
    mean: float
    """The mean absolute difference of all finite elements."""
    relative: float
    """The sum of the absolute differences by the sum of the absolute values of the source."""

    def __str__(self) -> str:
        tensors = format_plural(self.tensors, "tensor")
        if not self.largest:
            return f"{tensors} were {self.change}, and their values are those from before"
        return (
            f"{tensors} were {self.change}: values are at most {self.largest:.3g} from those before ({self.tensor}), "
            f"{self.mean:.3g} in the mean, {self.relative:.2%} of their size"
        )


@value_class
class _BandSums:
    """What is added up over the finite elements of bands."""

    largest: float = 0.0
    apart: float = 0.0
    size: float = 0.0
    count: int = 0

    def plus(self, other: _BandSums) -> _BandSums:
        return _BandSums(
            max(self.largest, other.largest),
            self.apart + other.apart,
            self.size + other.size,
            self.count + other.count,
        )


@state_class
class CastLosses:
    """What several threads find that a change of type lost."""

    overflowed: dict[str, int] = field(default_factory=dict)
    """Finite values that became infinite, by tensor; those of masks do not count."""
    _sums: dict[str, _BandSums] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def measure(
        self, tensor: str, result: NDArray[np.uint8], dtype: DType, source: NDArray[np.uint8], other: DType
    ) -> None:
        """Add how far a band of `dtype` is from what its source had, of type `other`; both are floats."""
        found, ours, theirs = _BandSums(), dtype.bits // 8, other.bits // 8
        for start in range(0, result.size // ours, _SLICE_ELEMENTS):
            stop = start + _SLICE_ELEMENTS
            left = _read_numbers(result[start * ours : stop * ours], dtype)
            right = _read_numbers(source[start * theirs : stop * theirs], other)
            found = found.plus(_measure_slice(left, right))
        with self._lock:
            self._sums[tensor] = self._sums.get(tensor, _BandSums()).plus(found)

    def note_overflow(self, tensor: str, count: int) -> None:
        """Add finite values of a band that a cast made infinite."""
        if count:
            with self._lock:
                self.overflowed[tensor] = self.overflowed.get(tensor, 0) + count

    def summarize(self, change: Literal["cast", "quantized"]) -> UnroundedDistance | None:
        """Return the distance over all tensors that were measured; None if there are none."""
        if not self._sums:
            return None
        total = _BandSums()
        for each in self._sums.values():
            total = total.plus(each)
        farthest = max(self._sums, key=lambda name: self._sums[name].largest)
        mean, relative = total.apart / max(total.count, 1), total.apart / total.size if total.size else 0.0
        figures = (float(f"{each:.6g}") for each in (total.largest, mean, relative))
        largest, mean, relative = figures
        return UnroundedDistance(change, len(self._sums), largest, farthest, mean, relative)


def _measure_slice(left: NDArray[np.float64], right: NDArray[np.float64]) -> _BandSums:
    with np.errstate(invalid="ignore"):
        apart = np.abs(left - right)
    if not np.isfinite(apart.max(initial=0.0)):
        finite = np.isfinite(apart)
        apart, right = apart[finite], right[finite]
    return _BandSums(float(apart.max(initial=0.0)), float(apart.sum()), float(np.abs(right).sum()), apart.size)


def _read_numbers(data: NDArray[np.uint8], dtype: DType) -> NDArray[np.float64]:
    if dtype.name == "F64":
        return data.view(np.float64)
    wide = np.empty(data.size * 32 // dtype.bits, np.uint8)
    cast_elements(data, dtype, _F32_DTYPE, wide)
    with np.errstate(invalid="ignore"):  # a NaN that signals is none of ours
        return wide.view(np.float32).astype(np.float64)
