"""Decodes bitsandbytes' weights: four-bit codes in one flat array, and rows of bytes.

Who computes how: bitsandbytes (functional.py, `dequantize_4bit` and `dequantize_blockwise`; _ops.py,
`int8_vectorwise_dequant`) multiplies in F32, and has the result of four-bit codes in the type of the original weight.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final

import numpy as np

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.base.value import value_class
from shardctl.models.dequantization.tile import DecodedTile
from shardctl.models.quantization.storage import IN, OUT
from shardctl.models.tables.config import ModelConfig
from shardctl.storage.bounded_text import TextLimits, check_size, parse_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from shardctl.models.dequantization.tile import WeightTile
    from shardctl.models.quantization.storage import ByteRows, PackedIntegers, QuantizedArray
    from shardctl.tensors.tiles import Span

_SETTINGS_TEXT: Final = TextLimits(size=1 << 16, memory=1 << 20, depth=4)
"""A `quant_state`; those that bitsandbytes writes have less than 300 bytes."""
_MATRIX_NDIM: Final = 2
_ORIGINAL_DTYPES: Final = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_FOUR_BITS: Final = 16
_BYTE_VALUE_COUNT: Final = 256
_WEIGHT_FORMAT_NAMES: Final = ("row", "col32", "col_turing", "col_ampere")
"""What the values of `weight_format` mean (bitsandbytes/utils.py, `LINEAR_8BIT_WEIGHTS_FORMAT_MAPPING`)."""
_RECIPROCAL_OF_127: Final = np.float32(7.874015718698502e-3)
"""Of 127, as bitsandbytes writes it."""


@value_class
class _FlatSettings:
    """What `quant_state` says of one weight."""

    shape: tuple[int, ...]
    original: str
    block: int
    second_block: int
    offset: np.float32
    """What is added to the decoded scale of a block."""


def decode_flat_codes(decoder: PackedIntegers, tile: WeightTile) -> DecodedTile:
    """Work out a tile of codes of four bits; raises SourceError where its arrays do not fit each other."""
    settings = _read_settings(decoder, tile)
    decode_run = partial(_decode_run, decoder, tile, settings)
    return DecodedTile(decode_flat_runs(tile, settings.shape[1], decode_run), settings.original)


def decode_flat_runs(
    tile: WeightTile, width: int, decode_run: Callable[[Span], NDArray[np.float32]]
) -> NDArray[np.float32]:
    """Decode a tile of a weight of which `decode_run` decodes runs of elements, in the order of rows of `width`."""
    (first, last), (left, right) = tile.spans
    if right - left == width or last - first == 1:
        run = decode_run((first * width + left, (last - 1) * width + right))
        return run.reshape(last - first, right - left)
    return np.stack([decode_run((row * width + left, row * width + right)) for row in range(first, last)])


def _decode_run(decoder: PackedIntegers, tile: WeightTile, settings: _FlatSettings, run: Span) -> NDArray[np.float32]:
    """Decode a run of elements of the flattened weight."""
    start, stop = run
    width = 2 * _get_stored_type_bytes(decoder, tile)
    words = tile.read(decoder.codes, {0: (start // width, -(-stop // width))})
    pairs = np.take(_build_pair_table(tile.read_numbers(decoder.table).tobytes()), words.view(np.uint8).reshape(-1), 0)
    values = pairs.reshape(-1)[start % width : start % width + stop - start]
    block = settings.block
    scales = _read_scales(decoder, tile, settings, (start // block, -(-stop // block)))
    if start % block == 0 and len(values) % block == 0:
        return np.multiply(values.reshape(-1, block), scales[:, None]).reshape(-1)
    spread = np.repeat(scales, block)
    return np.multiply(values, spread[start % block : start % block + len(values)])


def _get_stored_type_bytes(decoder: PackedIntegers, tile: WeightTile) -> int:
    return tile.arrays[decoder.codes.names[0]].tensor.dtype.unit_bytes


@lru_cache(maxsize=8)
def _build_pair_table(numbers: bytes) -> NDArray[np.float32]:
    """Build the two numbers that each byte stands for; the first is in its high half."""
    table = np.frombuffer(numbers, np.float32)
    return np.stack((np.repeat(table, _FOUR_BITS), np.tile(table, _FOUR_BITS)), axis=1)


def _read_scales(
    decoder: PackedIntegers, tile: WeightTile, settings: _FlatSettings, blocks: Span
) -> NDArray[np.float32]:
    """Read the scales of a run of blocks, or decode them if they are codes themselves."""
    if not tile.has(decoder.second):
        return tile.read_numbers(decoder.scale, {0: blocks})
    codes = tile.read(decoder.scale, {0: blocks})
    start, stop = blocks
    size = settings.second_block
    around = tile.read_numbers(decoder.second, {0: (start // size, -(-stop // size))})
    spread = np.repeat(around, size)[start % size : start % size + stop - start]
    scales: NDArray[np.float32] = tile.read_numbers(decoder.second_table)[codes] * spread + settings.offset
    return scales


def _read_settings(decoder: PackedIntegers, tile: WeightTile) -> _FlatSettings:
    """Read what `quant_state` says; raises SourceError if it is none, or belongs to another weight."""
    text = tile.arrays[decoder.settings.names[0]].tensor
    name = text.name
    check_size(text.nbytes, name, _SETTINGS_TEXT)
    settings = _parse_settings(tile.read(decoder.settings).tobytes(), name)
    elements = int(np.prod(settings.shape, dtype=object))
    blocks = -(-elements // settings.block)
    wanted: list[tuple[QuantizedArray, int]] = [
        (decoder.codes, -(-elements // (2 * _get_stored_type_bytes(decoder, tile)))),
        (decoder.scale, blocks),
        (decoder.table, _FOUR_BITS),
    ]
    if tile.has(decoder.second):
        wanted += [(decoder.second, -(-blocks // settings.second_block)), (decoder.second_table, _BYTE_VALUE_COUNT)]
    for array, extent in wanted:
        stored = tile.arrays[array.names[0]].tensor
        if stored.shape[0] != extent:
            raise SourceError(f"{stored.name} has {stored.shape[0]:,} elements, but {name} says {extent:,}")
    if tile.spans[OUT][1] > settings.shape[0] or tile.spans[IN][1] > settings.shape[1]:
        raise SourceError(
            f"{name} says that the weight has the shape {list(settings.shape)}, which the model's has not"
        )
    return settings


@lru_cache(maxsize=64)
def _parse_settings(text: bytes, name: str) -> _FlatSettings:
    """Parse the JSON text of `quant_state`; raises SourceError for anything that bitsandbytes does not write."""
    said = parse_json(text, name, _SETTINGS_TEXT)
    values = ModelConfig(said if isinstance(said, dict) else {}, name)
    shape, offset = values.values.get("shape"), values.values.get("nested_offset", 0.0)
    original = _ORIGINAL_DTYPES.get(values.text("dtype", ""))
    if original is None:
        raise SourceError(
            f"{name} has dtype = {values.values.get('dtype')!r:.50}; bitsandbytes has {', '.join(_ORIGINAL_DTYPES)}"
        )
    if (
        not isinstance(shape, list)
        or len(shape) != _MATRIX_NDIM
        or not all(isinstance(n, int) and n > 0 for n in shape)
    ):
        raise SourceError(f"{name} has shape = {shape!r:.50} where that of a matrix is expected")
    if not isinstance(offset, int | float):
        raise SourceError(f"{name} has nested_offset = {offset!r:.50} where a number is expected")
    block = values.size("blocksize")
    second = values.size("nested_blocksize", _BYTE_VALUE_COUNT)
    return _FlatSettings((shape[0], shape[1]), original, block, second, np.float32(offset))


def decode_byte_rows(decoder: ByteRows, tile: WeightTile) -> DecodedTile:
    """Work out a tile of rows of bytes; raises UnsupportedError where they are in the order of a kernel."""
    if tile.has(decoder.arrangement):
        number = int(tile.read(decoder.arrangement).reshape(()))
        if number:
            stored = tile.arrays[decoder.arrangement.names[0]].tensor.name
            known = f" ({_WEIGHT_FORMAT_NAMES[number]})" if number < len(_WEIGHT_FORMAT_NAMES) else ""
            raise UnsupportedError(
                f"{stored} is {number}{known}: the codes are in the order of a kernel that bitsandbytes has given up",
                hint="load the model with the bitsandbytes that wrote it, and save it again",
            )
    values = tile.read(decoder.codes).astype(np.float32)
    values *= tile.read_numbers(decoder.peak)[:, None]
    values *= _RECIPROCAL_OF_127
    return DecodedTile(values)
