"""Works out scales from the largest magnitudes of blocks, as LLM Compressor's observers do without data.

(LLM Compressor 0.14, observers/min_max.py and base.py; compressed-tensors 0.20, quantization/utils/helpers.py,
`calculate_qparams` and `generate_gparam`; quantization/utils/mxfp_utils.py, `generate_mx_scales`.) All is computed in
the type of the weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np

from shardctl.models.rounding.codes import FP4_MOST, FP8_MOST, narrow_numbers, widen_bits

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardctl.models.rounding.recipes import RoundingRecipe

_HALF_RANGES: Final = {"fp8": FP8_MOST, "fp4": FP4_MOST, "int8": np.float32(127.5), "int4": np.float32(7.5)}
_ZERO_BLOCK_SCALES: Final = {"BF16": 2.0**-7, "F16": 2.0**-10, "F32": 2.0**-23}
"""The scales of blocks of zeros alone."""
_FP8_EPSILON: Final = 0.125
_FLOAT_FORMAT_PARAMETERS: Final = {"BF16": (7, 8, 127), "F16": (10, 5, 15), "F32": (23, 8, 127)}
"""Bits of the mantissa, bits of the exponent, and its bias."""
_MAX_VALUE_EXPONENTS: Final = {"fp8": 8, "fp4": 2}
"""The exponents of the largest numbers."""
_MIN_NORMAL_VALUES: Final = {"BF16": 2.0**-126, "F16": 2.0**-14, "F32": 2.0**-126}
_E8M0_EXPONENT_BIAS: Final = 127
_MIN_FREXP_FRACTION: Final = 0.5
"""The smallest fraction of a number."""
_LEAST_F16: Final = -24


@dataclass(frozen=True)
class ScaleRule:
    """How the scales of a recipe follow from the magnitudes of weights in a type."""

    recipe: RoundingRecipe
    dtype: str

    @property
    def stored_type(self) -> str:
        """The element type of the scales."""
        return {"float": self.dtype, "exponent": "U8", "fp8": "F8_E4M3", "exact": "F8_E8M0"}[self.recipe.scale]

    @property
    def quotient_type(self) -> str:
        """The type in which weights are divided by their scales."""
        return "F32" if self.recipe.scale == "fp8" else self.dtype

    @cached_property
    def magnitude(self) -> int:
        """The bits of a number but for its sign."""
        return (1 << (31 if self.dtype == "F32" else 15)) - 1

    @cached_property
    def infinity(self) -> int:
        """The bits of infinity; NaNs have larger ones."""
        mantissa, exponent, _ = _FLOAT_FORMAT_PARAMETERS[self.dtype]
        return ((1 << exponent) - 1) << mantissa

    def compute_scales(self, peaks: NDArray[Any], whole: float) -> NDArray[Any]:
        """Compute the bits of the scales, as they are stored; `peaks` are the bits of blocks' largest magnitudes.

        `whole` is the number beside scales in FP8.
        """
        if self.recipe.scale == "exact":
            return self._compute_exact_exponents(peaks)
        if self.recipe.scale == "exponent":
            return self._compute_exponents(peaks)
        scales = narrow_numbers(widen_bits(peaks, self.dtype) / _HALF_RANGES[self.recipe.number], self.dtype)
        if self.recipe.scale == "float":
            scales[scales == 0] = narrow_numbers(np.array(_ZERO_BLOCK_SCALES[self.dtype], np.float32), self.dtype)
            return scales
        with np.errstate(over="ignore"):
            scaled = np.minimum(np.float32(whole) * widen_bits(scales, self.dtype), FP8_MOST)
        stored = scaled.astype(ml_dtypes.float8_e4m3fn)
        stored[stored == 0] = _FP8_EPSILON
        bits: NDArray[np.uint8] = stored.view(np.uint8)
        return bits

    def _compute_exponents(self, peaks: NDArray[Any]) -> NDArray[np.uint8]:
        """Compute biased powers of two: exponents of peaks, from 7/8 of the next power on that one, less an offset."""
        mantissa, _, bias = _FLOAT_FORMAT_PARAMETERS[self.dtype]
        fields = (peaks.astype(np.int64) + (1 << (mantissa - 2))) >> mantissa
        found = fields - bias + _E8M0_EXPONENT_BIAS - _MAX_VALUE_EXPONENTS[self.recipe.number]
        found = np.where(fields == 0, 0, np.clip(found, 0, 255))
        if self.dtype == "F16":  # whose own powers of two end there, so that compressed-tensors has zeros, then ones
            found = np.where(found < _LEAST_F16 + _E8M0_EXPONENT_BIAS, _E8M0_EXPONENT_BIAS, found)
        return found.astype(np.uint8)

    def _compute_exact_exponents(self, peaks: NDArray[Any]) -> NDArray[np.uint8]:
        """Compute biased powers of two: the smallest with which the largest code holds the peak."""
        fractions, exponents = np.frexp(widen_bits(peaks, self.dtype) / FP8_MOST)
        found = np.where(fractions > _MIN_FREXP_FRACTION, exponents, exponents - 1)
        biased: NDArray[np.uint8] = np.clip(
            np.where(fractions == 0, 0, found) + _E8M0_EXPONENT_BIAS, 0, 2 * _E8M0_EXPONENT_BIAS
        ).astype(np.uint8)
        return biased

    def find_overflow(self, peaks: NDArray[Any]) -> bool:
        """Return whether a scale would be infinite, whereupon compressed-tensors has zeros for the whole block."""
        if self.recipe.scale != "exponent":
            return False
        mantissa, _, _ = _FLOAT_FORMAT_PARAMETERS[self.dtype]
        return bool(peaks.size) and int(peaks.max()) + (1 << (mantissa - 2)) >= self.infinity

    def compute_divisors(self, scales: NDArray[Any], whole: float) -> NDArray[np.float32]:
        """Compute what the weights are divided by, from the bits of stored scales."""
        if self.recipe.scale in ("exponent", "exact"):
            powers: NDArray[np.float32] = np.ldexp(np.float32(1), scales.astype(np.int32) - _E8M0_EXPONENT_BIAS)
            return powers
        if self.recipe.scale == "fp8":
            numbers: NDArray[np.float32] = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
            return numbers / np.float32(whole)
        return widen_bits(scales, self.dtype)

    def compute_whole(self, peak: int) -> float | None:
        """Compute the number beside scales in FP8 from the largest magnitude of all; None if the type cannot hold it.

        Of zeros alone it is one.
        """
        largest: NDArray[np.float32] = np.maximum(self._read_number(peak), np.float32(_MIN_NORMAL_VALUES[self.dtype]))
        with np.errstate(over="ignore"):  # torch multiplies with the reciprocal, which it rounds before
            found = self._round_number(self._round_number(np.reciprocal(largest)) * (FP8_MOST * FP4_MOST))
        if np.isfinite(found[0]):
            return float(found[0])
        return None if peak else 1.0

    def _read_number(self, bits: int) -> NDArray[np.float32]:
        return widen_bits(np.array([bits], np.uint32 if self.dtype == "F32" else np.uint16), self.dtype)

    def _round_number(self, number: NDArray[np.float32]) -> NDArray[np.float32]:
        return widen_bits(narrow_numbers(number, self.dtype), self.dtype)
