"""Rounds scaled weights to the nearest codes, with the roundings in between that compressed-tensors makes.

A weight in 16 bits, divided by its scale, is rounded to those 16 bits before it is rounded to the code, so that the
code follows from a table of 65,536 (compressed-tensors 0.20: quantization/lifecycle/forward_helpers.py, `_quantize`;
quantization/quant_args.py, `round_to_quantized_type_args`; quantization/utils/fp4_utils.py; compressors/nvfp4/
helpers.py).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np

from shardctl.models.adaptation.numbers import COMPUTABLE

if TYPE_CHECKING:
    from numpy.typing import NDArray

FP8_MOST: Final = np.float32(448)
FP4_MOST: Final = np.float32(6)
_F32_DTYPE: Final = "F32"
_FP4_BOUNDS: Final = np.array((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), np.float32)
"""Between neighbouring numbers of E2M1; those at odd places belong to the larger one, so that its code is even."""


def widen_bits(bits: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Return the numbers, as F32, of which `bits` are the patterns in `dtype`."""
    if dtype == "BF16":
        shifted: NDArray[np.uint32] = np.left_shift(bits, 16, dtype=np.uint32)
        return shifted.view(np.float32)
    return bits.view(COMPUTABLE[dtype]).astype(np.float32, copy=False)


def narrow_numbers(numbers: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Return the bit patterns of numbers that were rounded to `dtype`."""
    with np.errstate(over="ignore", under="ignore"):
        rounded = np.ascontiguousarray(numbers).astype(COMPUTABLE[dtype])
    return rounded.view(np.uint32 if dtype == _F32_DTYPE else np.uint16)


def round_to_codes(quotients: NDArray[np.float32], number: str, dtype: str) -> NDArray[np.uint8]:
    """Return the codes of weights that were divided by their scales, one in each byte; overwrites `quotients`.

    `dtype` is the type in which compressed-tensors has the quotients.
    """
    if dtype != _F32_DTYPE:
        return np.take(_build_code_table(number, dtype), narrow_numbers(quotients, dtype), mode="clip")
    if number.startswith("int"):
        return _encode_directly(quotients, number)
    return np.take(_build_code_table(number, "BF16"), _round_to_odd(quotients), mode="clip")


def _round_to_odd(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Cut numbers to 16 bits, of which the last says whether something was lost.

    What is rounded next, to at most five significant bits, comes out as if it had been rounded at once.
    """
    bits = numbers.view(np.uint32)
    cut = (bits >> np.uint32(16)).astype(np.uint16)
    cut |= (bits & np.uint32(0xFFFF)) != 0
    return cut


@cache
def _build_code_table(number: str, dtype: str) -> NDArray[np.uint8]:
    """Build the code of each of the 65,536 numbers; those that are none, or infinite, are refused before."""
    with np.errstate(invalid="ignore"):
        return _encode_directly(widen_bits(np.arange(1 << 16, dtype=np.uint16), dtype).copy(), number)


def _encode_directly(numbers: NDArray[np.float32], number: str) -> NDArray[np.uint8]:
    if number == "fp8":
        return np.clip(numbers, -FP8_MOST, FP8_MOST).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    if number == "fp4":
        return _encode_fp4(numbers)
    low, high = (-128, 127) if number == "int8" else (-8, 7)
    codes = np.rint(np.clip(numbers, low, high, out=numbers), out=numbers).astype(np.int8)
    return (codes if number == "int8" else codes + np.int8(8)).view(np.uint8)


def _encode_fp4(numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the codes of E2M1; a number below zero that is rounded to zero keeps its sign, and a negative zero not."""
    size = np.abs(numbers)
    codes = np.zeros(numbers.shape, np.uint8)
    for place, bound in enumerate(_FP4_BOUNDS):
        codes += size >= bound if place % 2 else size > bound
    return codes | (numbers < 0).astype(np.uint8) << np.uint8(3)


def pack_codes(codes: NDArray[np.uint8], per_unit: int) -> NDArray[Any]:
    """Pack neighbouring codes of a row into an element, the first in its lowest bits.

    >>> pack_codes(np.array([[1, 2, 3, 4]], np.uint8), 2).tolist()
    [[33, 67]]
    """
    if per_unit == 1:
        return codes
    if per_unit == 2:  # noqa: PLR2004 - two codes of four bits
        return codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
    pairs = pack_codes(codes, 2)
    return np.ascontiguousarray(pairs).view(np.dtype("<u4"))
