"""Decodes MLX's and quanto's integers: a code times the scale of its group, and what is added to the product.

Who computes how: MLX (mlx/backend/cpu/quantized.cpp, `mx.dequantize`) rounds the product and the sum to the type of
the scales on CPUs, and the sum alone on GPUs; transformers' reader of the same arrays (integrations/
metal_quantization.py, `_affine_dequantize_tensor`) computes in F32. Here it is F32, so that one rounding is left: the
one to the wanted type. optimum-quanto (tensor/qbits.py, `QBitsDequantizer`) rounds each step to the type of the scales,
on every device, and so does this.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from shardctl.models.dequantization.flat_codes import decode_flat_runs
from shardctl.models.dequantization.integers import get_scale_type, unpack_codes
from shardctl.models.dequantization.tile import DecodedTile, round_numbers
from shardctl.models.quantization.storage import BY_OUTPUT, FLOAT, IN, WORD
from shardctl.tensors.tiles import split_run

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardctl.models.dequantization.tile import WeightTile
    from shardctl.models.quantization.storage import AffineWords, PackedGroups
    from shardctl.tensors.tiles import Span


def decode_affine_words(decoder: AffineWords, tile: WeightTile) -> DecodedTile:
    """Decode a tile of MLX's integers."""
    codes = unpack_codes(tile.read(decoder.codes), decoder.bits, 1)
    together = WORD // decoder.bits if WORD % decoder.bits == 0 else WORD
    skipped = tile.spans[IN][0] % together
    values = np.ascontiguousarray(codes[:, skipped : skipped + tile.extent(IN)], np.float32)
    tile.read_factors(decoder.scale, BY_OUTPUT, tile.read_numbers(decoder.scale)).scale(values)
    values += tile.read_factors(decoder.bias, BY_OUTPUT, tile.read_numbers(decoder.bias)).spread(values.shape)
    return DecodedTile(values)


def decode_packed_groups(decoder: PackedGroups, tile: WeightTile) -> DecodedTile:
    """Decode a tile of quanto's integers of 2 or 4 bits."""
    values = decode_flat_runs(tile, decoder.inputs, partial(_decode_run, decoder, tile))
    return DecodedTile(values, get_scale_type(tile, decoder.scale))


def _decode_run(decoder: PackedGroups, tile: WeightTile, run: Span) -> NDArray[np.float32]:
    """Decode a run of elements of the flattened weight."""
    width = tile.arrays[decoder.codes.names[0]].tensor.shape[1]
    parts = [_decode_part(decoder, tile, *spans) for spans in split_run(*run, width, run[1] - run[0])]
    return np.concatenate(parts)


def _decode_part(decoder: PackedGroups, tile: WeightTile, rows: Span, columns: Span) -> NDArray[np.float32]:
    """Decode some rows and columns of the matrix whose rows are groups."""
    step = tile.arrays[decoder.codes.names[0]].tensor.shape[0]  # rows of codes, which the later ones share
    codes = np.empty((rows[1] - rows[0], columns[1] - columns[0]), np.float32)
    for part in range(rows[0] // step, -(-rows[1] // step)):
        first, last = max(rows[0], part * step), min(rows[1], (part + 1) * step)
        words = tile.read(decoder.codes, {0: (first - part * step, last - part * step), 1: columns})
        codes[first - rows[0] : last - rows[0]] = words >> part * decoder.bits & ((1 << decoder.bits) - 1)
    span = {0: rows, 1: (0, 1)}
    scales, kind = tile.read_numbers(decoder.scale, span), get_scale_type(tile, decoder.scale)
    shift = tile.read(decoder.shift, span).astype(np.float32)
    if tile.arrays[decoder.shift.names[0]].tensor.dtype.name in FLOAT:
        values = round_numbers(codes * scales, kind) - shift
    else:
        values = (codes - shift) * scales
    return round_numbers(values, kind).reshape(-1)
