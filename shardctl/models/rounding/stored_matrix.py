"""Reads a weight as it is stored, and finds the largest magnitudes of its blocks."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from shardctl.base.errors import SourceError
from shardctl.base.value import value_class
from shardctl.tensors.box import Box
from shardctl.tensors.cast import cast_elements

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from shardctl.base.dtype import DType
    from shardctl.models.rounding.scales import ScaleRule
    from shardctl.tensors.bands import BandBuffer, ByteReader, ChunkIndex
    from shardctl.tensors.tiles import Span

TILE: Final = 1 << 18
"""Elements that are worked on at once, more or less: as F32 they take 1 MiB."""
_IGNORE_MODULE_HINT: Final = "leave it as it is with --quantize-ignore {}"


@value_class
class StoredMatrix:
    """A weight that is to be quantized."""

    module: str
    shape: tuple[int, int]
    """Outputs and inputs."""
    stored: ChunkIndex
    dtype: DType
    """The type that it is cast to before, or its own."""

    @property
    def item_bytes(self) -> int:
        """Bytes that an element takes while it is read: as it is stored, and as it is cast."""
        have = self.stored.chunks[0].dtype
        return have.unit_bytes + (self.dtype.unit_bytes if have != self.dtype else 0)

    def read_bits(self, reader: ByteReader, buffer: BandBuffer, rows: Span, columns: Span) -> NDArray[Any]:
        """Read the bit patterns of a tile, in `dtype`."""
        box = Box((rows[0], columns[0]), (rows[1] - rows[0], columns[1] - columns[0]))
        have = self.stored.chunks[0].dtype
        into = np.empty(have.nbytes(box.shape), np.uint8)
        found = buffer.read(reader, self.stored, box, into)
        assert found == box.size, f"{self.module} {box}: read {found} elements"  # noqa: S101
        if have != self.dtype:
            cast = np.empty(self.dtype.nbytes(box.shape), np.uint8)
            cast_elements(into, have, self.dtype, cast)
            into = cast
        return into.view(np.uint32 if self.dtype.bits == 32 else np.uint16).reshape(box.shape)  # noqa: PLR2004

    def split_rows(self, rows: Span) -> Iterator[Span]:
        """Yield runs of whole rows that make up a tile, at least one."""
        step = max(TILE // max(self.shape[1], 1), 1)
        for start in range(rows[0], rows[1], step):
            yield start, min(start + step, rows[1])

    def find_peaks(self, bits: NDArray[Any], rule: ScaleRule, wide: int) -> NDArray[Any]:
        """Find the bits of the largest magnitude of each `wide` inputs in each row of `bits`, which are whole rows.

        Raises SourceError for numbers that are infinite or none: compressed-tensors would make zeros of all others
        that share their scale, or codes without meaning.
        """
        sizes = bits & bits.dtype.type(rule.magnitude)
        peaks: NDArray[Any]
        if sizes.shape[1] % wide == 0:
            peaks = sizes.reshape(len(sizes), -1, wide).max(2)
        else:
            peaks = np.maximum.reduceat(sizes, np.arange(0, sizes.shape[1], wide), axis=1)
        self.check_peaks(peaks, rule)
        return peaks

    def check_peaks(self, peaks: NDArray[Any], rule: ScaleRule) -> None:
        """Raise SourceError for magnitudes that no scale can be made of."""
        if peaks.size and int(peaks.max()) >= rule.infinity:
            raise SourceError(
                f"{self.module}.weight has elements that are infinite or not a number, and {rule.recipe.name} has no "
                "scale for the block around them",
                hint=_IGNORE_MODULE_HINT.format(self.module),
            )
        if rule.find_overflow(peaks):
            raise SourceError(
                f"{self.module}.weight has elements so large that their scale in {rule.recipe.name} would be infinite",
                hint=_IGNORE_MODULE_HINT.format(self.module),
            )


@dataclass(frozen=True)
class SharedPeak:
    """The largest magnitude of a weight, or of several that engines put into one matrix."""

    members: Sequence[StoredMatrix]
    rule: ScaleRule
    _found: list[int] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def find(self, reader: ByteReader, buffer: BandBuffer) -> int:
        """Find its bits, for which all is read once."""
        with self._lock:
            if not self._found:
                self._found.append(max(self._scan_matrix(each, reader, buffer) for each in self.members))
            return self._found[0]

    def _scan_matrix(self, matrix: StoredMatrix, reader: ByteReader, buffer: BandBuffer) -> int:
        peak, width = 0, matrix.shape[1]
        for rows in matrix.split_rows((0, matrix.shape[0])):
            bits = matrix.read_bits(reader, buffer, rows, (0, width))
            peak = max(peak, int(matrix.find_peaks(bits, self.rule, width).max(initial=0)))
        return peak
