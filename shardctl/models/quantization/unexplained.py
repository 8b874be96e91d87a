"""Notices weights that are codes, although no config says how they are quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UnsupportedError, format_first_few
from shardctl.models.names.binding import find_canonical_name
from shardctl.models.quantization.settings import SIDECAR
from shardctl.models.quantization.storage import FP8

if TYPE_CHECKING:
    from shardctl.models.tables.model import Model
    from shardctl.tensors.manifest import Manifest, Tensor

_QUANTIZED_DTYPES: Final = (*FP8, "F4", "F6_E2M3", "F6_E3M2", "I8", "U8", "I32")
"""Types of codes; integers of 64 bits, and booleans, are what they say."""
_MATRIX_NDIM: Final = 2


def check_unexplained_codes(model: Model, stored: Manifest) -> tuple[str, ...]:
    """Warnings about weights in 8 bits that are stored as such, with nothing besides, though no config explains them.

    Raises UnsupportedError where codes are packed or have scales: then the model's own table cannot be right.
    """
    if stored.dialect is not None:  # arrays of another library, which knows its own
        return ()
    codes = [t for t in stored.tensors.values() if t.dtype.name in _QUANTIZED_DTYPES and len(t.shape) >= _MATRIX_NDIM]
    codes = [tensor for tensor in codes if not _is_buffer(model, tensor)]
    if not codes:
        return ()
    plain = all(tensor.dtype.name in FP8 and _has_own_shape(model, tensor) for tensor in codes)
    if plain and all(find_canonical_name(model, name) is not None for name in stored.tensors):
        found = format_first_few([tensor.name for tensor in codes])
        kinds = " and ".join(sorted({tensor.dtype.name for tensor in codes}))
        return (f"config.json does not say how {found} were quantized to {kinds}; they are taken for plain numbers",)
    raise UnsupportedError(
        f"{codes[0].name} is {codes[0].dtype}, but config.json does not say how weights are quantized",
        hint=f"ModelOpt up to 0.33 says so in {SIDECAR}, which must be beside config.json; "
        "for others, give the quantized model's own config with --config PATH",
    )


def _is_buffer(model: Model, tensor: Tensor) -> bool:
    known = model.tensors.get(find_canonical_name(model, tensor.name) or "")
    return known is not None and bool(known.row.buffer)


def _has_own_shape(model: Model, tensor: Tensor) -> bool:
    name = find_canonical_name(model, tensor.name) or ""
    if name in model.fusions:
        return tensor.shape == model.fusions[name].shape
    known = model.tensors.get(model.aliases.get(name, name))
    return known is not None and tensor.shape == known.shape
