"""Names the changes between stored values and the model's values, such as norms stored as weight minus one.

Megatron's `layernorm_zero_centered_gamma` and NVIDIA's LayerNorm1p store ``gamma - 1``, so that weight decay pulls a
norm towards the identity; transformers stores gamma for the same models. Nothing else is ever changed, and this is
done where a chunk says so by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np

from shardctl.base.errors import UnsupportedError
from shardctl.tensors.manifest import GAMMA_LESS_ONE

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from shardctl.base.dtype import DType

_ADDED: Final = {GAMMA_LESS_ONE: np.float32(1)}
"""By name, what is added to what is stored."""
_FLOATS: Final[dict[str, DTypeLike]] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def decode_affine(stored: NDArray[Any], dtype: DType, affine: str) -> NDArray[Any]:
    """Return the elements that are meant by stored ones, both as bits of `dtype`.

    A sum is rounded to nearest, ties to even.

    Raises UnsupportedError for a change that is not known, or of a type that is not changed.
    """
    return _shift_elements(stored, dtype, affine, 1)


def encode_affine(meaning: NDArray[Any], dtype: DType, affine: str, name: str) -> NDArray[Any]:
    """Encode the elements to store for those that are meant, both as bits of `dtype`.

    Raises UnsupportedError as `decode_affine`, and, naming the array, if the difference cannot be told exactly:
    whoever reads it would get other elements than were meant.
    """
    found = _shift_elements(meaning, dtype, affine, -1)
    back = _shift_elements(found, dtype, affine, 1)
    if not np.array_equal(back, meaning):
        wrong = int(np.count_nonzero(back != meaning))
        raise UnsupportedError(
            f"{name}: {wrong:,} of its elements cannot be stored as {affine} in {dtype} without rounding",
            hint="cast to fp32 with --dtype fp32",
        )
    return found


def _shift_elements(bits: NDArray[Any], dtype: DType, affine: str, sign: int) -> NDArray[Any]:
    if affine not in _ADDED or dtype.name not in _FLOATS:
        raise UnsupportedError(f"elements of {dtype} cannot be changed by {affine!r}")
    kind = np.dtype(_FLOATS[dtype.name])
    values = np.ascontiguousarray(bits).view(kind).astype(np.float32) + sign * _ADDED[affine]
    return values.astype(kind).view(bits.dtype).reshape(bits.shape)
