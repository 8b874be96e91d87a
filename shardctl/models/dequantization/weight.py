"""Presents a quantized weight as if it were stored as floating-point numbers, row after row.

A run of bytes of that imagined array is worked out when it is read: its rows are decoded in tiles that fit the cores'
caches, from those parts of the weight's arrays that they need, and cast to the wanted type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardctl.base.dtype import BY_NAME
from shardctl.base.value import value_class
from shardctl.models.dequantization.affine_codes import decode_affine_words, decode_packed_groups
from shardctl.models.dequantization.flat_codes import decode_byte_rows, decode_flat_codes
from shardctl.models.dequantization.floats import decode_packed_floats, decode_scaled_floats
from shardctl.models.dequantization.integers import decode_packed_integers, decode_scaled_integers
from shardctl.models.dequantization.kernel_orders import decode_kernel_tiles, decode_packed_rows
from shardctl.models.dequantization.stacked_codes import decode_stacked_codes
from shardctl.models.dequantization.tile import WeightTile
from shardctl.models.quantization.storage import (
    OUT,
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
    from shardctl.models.dequantization.tile import DecodedTile, LocatedArray
    from shardctl.models.quantization.storage import WeightDecoder
    from shardctl.tensors.bands import BandBuffer, ByteReader
    from shardctl.tensors.tiles import Span

TILE: Final = 1 << 18
"""Elements of a tile, more or less: its F32 values take 1 MiB."""
DECODING_BYTES: Final = 9 << 20
"""Memory that one thread needs to decode tiles (measured: 3 to 6 MiB) and to gather what they are decoded from."""


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
        values, rounded = _DECODERS[type(self.decoder)](self.decoder, WeightTile(self.arrays, ordered, reader, buffer))
        bits = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        if rounded not in ("F32", self.dtype.name):
            middle = BY_NAME[rounded]
            between = np.empty(values.size * middle.unit_bytes, np.uint8)
            first = cast_elements(bits, BY_NAME["F32"], middle, between).overflowed
            return first + cast_elements(between, middle, self.dtype, out).overflowed
        return cast_elements(bits, BY_NAME["F32"], self.dtype, out).overflowed


_DECODERS: Final[Mapping[type[WeightDecoder], Callable[[Any, WeightTile], DecodedTile]]] = {
    ScaledFloats: decode_scaled_floats,
    PackedFloats: decode_packed_floats,
    ScaledIntegers: decode_scaled_integers,
    PackedByInput: decode_packed_integers,
    PackedRows: decode_packed_rows,
    KernelTiles: decode_kernel_tiles,
    PackedIntegers: decode_flat_codes,
    ByteRows: decode_byte_rows,
    StackedIntegers: decode_stacked_codes,
    AffineWords: decode_affine_words,
    PackedGroups: decode_packed_groups,
}
"""What works out a tile; each raises SourceError for numbers that no writer has."""
