"""Presents a quantized weight as if it were stored as floating-point numbers, row after row.

A run of bytes of that imagined array is worked out when it is read: its rows are decoded in tiles that fit the cores'
caches, from those parts of the weight's arrays that they need, and cast to the wanted type.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardctl.base.dtype import BY_NAME
from shardctl.base.value import value_class
from shardctl.models.dequantization.flat_codes import decode_byte_rows, decode_flat_codes, decode_flat_runs
from shardctl.models.dequantization.integers import (
    decode_packed_integers,
    decode_scaled_integers,
    get_scale_type,
    unpack_codes,
)
from shardctl.models.dequantization.kernel_orders import decode_kernel_tiles, decode_packed_rows
from shardctl.models.dequantization.stacked_codes import decode_stacked_codes
from shardctl.models.dequantization.tile import (
    IN_BETWEEN,
    BlockFactors,
    DecodedTile,
    WeightTile,
    round_numbers,
    smooth_inputs,
)
from shardctl.models.quantization.storage import (
    BY_OUTPUT,
    FLOAT,
    IN,
    OUT,
    WORD,
    AffineWords,
    ByteRows,
    KernelTiles,
    PackedByInput,
    PackedFloats,
    PackedGroups,
    PackedIntegers,
    PackedRows,
    ScaledFloats,
    ScaledIntegers,
    StackedIntegers,
)
from shardctl.tensors.cast import cast_elements
from shardctl.tensors.tiles import split_run

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from shardctl.base.dtype import DType
    from shardctl.models.dequantization.tile import LocatedArray
    from shardctl.models.quantization.storage import QuantizedArray, WeightDecoder
    from shardctl.tensors.bands import BandBuffer, ByteReader
    from shardctl.tensors.tiles import Span

TILE: Final = 1 << 18
"""Elements of a tile, more or less: its F32 values take 1 MiB."""
DECODING_BYTES: Final = 9 << 20
"""Memory that one thread needs to decode tiles (measured: 3 to 6 MiB) and to gather what they are decoded from."""

_FP4_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What the sixteen codes of E2M1 stand for (OCP Microscaling Formats 1.0)."""


def _decode_scaled_floats(decoder: ScaledFloats, tile: WeightTile) -> DecodedTile:
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


def _decode_packed_floats(decoder: PackedFloats, tile: WeightTile) -> DecodedTile:
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
    numbers = np.array(_FP4_VALUES, np.float32)
    return np.stack((np.tile(numbers, 16), np.repeat(numbers, 16)), axis=1)


def _decode_affine_words(decoder: AffineWords, tile: WeightTile) -> DecodedTile:
    """Decode a tile of MLX's integers."""
    codes = unpack_codes(tile.read(decoder.codes), decoder.bits, 1)
    together = WORD // decoder.bits if WORD % decoder.bits == 0 else WORD
    skipped = tile.spans[IN][0] % together
    values = np.ascontiguousarray(codes[:, skipped : skipped + tile.extent(IN)], np.float32)
    tile.read_factors(decoder.scale, BY_OUTPUT, tile.read_numbers(decoder.scale)).scale(values)
    values += tile.read_factors(decoder.bias, BY_OUTPUT, tile.read_numbers(decoder.bias)).spread(values.shape)
    return DecodedTile(values)


def _decode_packed_groups(decoder: PackedGroups, tile: WeightTile) -> DecodedTile:
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


@value_class
class QuantizedWeight:
    """A matrix whose values follow from the arrays that are stored of it."""

    name: str
    shape: tuple[int, int]
    """Outputs and inputs."""
    arrays: Mapping[str, LocatedArray]
    """By the usual name of each."""
    decoder: WeightDecoder
    dtype: DType
    """The type that its values are wanted in."""

    @property
    def rows(self) -> tuple[int, int]:
        """Rows and columns of the imagined array: outputs and inputs, or the other way round."""
        first, second = self.decoder.order
        return self.shape[first], self.shape[second]

    @property
    def strides(self) -> tuple[int, int]:
        """Bytes from one output to the next, and from one input to the next."""
        item, width = self.dtype.unit_bytes, self.rows[1]
        return (width * item, item) if self.decoder.order[0] == OUT else (item, width * item)

    @property
    def nbytes(self) -> int:
        """Bytes of the imagined array."""
        return self.dtype.nbytes(self.shape)

    def read_values(self, reader: ByteReader, buffer: BandBuffer, offset: int, into: memoryview) -> int:
        """Fill `into` with the bytes from `offset`; returns how many finite values became infinite."""
        item, width = self.dtype.unit_bytes, self.rows[1]
        out = np.frombuffer(into, np.uint8)
        overflowed = written = 0
        for rows, columns in split_run(offset // item, (offset + len(out)) // item, width, TILE):
            count = (rows[1] - rows[0]) * (columns[1] - columns[0]) * item
            overflowed += self._decode(reader, buffer, (rows, columns), out[written : written + count])
            written += count
        return overflowed

    def _decode(self, reader: ByteReader, buffer: BandBuffer, spans: tuple[Span, Span], out: NDArray[np.uint8]) -> int:
        ordered = spans if self.decoder.order[0] == OUT else spans[::-1]
        values, rounded = _DECODERS_BY_TYPE[type(self.decoder)](
            self.decoder, WeightTile(self.arrays, ordered, reader, buffer)
        )
        bits = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        if rounded not in ("F32", self.dtype.name):
            middle = BY_NAME[rounded]
            between = np.empty(values.size * middle.unit_bytes, np.uint8)
            first = cast_elements(bits, BY_NAME["F32"], middle, between).overflowed
            return first + cast_elements(between, middle, self.dtype, out).overflowed
        return cast_elements(bits, BY_NAME["F32"], self.dtype, out).overflowed


_DECODERS_BY_TYPE: Final[Mapping[type[WeightDecoder], Callable[[Any, WeightTile], DecodedTile]]] = {
    ScaledFloats: _decode_scaled_floats,
    PackedFloats: _decode_packed_floats,
    ScaledIntegers: decode_scaled_integers,
    PackedByInput: decode_packed_integers,
    PackedRows: decode_packed_rows,
    KernelTiles: decode_kernel_tiles,
    PackedIntegers: decode_flat_codes,
    ByteRows: decode_byte_rows,
    StackedIntegers: decode_stacked_codes,
    AffineWords: _decode_affine_words,
    PackedGroups: _decode_packed_groups,
}
"""What works out a tile; each raises SourceError for numbers that no writer has."""
