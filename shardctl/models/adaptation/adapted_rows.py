"""Presents a table of tokens of which an adapter replaces some rows as if it were stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from shardctl.base.dtype import BY_NAME
from shardctl.base.value import value_class
from shardctl.models.adaptation.numbers import COMPUTABLE, build_overflow_error, read_elements, read_numbers
from shardctl.tensors.cast import cast_elements
from shardctl.tensors.tiles import split_run

if TYPE_CHECKING:
    from shardctl.tensors.bands import BandBuffer, ByteReader, ChunkIndex

_TILE_ELEMENTS: Final = 1 << 18
"""Elements that are read at a time."""
_F32_DTYPE: Final = BY_NAME["F32"]


@value_class
class AdaptedRows:
    """A matrix with rows of another in the place of some of its own, rounded to its type."""

    name: str
    shape: tuple[int, ...]
    stored: ChunkIndex
    """The matrix itself."""
    rows: ChunkIndex
    numbers: tuple[int, ...]
    """Which rows these are."""

    def read_values(self, reader: ByteReader, buffer: BandBuffer, offset: int, into: memoryview) -> int:
        """Fill `into` with the bytes from `offset`; returns how many finite values became infinite, which is none.

        Raises SourceError for rows that are not finite.
        """
        dtype = self.stored.chunks[0].dtype
        item, width = dtype.unit_bytes, self.shape[1]
        out = np.frombuffer(into, np.uint8)
        written = 0
        for (start, stop), columns in split_run(offset // item, (offset + len(out)) // item, width, _TILE_ELEMENTS):
            values = read_elements(reader, buffer, self.stored, ((start, stop), columns))
            for place, number in enumerate(self.numbers):
                if start <= number < stop:
                    row = read_numbers(reader, buffer, self.rows, ((place, place + 1), columns))[0]
                    cast = np.empty(row.size * item, np.uint8)
                    overflowed = cast_elements(row.view(np.uint8), _F32_DTYPE, dtype, cast).overflowed
                    wrong = overflowed + int(np.count_nonzero(~np.isfinite(row)))
                    if wrong:
                        raise build_overflow_error(self.name, wrong, dtype)
                    values[number - start] = cast.view(COMPUTABLE[dtype.name])
            size = values.size * item
            out[written : written + size] = values.reshape(-1).view(np.uint8)
            written += size
        return 0
