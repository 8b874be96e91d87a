"""Decodes weights of 8-bit and 4-bit floats: the number that a code stands for, times the scale of its block.

Who computes how: transformers multiplies fp8 in F32 (integrations/finegrained_fp8.py, `Fp8Dequantize`), as DeepSeek's
own script does; compressed-tensors in the type of the scales (quantization/lifecycle/forward_helpers.py); ModelOpt's
NVFP4 in F32 (torch/quantization/qtensor/nvfp4_tensor.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np

from shardctl.models.dequantization.tile import IN_BETWEEN, BlockFactors, DecodedTile, smooth_inputs
from shardctl.models.quantization.storage import IN

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardctl.models.dequantization.tile import WeightTile
    from shardctl.models.quantization.storage import PackedFloats, QuantizedArray, ScaledFloats

_FP4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What the sixteen codes of E2M1 stand for (OCP Microscaling Formats 1.0)."""


def decode_scaled_floats(decoder: ScaledFloats, tile: WeightTile) -> DecodedTile:
    """Work out a tile of 8-bit floats."""
    codes = tile.read(decoder.codes)
    values = _look_up_numbers(codes)
    if decoder.blocked:
        _read_blocked_scales(decoder.scale, tile, decoder.blocked).scale(values)
        return DecodedTile(values, decoder.rounded)
    stored = tile.read_numbers(decoder.scale)
    tile.read_factors(decoder.scale, decoder.order, stored).scale(values)
    kind = tile.arrays[decoder.scale.names[0]].tensor.dtype.name
    return DecodedTile(values, kind if decoder.by_scale and kind in IN_BETWEEN else decoder.rounded)


def _look_up_numbers(codes: NDArray[np.generic]) -> NDArray[np.float32]:
    """Look up what 8-bit floats stand for, two at once, in half the time; NumPy's own cast takes five times as long."""
    table = _build_number_table(codes.dtype)
    if codes.shape[-1] % 2:
        return np.take(table.view(np.float32)[:512:2], codes.view(np.uint8), mode="clip")
    return np.take(table, codes.view(np.uint16), mode="clip").view(np.float32)


@cache
def _build_number_table(kind: np.dtype[np.generic]) -> NDArray[np.uint64]:
    """By the bits of two neighbouring codes of an 8-bit type, the first in the lower byte: the two numbers, as F32."""
    numbers = np.arange(256, dtype=np.uint8).view(kind).astype(np.float32)
    return np.stack((np.tile(numbers, 256), np.repeat(numbers, 256)), axis=1).view(np.uint64)[:, 0]


def decode_packed_floats(decoder: PackedFloats, tile: WeightTile) -> DecodedTile:
    """Work out a tile of 4-bit floats."""
    codes = tile.read(decoder.codes).view(np.uint8)
    table = _build_pair_table()[:, ::-1] if decoder.high_first else _build_pair_table()
    pairs = np.take(table, codes.reshape(codes.shape[0], -1), axis=0, mode="clip")
    skipped = tile.spans[IN][0] % tile.block(decoder.codes, IN)
    values = pairs.reshape(codes.shape[0], -1)[:, skipped : skipped + tile.extent(IN)]
    factors = _read_blocked_scales(decoder.scale, tile, decoder.blocked) if decoder.blocked else None
    scales = factors.values if factors is not None else tile.read_numbers(decoder.scale)
    if decoder.whole is not None and tile.has(decoder.whole):
        whole = tile.read_numbers(decoder.whole).reshape(()) / np.float32(decoder.largest)
        scales = scales / whole if decoder.divided else scales * whole
    values = np.ascontiguousarray(values)
    if factors is None:
        factors = tile.read_factors(decoder.scale, decoder.order, scales)
    replace(factors, values=scales.reshape(factors.values.shape)).scale(values)
    return smooth_inputs(decoder.smoothing, tile, DecodedTile(values, decoder.rounded))


def _read_blocked_scales(scale: QuantizedArray, tile: WeightTile, group: int) -> BlockFactors:
    """Read scales of `group` inputs each that are in the order of cuBLAS: blocks of 128 outputs by 4 scales.

    In a block, outputs 32 apart stand side by side (cuBLAS, "1D Block Scaling Factors Layout"); the blocks of 128
    outputs fill 32 rows of the array, one block behind another.
    """
    (top, bottom), (left, right) = tile.spans
    numbers = tile.read_numbers(scale, {1: (0, tile.arrays[scale.names[0]].tensor.shape[1])})
    tall, wide = numbers.shape[0] // 32, numbers.shape[1] // 16
    blocks = numbers.reshape(tall, wide, 32, 4, 4).transpose(0, 3, 2, 1, 4)
    plain = blocks.reshape(tall * 128, wide * 4)
    rows = plain[top % 128 : top % 128 + bottom - top, left // group : -(-right // group)]
    return BlockFactors(np.ascontiguousarray(rows), (1, group), (0, left % group))


@cache
def _build_pair_table() -> NDArray[np.float32]:
    """Build the two numbers in each of the 256 bytes."""
    numbers = np.array(_FP4, np.float32)
    return np.stack((np.tile(numbers, 16), np.repeat(numbers, 16)), axis=1)
