"""Presents a weight that an adapter has changed as if it were stored, row after row.

What PEFT computes (tuners/lora/layer.py, `get_delta_weight` and `merge`; variants.py, `DoraLinearVariant`), with the
adapter in F32, as `PeftModel.from_pretrained` loads it: the product of the two matrices, times the scaling, is added in
F32 to the weight, and the sum is rounded to the weight's type. The product is rounded once, as `arithmetic` says.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import SourceError
from shardctl.base.value import value_class
from shardctl.models.adaptation.arithmetic import add_squares, compute_row_norms, multiply_low_rank, round_norms
from shardctl.models.adaptation.numbers import COMPUTABLE, build_overflow_error, read_numbers, round_numbers
from shardctl.tensors.cast import cast_elements
from shardctl.tensors.tiles import split_run

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardctl.tensors.bands import BandBuffer, ByteReader, ChunkIndex
    from shardctl.tensors.tiles import Span

_MAX_TILE_ELEMENTS: Final = 1 << 18
"""Elements of a tile at most, and of the parts of the adapter's matrices that are read at a time."""
ADAPTING_BYTES: Final = 10 << 20
"""Memory that one thread needs to change tiles."""
_F32_DTYPE: Final = BY_NAME["F32"]


@value_class
class LowRankProduct:
    """What is added to a matrix: a matrix of few columns times one of few rows, times a number."""

    left: ChunkIndex
    """`[rows, rank]`."""
    right: ChunkIndex
    """`[rank, columns]`."""
    rank: int
    scaling: float
    rounded: bool = False
    """Whether it is rounded to the type of the weight before it is added, as PEFT does for experts and embeddings."""

    def read(self, reader: ByteReader, buffer: BandBuffer, spans: tuple[Span, Span]) -> NDArray[np.float32]:
        """Compute a tile; raises SourceError for matrices with elements that are not finite."""
        (start, stop), width = spans[1], max(_MAX_TILE_ELEMENTS // self.rank, 1)
        left = _read_finite(reader, buffer, self.left, (spans[0], (0, self.rank)))
        parts = []
        for first in range(start, stop, width):
            columns = first, min(first + width, stop)
            right = _read_finite(reader, buffer, self.right, ((0, self.rank), columns))
            parts.append(multiply_low_rank(left, right, self.scaling))
        return parts[0] if len(parts) == 1 else np.concatenate(parts, 1)


def _read_finite(
    reader: ByteReader, buffer: BandBuffer, stored: ChunkIndex, spans: tuple[Span, Span]
) -> NDArray[np.float32]:
    """Read a part of a matrix; raises SourceError for elements that are not finite."""
    values = read_numbers(reader, buffer, stored, spans)
    if not np.isfinite(values).all():
        raise SourceError(
            f"the adapter's {stored.chunks[0].name} has elements that are NaN or infinite",
            hint="its training diverged, or the file is damaged",
        )
    return values


@dataclass(frozen=True)
class AdaptedWeight:
    """A matrix to which an adapter adds a product, and whose rows or columns it may scale (DoRA)."""

    name: str
    shape: tuple[int, int]
    stored: ChunkIndex
    """The matrix itself."""
    product: LowRankProduct
    magnitude: ChunkIndex | None = None
    """What the norms of the sum are to be: of its rows, or of its columns, which are the outputs."""
    by_column: bool = False
    _norms: list[NDArray[np.float32]] = field(default_factory=list)
    """Those of the columns, once they are known."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix."""
        return self.stored.chunks[0].dtype.nbytes(self.shape)

    def read_values(self, reader: ByteReader, buffer: BandBuffer, offset: int, into: memoryview) -> int:
        """Fill `into` with the bytes from `offset`; returns how many finite values became infinite, which is none.

        Raises SourceError where an element of the result is not finite and that of the base is.
        """
        dtype = self.stored.chunks[0].dtype
        item, width = dtype.unit_bytes, self.shape[1]
        out = np.frombuffer(into, np.uint8)
        written = 0
        for spans in split_run(offset // item, (offset + len(out)) // item, width, self._choose_tile()):
            values = self._compute_adapted_weight(reader, buffer, spans)
            size = values.size * item
            bits = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
            overflowed = cast_elements(bits, _F32_DTYPE, dtype, out[written : written + size]).overflowed
            if overflowed or not np.isfinite(values).all():
                self._check_base(reader, buffer, spans, out[written : written + size])
            written += size
        return 0

    def _check_base(
        self, reader: ByteReader, buffer: BandBuffer, spans: tuple[Span, Span], out: NDArray[np.uint8]
    ) -> None:
        """Raise SourceError unless the base's elements are not finite, either, where those of a tile are not."""
        dtype = self.stored.chunks[0].dtype
        wrong = ~np.isfinite(out.view(COMPUTABLE[dtype.name]).astype(np.float32))
        wrong &= np.isfinite(read_numbers(reader, buffer, self.stored, spans)).reshape(-1)
        if wrong.any():
            raise build_overflow_error(self.name, int(np.count_nonzero(wrong)), dtype)

    def _choose_tile(self) -> int:
        """Choose how many elements a tile has.

        Neither it nor its part of the first matrix exceeds `_MAX_TILE_ELEMENTS`.
        """
        width = self.shape[1]
        return min(_MAX_TILE_ELEMENTS, width * max(_MAX_TILE_ELEMENTS // max(width, self.product.rank), 1))

    def _compute_adapted_weight(
        self, reader: ByteReader, buffer: BandBuffer, spans: tuple[Span, Span]
    ) -> NDArray[np.float32]:
        if self.magnitude is None:
            return self._add(reader, buffer, spans)
        if self.by_column:
            factors = (
                self._read_magnitude(reader, buffer, spans[1])
                / self._find_column_norms(reader, buffer)[slice(*spans[1])]
            )
            return factors[None, :] * self._add(reader, buffer, spans)
        whole = self._add(reader, buffer, (spans[0], (0, self.shape[1])))
        factors = self._read_magnitude(reader, buffer, spans[0]) / compute_row_norms(whole)
        return factors[:, None] * whole[:, slice(*spans[1])]

    def _add(self, reader: ByteReader, buffer: BandBuffer, spans: tuple[Span, Span]) -> NDArray[np.float32]:
        """Return the sum of matrix and product, in F32."""
        values = read_numbers(reader, buffer, self.stored, spans)
        product = self.product.read(reader, buffer, spans)
        dtype = self.stored.chunks[0].dtype
        if self.product.rounded and dtype != _F32_DTYPE:
            product = round_numbers(product, dtype.name)
        values += product
        return values

    def _read_magnitude(self, reader: ByteReader, buffer: BandBuffer, span: Span) -> NDArray[np.float32]:
        assert self.magnitude is not None  # noqa: S101 - asked before
        return read_numbers(reader, buffer, self.magnitude, (span,))

    def _find_column_norms(self, reader: ByteReader, buffer: BandBuffer) -> NDArray[np.float32]:
        """Find the norms of all columns, for which the whole matrix is read once."""
        with self._lock:
            if not self._norms:
                total = np.zeros(self.shape[1])
                rows = max(_MAX_TILE_ELEMENTS // max(self.shape[1], self.product.rank), 1)
                for start in range(0, self.shape[0], rows):
                    span = start, min(start + rows, self.shape[0])
                    add_squares(total, self._add(reader, buffer, (span, (0, self.shape[1]))))
                self._norms.append(round_norms(total))
            return self._norms[0]
