"""Presents a tensor that an adapter replaces, or a bias that it adds to, as if it were stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from shardctl.base.dtype import BY_NAME
from shardctl.base.value import value_class
from shardctl.models.adaptation.numbers import build_overflow_error, read_numbers
from shardctl.tensors.cast import cast_elements

if TYPE_CHECKING:
    from shardctl.base.dtype import DType
    from shardctl.tensors.bands import BandBuffer, ByteReader, ChunkIndex

_CHUNK_ELEMENTS: Final = 1 << 18
"""Elements that are worked out at a time."""
_F32_DTYPE: Final = BY_NAME["F32"]


@value_class
class AdaptedVector:
    """Elements in a row, as another type than they are stored in, or with a multiple of others added to them."""

    name: str
    stored: ChunkIndex
    dtype: DType
    added: ChunkIndex | None = None
    scaling: float = 1.0

    def read_values(self, reader: ByteReader, buffer: BandBuffer, offset: int, into: memoryview) -> int:
        """Fill `into` with the bytes from `offset`; returns how many finite values became infinite, which is none.

        Raises SourceError where an element is not finite that the adapter replaces, or that is finite in the base.
        """
        item = self.dtype.unit_bytes
        out = np.frombuffer(into, np.uint8)
        first, last = offset // item, (offset + len(out)) // item
        for start in range(first, last, _CHUNK_ELEMENTS):
            span = start, min(start + _CHUNK_ELEMENTS, last)
            values = stored = read_numbers(reader, buffer, self.stored, (span,))
            if self.added is not None:
                values = values + read_numbers(reader, buffer, self.added, (span,)) * np.float32(self.scaling)
            place = out[(span[0] - first) * item : (span[1] - first) * item]
            overflowed = cast_elements(values.view(np.uint8).reshape(-1), _F32_DTYPE, self.dtype, place).overflowed
            wrong = ~np.isfinite(values)
            if self.added is not None:
                wrong &= np.isfinite(stored)
            if overflowed or wrong.any():
                raise build_overflow_error(self.name, overflowed + int(np.count_nonzero(wrong)), self.dtype)
        return 0
