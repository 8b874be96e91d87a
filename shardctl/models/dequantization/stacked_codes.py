"""Decodes HQQ's weights: a code less its zero point, times the scale of its group.

Who computes how: hqq (core/quantize.py, `Quantizer.dequantize`), each step in the type of the scales.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.base.value import value_class
from shardctl.models.dequantization.flat_codes import decode_flat_runs
from shardctl.models.dequantization.tile import DecodedTile, round_numbers
from shardctl.models.quantization.storage import IN, OUT
from shardctl.tensors.tiles import split_run

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardctl.models.dequantization.tile import WeightTile
    from shardctl.models.quantization.storage import StackedIntegers
    from shardctl.tensors.tiles import Span

_HQQ_PACKING_FORMATS: Final = {
    "8bit_u8": (8, 1),
    "4bit_u8": (4, 2),
    "3bit_32": (3, 10),
    "2bit_u8": (2, 4),
    "1bit_u8": (1, 8),
}
"""By name: bits of a code, and how many codes share a byte or an integer, the first in the highest bits."""
_COMPUTE_DTYPES: Final = {"torch.float16": "F16", "torch.bfloat16": "BF16", "torch.float32": "F32"}
_MAX_TEXT_CHARACTERS: Final = 64
"""Characters of a text; the longest that HQQ writes has 14."""


@value_class
class _GroupMatrix:
    """How the groups of a weight lie in a matrix of codes."""

    rows: int
    width: int
    bits: int
    together: int
    step: int
    """Rows of codes of which each shares its bytes with the one that comes so many rows later."""
    by_row: bool
    """Whether a row is a group, and not a column."""
    computed: str


def decode_stacked_codes(decoder: StackedIntegers, tile: WeightTile) -> DecodedTile:
    """Work out a tile of HQQ's codes; raises SourceError where arrays do not fit each other."""
    matrix = _read_settings(decoder, tile)
    width = int(tile.read(_find_setting(decoder, "shape"))[IN])
    values = decode_flat_runs(tile, width, partial(_decode_run, decoder, tile, matrix))
    return DecodedTile(values, matrix.computed)


def _decode_run(decoder: StackedIntegers, tile: WeightTile, matrix: _GroupMatrix, run: Span) -> NDArray[np.float32]:
    parts = [
        _decode_part(decoder, tile, matrix, rows, columns)
        for rows, columns in split_run(*run, matrix.width, run[1] - run[0])
    ]
    return np.concatenate(parts)


def _decode_part(
    decoder: StackedIntegers, tile: WeightTile, matrix: _GroupMatrix, rows: Span, columns: Span
) -> NDArray[np.float32]:
    """Decode some rows and columns of the matrix of groups."""
    codes = np.empty((rows[1] - rows[0], columns[1] - columns[0]), np.float32)
    for part in range(rows[0] // matrix.step, -(-rows[1] // matrix.step)):
        first, last = max(rows[0], part * matrix.step), min(rows[1], (part + 1) * matrix.step)
        words = tile.read(decoder.codes, {0: (first % matrix.step, (last - 1) % matrix.step + 1), 1: columns})
        low = (matrix.together - 1 - part) * matrix.bits
        codes[first - rows[0] : last - rows[0]] = words >> low & ((1 << matrix.bits) - 1)
    spans = {0: rows, 1: (0, 1)} if matrix.by_row else {0: (0, 1), 1: columns}
    values = round_numbers(codes - tile.read_numbers(decoder.zero, spans), matrix.computed)
    values *= tile.read_numbers(decoder.scale, spans)
    return values.reshape(-1)


def _find_setting(decoder: StackedIntegers, name: str) -> Any:  # noqa: ANN401 - an array of the storage
    return next(array for array in decoder.settings if array.name == name)


def _read_number(decoder: StackedIntegers, tile: WeightTile, name: str) -> int:
    return int(tile.read(_find_setting(decoder, name)).reshape(-1)[0])


def _read_text(decoder: StackedIntegers, tile: WeightTile, name: str) -> str:
    stored = tile.arrays[name].tensor
    if stored.shape[0] > _MAX_TEXT_CHARACTERS:
        raise SourceError(f"{stored.name} has {stored.shape[0]:,} bytes where a short text is expected")
    return bytes(tile.read(_find_setting(decoder, name))).decode("latin-1")


def _read_settings(decoder: StackedIntegers, tile: WeightTile) -> _GroupMatrix:
    """Read what lies beside the codes; raises UnsupportedError for what HQQ's files cannot hold, or no longer do."""
    where = tile.arrays["W_q"].tensor.name.removesuffix(".W_q")
    packing, computed = _read_text(decoder, tile, "packing"), _read_text(decoder, tile, "compute_dtype")
    odd = [name for name in ("view_as_float", "quant_scale", "quant_zero") if _read_number(decoder, tile, name)]
    if odd or packing not in _HQQ_PACKING_FORMATS or computed not in _COMPUTE_DTYPES:
        said = f"{odd[0]} = true" if odd else f"the packing {packing!r} and the type {computed!r}"
        raise UnsupportedError(f"shardctl does not know how to decode HQQ's {where} with {said}")
    bits, together = _HQQ_PACKING_FORMATS[packing]
    outputs, inputs = (int(size) for size in tile.read(_find_setting(decoder, "shape")))
    group, by_row = _read_number(decoder, tile, "group_size"), _read_number(decoder, tile, "axis") == 1
    count = outputs * inputs // group if group > 0 else 0
    rows, width = (count, group) if by_row else (group, count)
    step = -(-rows // together)
    factors = (rows, 1) if by_row else (1, width)
    found = [tile.arrays[name].tensor.shape for name in ("W_q", "scale", "zero")]
    if group < 1 or count * group != outputs * inputs or found != [(step, width), factors, factors]:
        raise SourceError(
            f"{where} says groups of {group} of {outputs} x {inputs} elements, and its arrays have the shapes "
            f"{', '.join(str(list(shape)) for shape in found)}"
        )
    if tile.spans[OUT][1] > outputs or tile.spans[IN][1] > inputs:
        raise SourceError(f"{where} says that the weight has the shape [{outputs}, {inputs}], which is not the model's")
    return _GroupMatrix(rows, width, bits, together, step, by_row, _COMPUTE_DTYPES[computed])
