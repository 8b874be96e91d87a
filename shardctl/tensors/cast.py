"""Casts between floating-point element types, on raw bytes and without torch.

Values round to nearest, ties to even; subnormals, signed zeros and infinities are kept; F64 goes through F32, as
``torch.Tensor.to`` does. Finite values that become infinite are counted. A NaN becomes the quiet NaN of its sign,
without payload: torch 2.13 drops signs or keeps payloads, depending on the dtypes and even on the number of elements.

    >>> from shardctl.base.dtype import BY_NAME
    >>> source, out = np.array([1.0, 1e39]).view(np.uint8), np.empty(8, np.uint8)
    >>> cast_elements(source, BY_NAME["F64"], BY_NAME["F32"], out)
    CastReport(overflowed=1, minima=0)
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np

from shardctl.base.errors import SourceError, UsageError
from shardctl.base.value import value_class

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from shardctl.base.dtype import DType


@value_class
class CastReport:
    """What a cast did that its caller must report."""

    overflowed: int
    """Finite values that became infinite."""
    minima: int = 0
    """Those of them that were the lowest number of a type (`torch.finfo(dtype).min`), as masks of attention hold it."""

    def count_lost_values(self, tensor: str) -> int:
        """Count the values of `tensor` that the cast lost.

        A mask buffer holds the lowest number of its type in place of minus infinity, so minus infinity means the same
        in it. A weight has no such numbers.

        >>> report = CastReport(overflowed=3, minima=2)
        >>> report.count_lost_values("h.0.attn.masked_bias"), report.count_lost_values("norm.weight")
        (1, 3)
        """
        is_weight = tensor.rpartition(".")[2].startswith("weight")
        return self.overflowed - (0 if is_weight else self.minima)


@value_class
class _CastTarget:
    """The bit patterns of a type that can be cast to."""

    bits: DTypeLike
    sign: int
    infinity: int
    quiet_nan: int


_CAST_TARGETS: Final = {
    "F32": _CastTarget(np.uint32, 0x8000_0000, 0x7F80_0000, 0x7FC0_0000),
    "F16": _CastTarget(np.uint16, 0x8000, 0x7C00, 0x7E00),
    "BF16": _CastTarget(np.uint16, 0x8000, 0x7F80, 0x7FC0),
}
_NUMPY_FLOAT_TYPES: Final[dict[str, DTypeLike]] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}
_LOWEST_FINITE_VALUES: Final = (-1.7976931348623157e308, -3.4028234663852886e38, -3.3895313892515355e38)
"""The lowest numbers of F64, F32 and BF16; a mask that was widened still holds that of its earlier type."""
_TABLE_BITS: Final = 8
_CAST_BLOCK_ELEMENTS: Final = 1 << 17
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
    if not has_cast(have, want):
        raise UsageError(
            f"{have} cannot be cast to {want}",
            hint=f"the casts are from {', '.join(_NUMPY_FLOAT_TYPES)} to {', '.join(_CAST_TARGETS)}",
        )
    values, results, target = (
        src.view(_NUMPY_FLOAT_TYPES[have.name]),
        out.view(_NUMPY_FLOAT_TYPES[want.name]),
        _CAST_TARGETS[want.name],
    )
    overflowed = minima = 0
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for start in range(0, values.size, _CAST_BLOCK_ELEMENTS):
            block, result = values[start : start + _CAST_BLOCK_ELEMENTS], results[start : start + _CAST_BLOCK_ELEMENTS]
            if have.name == "F64":
                np.copyto(result, block.astype(np.float32), casting="unsafe")
            elif have.bits == _TABLE_BITS:
                np.take(_build_cast_table(have.name, want.name), block.view(np.uint8), out=result, mode="clip")
            else:
                np.copyto(result, block, casting="unsafe")
            lost = _canonicalise_nans(block, result.view(target.bits), target)
            overflowed += lost.size
            minima += int(np.isin(lost.astype(np.float64), _LOWEST_FINITE_VALUES).sum()) if lost.size else 0
    return CastReport(overflowed, minima)


def has_cast(have: DType, want: DType) -> bool:
    """Return whether elements of one type can be cast to another."""
    return have == want or (have.name in _NUMPY_FLOAT_TYPES and want.name in _CAST_TARGETS)


def build_overflow_error(tensor: str, count: int, dtype: DType) -> SourceError:
    """Build the error for a tensor of which a cast makes `count` finite values infinite, with the ways out."""
    wider = "use --dtype bf16, " if dtype.name == "F16" else ""
    values = "1 finite value becomes" if count == 1 else f"{count:,} finite values become"
    return SourceError(
        f"{tensor}: {values} infinite in {dtype}",
        hint=f"{wider}keep such tensors as they are with --keep-fp32 REGEX, or accept infinities with --allow-overflow",
    )


@cache
def _build_cast_table(have: str, want: str) -> NDArray[Any]:
    """Build what each of the 256 patterns of an 8-bit type becomes; looking it up is ten times as fast as casting."""
    return np.arange(2**_TABLE_BITS, dtype=np.uint8).view(_NUMPY_FLOAT_TYPES[have]).astype(_NUMPY_FLOAT_TYPES[want])


def _canonicalise_nans(values: NDArray[Any], bits: NDArray[Any], target: _CastTarget) -> NDArray[Any]:
    """Make NaNs among the cast `bits` canonical, and return the finite `values` that became infinite.

    The largest magnitude tells in one pass that there is neither, which is all that most blocks take.
    """
    magnitudes = bits & (target.sign - 1)
    if magnitudes.max() < target.infinity:
        return values[:0]
    nan = magnitudes > target.infinity
    bits[nan] = bits[nan] & target.sign | target.quiet_nan
    lost: NDArray[Any] = values[(magnitudes == target.infinity) & np.isfinite(values)]
    return lost
