"""Compares samples of an optimizer's copies of weights with the weights, which they must be but for rounding."""

from __future__ import annotations

import struct
from math import isnan
from typing import TYPE_CHECKING, Final

from shardctl.libraries.megatron.dist_parameters import UnknownOrderError
from shardctl.storage import read_bytes
from shardctl.tensors.manifest import Chunk, Region

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.storage import Source
    from shardctl.tensors.box import Box
    from shardctl.tensors.manifest import Tensor

_MAX_SAMPLED_VALUES: Final = 16
"""Values of each."""
_RELATIVE_TOLERANCE: Final = 2.0**-7
"""What a value in bfloat16 may differ by from the one that it was rounded from, twice over."""
_ABSOLUTE_TOLERANCE: Final = 1e-6
_STRUCT_FORMATS_BY_DTYPE: Final = {"F32": "f", "F16": "e", "BF16": "H"}


def compare_samples(
    source: Source, masters: Mapping[str, Tensor], weights: Mapping[str, Tensor], boxes: int = 512
) -> int:
    """Compare the first values of boxes of `masters` with those of `weights` of the same names; returns how many.

    About so many `boxes` are looked at, spread over all.

    Raises UnknownOrderError for values that are not the same.
    """
    pairs = [
        (master, weight) for name, tensor in masters.items() for master, weight in _pair_chunks(tensor, weights[name])
    ]
    step, compared = max(len(pairs) // boxes, 1), 0
    for master, weight in pairs[::step]:
        count = min(_MAX_SAMPLED_VALUES, master.box.shape[-1])
        ours, theirs = (_read_values(source, chunk, master.box, count) for chunk in (master, weight))
        if ours is None or theirs is None:
            continue
        for one, other in zip(ours, theirs, strict=True):
            if abs(one - other) > _RELATIVE_TOLERANCE * abs(other) + _ABSOLUTE_TOLERANCE or isnan(one) != isnan(other):
                raise UnknownOrderError(
                    f"what would be the optimizer's copy of {weight.name} has {one:g} at {master.box}, where the "
                    f"weight is {other:g}"
                )
        compared += count
    return compared


def _pair_chunks(master: Tensor, weight: Tensor) -> list[tuple[Chunk, Chunk]]:
    """Pair each box of one with the box of the other that it begins in."""
    found = []
    for chunk in master.chunks:
        if chunk.box.size:
            whole = next((each for each in weight.chunks if _holds_origin(each.box, chunk.box)), None)
            if whole is not None:
                found.append((chunk, whole))
    return found


def _holds_origin(box: Box, other: Box) -> bool:
    return all(a <= b < s for a, b, s in zip(box.origin, other.origin, box.stop, strict=True))


def _read_values(source: Source, chunk: Chunk, box: Box, count: int) -> list[float] | None:
    """Read the first values of the last dim of a box inside a chunk; None for types that have no plain values."""
    form = _STRUCT_FORMATS_BY_DTYPE.get(chunk.dtype.name)
    if form is None or not isinstance(chunk.where, Region) or not chunk.where.strides:
        return None
    step = chunk.where.strides[-1]
    starts = zip(box.origin, chunk.box.origin, chunk.where.strides, strict=True)
    at = chunk.where.offset + sum((a - b) * stride for a, b, stride in starts)
    size = chunk.dtype.unit_bytes
    data = read_bytes(source, chunk.where.file, at, (count - 1) * step + size)
    values = [struct.unpack_from(f"<{form}", data, number * step)[0] for number in range(count)]
    if chunk.dtype.name == "BF16":
        return [struct.unpack("<f", struct.pack("<I", value << 16))[0] for value in values]
    return list(values)
