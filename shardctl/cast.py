"""Casts between floating-point element types, on raw bytes and without torch.

Values round to nearest, ties to even; subnormals, signed zeros and infinities are kept; F64 goes through F32, as
``torch.Tensor.to`` does. What is finite and becomes infinite is counted. A NaN becomes the quiet NaN of its sign,
without payload: torch 2.13 drops signs or keeps payloads, depending on the dtypes and even on the number of elements.

    >>> from shardctl.dtype import BY_NAME
    >>> source, out = np.array([1.0, 1e39]).view(np.uint8), np.empty(8, np.uint8)
    >>> cast_elements(source, BY_NAME["F64"], BY_NAME["F32"], out)
    CastReport(overflowed=1)
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np

from shardctl.errors import UsageError
from shardctl.value import value_class

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from shardctl.dtype import DType


@value_class
class CastReport:
    """What a cast did that its caller must tell."""

    overflowed: int
    """Finite values that became infinite."""


@value_class
class _CastTarget:
    """The bit patterns of a type that can be cast to."""

    bits: DTypeLike
    sign: int
    infinity: int
    quiet_nan: int


_TARGETS: Final = {
    "F32": _CastTarget(np.uint32, 0x8000_0000, 0x7F80_0000, 0x7FC0_0000),
    "F16": _CastTarget(np.uint16, 0x8000, 0x7C00, 0x7E00),
    "BF16": _CastTarget(np.uint16, 0x8000, 0x7F80, 0x7FC0),
}
_FLOATS: Final[dict[str, DTypeLike]] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}
_TABLE_BITS: Final = 8
_BLOCK: Final = 1 << 17
"""Elements cast at a time: near the cores' caches, yet long enough that two threads seldom meet at Python's lock."""


def cast_elements(src: NDArray[np.uint8], have: DType, want: DType, out: NDArray[np.uint8]) -> CastReport:
    """Write the elements in `src`, bytes of dtype `have`, to `out` as bytes of dtype `want`.

    Equal dtypes are copied bit by bit, NaNs included. Holds the GIL only between blocks, and
    allocates at most 2 MiB while it runs.

    Raises:
        UsageError: there is no cast between the two dtypes.
        ValueError: `src` and `out` do not hold the same number of elements.
    """
    if src.size * want.bits != out.size * have.bits or src.size * 8 % have.bits:
        raise ValueError(f"{src.size} bytes of {have} do not fill {out.size} bytes of {want}")
    if have == want:
        np.copyto(out, src)
        return CastReport(0)
    if have.name not in _FLOATS or want.name not in _TARGETS:
        raise UsageError(
            f"{have} cannot be cast to {want}",
            hint=f"the casts are from {', '.join(_FLOATS)} to {', '.join(_TARGETS)}",
        )
    values, results, target = src.view(_FLOATS[have.name]), out.view(_FLOATS[want.name]), _TARGETS[want.name]
    overflowed = 0
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for start in range(0, values.size, _BLOCK):
            block, result = values[start : start + _BLOCK], results[start : start + _BLOCK]
            if have.name == "F64":
                np.copyto(result, block.astype(np.float32), casting="unsafe")
            elif have.bits == _TABLE_BITS:
                np.take(_build_cast_table(have.name, want.name), block.view(np.uint8), out=result, mode="clip")
            else:
                np.copyto(result, block, casting="unsafe")
            overflowed += _canonicalise_nans(block, result.view(target.bits), target)
    return CastReport(overflowed)


@cache
def _build_cast_table(have: str, want: str) -> NDArray[Any]:
    """Build what each of the 256 patterns of an 8-bit type becomes; looking it up is ten times as fast as casting."""
    return np.arange(2**_TABLE_BITS, dtype=np.uint8).view(_FLOATS[have]).astype(_FLOATS[want])


def _canonicalise_nans(values: NDArray[Any], bits: NDArray[Any], target: _CastTarget) -> int:
    """Make NaNs among the cast `bits` canonical; how many of the finite `values` became infinite."""
    magnitudes = bits & (target.sign - 1)
    if magnitudes.max() < target.infinity:
        return 0
    nan = magnitudes > target.infinity
    bits[nan] = bits[nan] & target.sign | target.quiet_nan
    became_infinite = (magnitudes == target.infinity) & np.isfinite(values)
    return int(np.count_nonzero(became_infinite))
