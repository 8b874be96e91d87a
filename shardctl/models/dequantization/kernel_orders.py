"""Decodes weights of four bits that are stored in the order of a kernel.

Who packs how: AutoAWQ (awq/modules/linear/gemv.py and marlin.py, `from_linear`) and AutoGPTQ
(auto_gptq/nn_modules/qlinear/qlinear_marlin.py, `QuantLinear.pack`). Neither library decodes them; the numbers are
those that it packed: a code less its zero point, times its scale, in the type of the scales.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from shardctl.base.errors import SourceError
from shardctl.models.dequantization.integers import get_scale_type, unpack_codes
from shardctl.models.dequantization.tile import DecodedTile
from shardctl.models.quantization.storage import IN, OUT, TILE_INPUTS, TILE_OUTPUTS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardctl.models.dequantization.tile import WeightTile
    from shardctl.models.quantization.storage import KernelTiles, PackedRows, QuantizedArray

_BITS_PER_WEIGHT: Final = 4
_DEFAULT_ZERO_POINT: Final = np.float32(8)
"""The zero point of codes that have none of their own."""
_TENSOR_CORE_TILE_SIZE: Final = 16
"""Inputs, and outputs, of one of the matrices that a GPU multiplies."""
_MARLIN_PACKING_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)


def decode_packed_rows(decoder: PackedRows, tile: WeightTile) -> DecodedTile:
    """Work out a tile of AWQ's `gemv` order; raises SourceError if it has too few scales."""
    (first, last), word = tile.spans[IN], 32 // _BITS_PER_WEIGHT
    codes = unpack_codes(tile.read(decoder.codes), _BITS_PER_WEIGHT, 1)
    values = codes[:, first % word : first % word + last - first].astype(np.float32)
    zeros, scales = unpack_codes(tile.read(decoder.zero), _BITS_PER_WEIGHT, 1), tile.read_numbers(decoder.scale)
    groups = np.arange(first, last) // decoder.group if decoder.group > 0 else np.zeros(last - first, np.int64)
    if groups[-1] >= min(zeros.shape[1], scales.shape[1]):
        raise _refuse_groups(tile, decoder.scale, int(groups[-1]))
    values -= zeros[:, groups]
    values *= scales[:, groups]
    return DecodedTile(values, get_scale_type(tile, decoder.scale))


def decode_kernel_tiles(decoder: KernelTiles, tile: WeightTile) -> DecodedTile:
    """Work out a tile of Marlin's order; raises SourceError if it has too few scales."""
    (left, right), (first, last) = tile.spans[OUT], tile.spans[IN]
    stored = unpack_codes(tile.read(decoder.codes), _BITS_PER_WEIGHT, 1)
    rows, blocks = stored.shape[0], stored.shape[1] // (TILE_INPUTS * TILE_OUTPUTS)
    codes = np.empty((rows, blocks, TILE_INPUTS * TILE_OUTPUTS), np.uint8)
    codes[..., _list_code_places()] = stored.reshape(codes.shape)
    squares = codes.reshape(
        rows, blocks, TILE_OUTPUTS // _TENSOR_CORE_TILE_SIZE, _TENSOR_CORE_TILE_SIZE, _TENSOR_CORE_TILE_SIZE
    ).transpose(0, 3, 1, 2, 4)
    whole = squares.reshape(rows * TILE_INPUTS, blocks * TILE_OUTPUTS)
    above, before = first % TILE_INPUTS, left % TILE_OUTPUTS
    values = whole[above : above + last - first, before : before + right - left].astype(np.float32)
    single = decoder.group <= 0 or tile.arrays[decoder.scale.names[0]].tensor.shape[0] == 1
    numbers = tile.read_numbers(decoder.scale)
    places = _list_scale_places(single=single)
    scales = np.empty_like(numbers)
    scales.reshape(len(numbers), -1, len(places))[..., places] = numbers.reshape(len(numbers), -1, len(places))
    skipped = 0 if single else first // decoder.group
    groups = np.zeros(last - first, np.int64) if single else np.arange(first, last) // decoder.group - skipped
    if groups[-1] >= len(scales):
        raise _refuse_groups(tile, decoder.scale, int(groups[-1]) + skipped)
    values -= _DEFAULT_ZERO_POINT
    values *= scales[groups, before : before + right - left]
    return DecodedTile(values, get_scale_type(tile, decoder.scale))


def _refuse_groups(tile: WeightTile, scale: QuantizedArray, group: int) -> SourceError:
    stored = tile.arrays[scale.names[0]].tensor
    return SourceError(f"an input belongs to group {group}, of which {stored.name} {list(stored.shape)} has no scale")


@lru_cache(maxsize=1)
def _list_code_places() -> NDArray[np.int64]:
    """List, for each code as it is stored, its place in a block of `[outputs / 16, 16 inputs, 16 outputs]`.

    A GPU's thread holds pairs of rows of a matrix of 16 x 16, eight columns apart, of four matrices side by side.
    """
    thread, matrix, half, pair = np.meshgrid(np.arange(32), np.arange(4), np.arange(2), np.arange(4), indexing="ij")
    row = 2 * (thread % 4) + pair % 2 + 8 * (pair // 2)
    places = (
        matrix * _TENSOR_CORE_TILE_SIZE * _TENSOR_CORE_TILE_SIZE + row * _TENSOR_CORE_TILE_SIZE + thread // 4 + 8 * half
    )
    ordered: NDArray[np.int64] = places.reshape(-1, len(_MARLIN_PACKING_ORDER))[:, _MARLIN_PACKING_ORDER].reshape(-1)
    return ordered


@lru_cache(maxsize=2)
def _list_scale_places(*, single: bool) -> NDArray[np.int64]:
    """List, for each scale as it is stored, its place among its neighbours; `single` if all inputs share one."""
    if single:
        pairs = np.arange(4)[:, None, None] * 2 + np.arange(4)[None, :, None] * 8 + np.arange(2)[None, None, :]
        return pairs.reshape(-1)
    return (np.arange(8)[:, None] + 8 * np.arange(8)[None, :]).reshape(-1)
