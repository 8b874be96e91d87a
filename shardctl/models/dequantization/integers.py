"""Decodes weights of integers: a code less its zero point, times the scale of its group.

Who computes how: compressed-tensors (quantization/lifecycle/forward_helpers.py), GPTQ's and AWQ's layers
(auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py, awq/utils/packing_utils.py) all in the type of the scales.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardctl.base.errors import SourceError
from shardctl.models.dequantization.tile import IN_BETWEEN, BlockFactors, DecodedTile, round_numbers, smooth_inputs
from shardctl.models.quantization.storage import BY_OUTPUT, FLOAT, IN, OUT, WORD

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from shardctl.models.dequantization.tile import WeightTile
    from shardctl.models.quantization.storage import PackedByInput, QuantizedArray, ScaledIntegers
    from shardctl.tensors.tiles import Span

_AWQ_PACKING_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in an integer of AWQ's the codes of eight neighbouring outputs are."""


def unpack_codes(words: NDArray[Any], bits: int, axis: int, places: tuple[int, ...] | None = None) -> NDArray[np.uint8]:
    """Return the codes in integers of 32 bits along `axis`, the first in the lowest bits.

    They may run on into the next one.

    >>> unpack_codes(np.array([[0x76543210]], np.int32), 4, 1)
    array([[0, 1, 2, 3, 4, 5, 6, 7]], dtype=uint8)
    >>> unpack_codes(np.array([[0o7654321076, 0, 0]], np.int32), 3, 1)[0, :4]
    array([6, 7, 0, 1], dtype=uint8)
    """
    whole = np.moveaxis(words.view(np.uint32), axis, -1)
    mask = np.uint32((1 << bits) - 1)
    period = WORD // bits if WORD % bits == 0 else WORD
    step = period * bits // WORD
    missing = -whole.shape[-1] % step
    if missing:
        whole = np.pad(whole, [(0, 0)] * (whole.ndim - 1) + [(0, missing)])
    codes = np.empty((*whole.shape[:-1], whole.shape[-1] // step * period), np.uint8)
    for n in range(period):
        place = (places[n] if places is not None else n) * bits
        word, low = divmod(place, WORD)
        code = whole[..., word::step] >> np.uint32(low)
        if low + bits > WORD:
            code = code | (whole[..., word + 1 :: step] << np.uint32(WORD - low))
        codes[..., n::period] = code & mask
    return np.moveaxis(codes, -1, axis)


def get_scale_type(tile: WeightTile, scale: QuantizedArray) -> str:
    """Return the type of the scales, in which owners have their result."""
    kind = tile.arrays[scale.names[0]].tensor.dtype.name
    return kind if kind in IN_BETWEEN else "F32"


def decode_scaled_integers(decoder: ScaledIntegers, tile: WeightTile) -> DecodedTile:
    """Work out a tile of compressed-tensors' integers."""
    codes = tile.read(decoder.codes)
    if decoder.bits:
        codes = _crop(unpack_codes(codes, decoder.bits, 1), 1, tile.spans[IN], decoder.bits)
    elif decoder.halved:
        codes = _split_halves(codes, decoder, tile)
    values = codes.astype(np.float32)
    if decoder.bits:
        values -= 1 << (decoder.bits - 1)
    columns: NDArray[Any] | None = None
    also: dict[int, Span] = {}
    if decoder.groups is not None and tile.has(decoder.groups):
        columns = tile.read(decoder.groups)
        also = {1: (int(columns.min()), int(columns.max()) + 1)}
        _check_groups(also[1], tile, decoder.scale, 1)
        columns = columns - also[1][0]
    rounded = decoder.rounded or get_scale_type(tile, decoder.scale)
    zeros = decoder.zero if decoder.zero is not None and tile.has(decoder.zero) else None
    if zeros is not None and not decoder.added:
        _combine(np.subtract, values, _read_zeros(decoder, tile, also), columns)
        if decoder.rounded and tile.arrays[zeros.names[0]].tensor.dtype.name in FLOAT:
            values = round_numbers(values, decoder.rounded)
    scales = tile.read_factors(decoder.scale, BY_OUTPUT, tile.read_numbers(decoder.scale, also))
    if columns is None:
        scales.scale(values)
    else:
        _combine(np.multiply, values, scales, columns)
    if zeros is not None and decoder.added:
        _combine(np.add, values, _read_zeros(decoder, tile, also), columns)
    return smooth_inputs(decoder.smoothing, tile, DecodedTile(values, rounded))


def _split_halves(codes: NDArray[Any], decoder: ScaledIntegers, tile: WeightTile) -> NDArray[np.int8]:
    """Return the two codes of each byte, along the dim of the weight in which they are neighbours."""
    dim = OUT if tile.block(decoder.codes, OUT) > 1 else IN
    both = np.stack((codes.view(np.int8) << 4 >> 4, codes.view(np.int8) >> 4), axis=dim + 1)
    shape = [extent * (2 if axis == dim else 1) for axis, extent in enumerate(codes.shape)]
    skipped = tile.spans[dim][0] % 2
    chosen = slice(skipped, skipped + tile.extent(dim))
    whole = both.reshape(shape)
    return whole[chosen] if dim == OUT else whole[:, chosen]


def _read_zeros(decoder: ScaledIntegers, tile: WeightTile, also: Mapping[int, Span]) -> BlockFactors:
    assert decoder.zero is not None  # noqa: S101 - asked before
    stored = tile.read(decoder.zero, also)
    if not decoder.bits or tile.block(decoder.zero, OUT) == 1:
        return tile.read_factors(decoder.zero, BY_OUTPUT, stored.astype(np.float32))
    zeros = _crop(unpack_codes(stored, decoder.bits, 0), 0, tile.spans[OUT], decoder.bits)
    return tile.read_factors(decoder.scale, BY_OUTPUT, zeros.astype(np.float32) - (1 << (decoder.bits - 1)))


def decode_packed_integers(decoder: PackedByInput, tile: WeightTile) -> DecodedTile:
    """Work out a tile of GPTQ's or AWQ's integers."""
    places, bits = _AWQ_PACKING_ORDER if decoder.interleaved else None, decoder.bits
    axis, dim = (1, OUT) if decoder.interleaved else (0, IN)
    codes = _crop(unpack_codes(tile.read(decoder.codes), bits, axis, places), axis, tile.spans[dim], bits)
    rows = _find_groups(decoder, tile)
    also = {0: (int(rows.min()), int(rows.max()) + 1)}
    _check_groups(also[0], tile, decoder.scale, 0)
    rows = rows - also[0][0]
    zeros = _crop(unpack_codes(tile.read(decoder.zero, also), bits, 1, places), 1, tile.spans[OUT], bits)
    if decoder.less_one:
        zeros = (zeros + np.uint8(1)) & np.uint8((1 << bits) - 1)
    scales = tile.read_numbers(decoder.scale, also)
    values = codes.astype(np.float32)
    starts = np.flatnonzero(np.r_[True, np.diff(rows) != 0])
    for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
        values[start:stop] -= zeros[rows[start]]
        values[start:stop] *= scales[rows[start]]
    return DecodedTile(values, get_scale_type(tile, decoder.scale))


def _find_groups(decoder: PackedByInput, tile: WeightTile) -> NDArray[np.int64]:
    """Find the group of each input of the tile."""
    if decoder.groups is not None and tile.has(decoder.groups):
        return tile.read(decoder.groups).astype(np.int64)
    inputs = np.arange(*tile.spans[IN])
    return inputs // decoder.group if decoder.group > 0 else np.zeros_like(inputs)


def _crop(codes: NDArray[np.uint8], axis: int, span: Span, bits: int) -> NDArray[np.uint8]:
    """Return the codes of a span among those of the whole integers that hold them."""
    skipped = span[0] % (WORD // bits if WORD % bits == 0 else WORD)
    chosen = slice(skipped, skipped + span[1] - span[0])
    return codes[chosen] if axis == 0 else codes[:, chosen]


def _combine(change: np.ufunc, values: NDArray[np.float32], by: BlockFactors, columns: NDArray[Any] | None) -> None:
    """Subtract or multiply, in place, the number of each element's block, or of the group of its input."""
    if columns is None:
        change(values, by.spread(values.shape), out=values)
        return
    rows = replace(by, blocks=(by.blocks[0], 0)).spread(values.shape)
    change(values, rows[:, columns], out=values)


def _check_groups(span: Span, tile: WeightTile, scale: QuantizedArray, axis: int) -> None:
    stored = tile.arrays[scale.names[0]].tensor
    if span[0] < 0 or span[1] > stored.shape[axis]:
        raise SourceError(
            f"an input belongs to group {span[1] - 1 if span[0] >= 0 else span[0]}, but {stored.name} has the scales "
            f"of {stored.shape[axis]} groups"
        )
