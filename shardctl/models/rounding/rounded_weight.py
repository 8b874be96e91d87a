"""Presents the arrays of a quantized weight as if they were stored, worked out of the weight when they are read.

Rows are read in strips: a row of blocks, or as many rows as make up a tile. The scales of a strip are remembered, so
that those of a weight, which are read after its codes, need no second look at it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import field
from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.base.value import state_class, value_class
from shardctl.models.rounding.codes import pack_codes, round_to_codes, widen_bits
from shardctl.models.rounding.stored_matrix import TILE, StoredMatrix
from shardctl.tensors.tiles import split_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shardctl.base.dtype import DType
    from shardctl.models.rounding.scales import ScaleRule
    from shardctl.models.rounding.stored_matrix import SharedPeak
    from shardctl.tensors.bands import BandBuffer, ByteReader
    from shardctl.tensors.tiles import Span

_MAX_SINGLE_READ_BYTES: Final = 4 << 20
"""Bytes of a strip that is read at once; a larger one is read twice, for its scales and for its codes."""
ROUNDING_BYTES: Final = 12 << 20
"""Memory that one thread needs: a strip, tiles of it as F32, and what they are read in."""
REMEMBERED: Final = 8 << 20
"""Bytes of scales that are remembered at most."""
_ENTRY_OVERHEAD_BYTES: Final = 512
"""Bytes that an entry takes beside its array."""


@state_class
class ScaleMemory:
    """The scales of strips that were looked at last."""

    _found: OrderedDict[tuple[str, int], NDArray[Any]] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _bytes: int = 0

    def recall(self, module: str, strip: int) -> NDArray[Any] | None:
        """Return the bits of a strip's scales, unless they are forgotten."""
        with self._lock:
            if (module, strip) in self._found:
                self._found.move_to_end((module, strip))
            return self._found.get((module, strip))

    def remember(self, module: str, strip: int, scales: NDArray[Any]) -> None:
        """Keep them, and forget the oldest where they get too many."""
        with self._lock:
            if (module, strip) in self._found:
                return
            self._found[module, strip] = scales
            self._bytes += scales.nbytes + _ENTRY_OVERHEAD_BYTES
            while self._bytes > REMEMBERED:
                _, old = self._found.popitem(last=False)
                self._bytes -= old.nbytes + _ENTRY_OVERHEAD_BYTES


@value_class
class RoundedWeight:
    """A weight and how it is quantized."""

    matrix: StoredMatrix
    rule: ScaleRule
    memory: ScaleMemory
    peak: SharedPeak | None
    """What the numbers for the whole weight follow from."""

    @property
    def blocks(self) -> tuple[int, int]:
        """Outputs and inputs that share a scale."""
        high, wide = self.rule.recipe.block
        return high or max(self.matrix.shape[0], 1), wide or max(self.matrix.shape[1], 1)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of scales."""
        (high, wide), (rows, columns) = self.blocks, self.matrix.shape
        return -(-rows // high), -(-columns // wide)

    @property
    def strip(self) -> int:
        """Rows of a strip."""
        high = self.rule.recipe.block[0]
        return high if high > 1 else max(TILE // max(self.matrix.shape[1], 1), 1)

    def find_whole(self, reader: ByteReader, buffer: BandBuffer) -> float:
        """Find the number beside scales in FP8; raises SourceError where the type of the weight cannot hold it."""
        if self.rule.recipe.scale != "fp8" or self.peak is None:
            return 1.0
        found = self.rule.compute_whole(self.peak.find(reader, buffer))
        if found is None:
            raise SourceError(
                f"{self.matrix.module}.weight has only elements so small that {self.rule.dtype} does not hold the "
                f"global scale of {self.rule.recipe.name}: compressed-tensors would take 1 and lose most of them",
                hint="add --dtype bf16, in which it is computed then",
            )
        return found

    def find_scales(self, reader: ByteReader, buffer: BandBuffer, strip: int) -> NDArray[Any]:
        """Find the bits of the scales of a strip: rows and columns of the grid."""
        return self._look_at(reader, buffer, strip)[0]

    def find_codes(self, reader: ByteReader, buffer: BandBuffer, rows: Span, columns: Span) -> Iterator[NDArray[Any]]:
        """Yield the packed codes of a tile, some whole rows of it at a time."""
        whole = self.find_whole(reader, buffer)
        if self.rule.recipe.block == (0, 0):
            divisors = self.rule.compute_divisors(self.find_scale_of_all(reader, buffer), whole)
            yield from self._encode(self.matrix.read_bits(reader, buffer, rows, columns), columns, divisors)
            return
        for strip in range(rows[0] // self.strip, -(-rows[1] // self.strip)):
            first = strip * self.strip
            here = max(rows[0], first), min(rows[1], first + self.strip)
            scales, bits = self._look_at(reader, buffer, strip)
            divisors = self.rule.compute_divisors(scales, whole)
            inside = slice(here[0] - first, here[1] - first)
            if len(divisors) > 1:
                divisors = divisors[inside]
            if bits is None:
                for part in self.matrix.split_rows(here):
                    own = divisors[part[0] - here[0] : part[1] - here[0]] if len(divisors) > 1 else divisors
                    yield from self._encode(self.matrix.read_bits(reader, buffer, part, columns), columns, own)
            else:
                yield from self._encode(bits[inside, slice(*columns)], columns, divisors)

    def find_scale_of_all(self, reader: ByteReader, buffer: BandBuffer) -> NDArray[Any]:
        """Find the bits of the one scale of the weight."""
        assert self.peak is not None  # noqa: S101 - such recipes have one
        peak = np.array([[self.peak.find(reader, buffer)]], np.uint32 if self.rule.dtype == "F32" else np.uint16)
        return self.rule.compute_scales(peak, 1.0)

    def _look_at(self, reader: ByteReader, buffer: BandBuffer, strip: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """Return the scales of a strip, and its bits if they were read for that and are few enough to keep."""
        known = self.memory.recall(self.matrix.module, strip)
        if known is not None:
            return known, None
        height, width = self.matrix.shape
        rows = strip * self.strip, min((strip + 1) * self.strip, height)
        parts, kept = [], (rows[1] - rows[0]) * width * self.matrix.item_bytes <= _MAX_SINGLE_READ_BYTES
        bits = self.matrix.read_bits(reader, buffer, rows, (0, width)) if kept else None
        for part in self.matrix.split_rows(rows):
            tile = (
                bits[part[0] - rows[0] : part[1] - rows[0]]
                if bits is not None
                else self.matrix.read_bits(reader, buffer, part, (0, width))
            )
            peaks = self.matrix.find_peaks(tile, self.rule, self.blocks[1])
            parts.append(peaks.max(0, keepdims=True) if self.rule.recipe.block[0] > 1 else peaks)
        peaks = np.concatenate(parts)
        if self.rule.recipe.block[0] > 1:
            peaks = peaks.max(0, keepdims=True)
        scales = self.rule.compute_scales(peaks, self.find_whole(reader, buffer))
        self.memory.remember(self.matrix.module, strip, scales)
        return scales, bits

    def _encode(self, bits: NDArray[Any], columns: Span, divisors: NDArray[np.float32]) -> Iterator[NDArray[Any]]:
        """Yield the packed codes of rows, a tile at a time; a single row of divisors is that of all."""
        wide, width = self.blocks[1], columns[1] - columns[0]
        step = max(TILE // max(width, 1), 1)
        first = columns[0] // wide
        own = divisors[:, first : -(-columns[1] // wide)]
        for start in range(0, len(bits), step):
            numbers = widen_bits(np.ascontiguousarray(bits[start : start + step]), self.rule.dtype)
            by = own[start : start + step] if len(own) > 1 else own
            with np.errstate(under="ignore"):
                if columns[0] % wide == 0 and width % wide == 0:
                    blocked = numbers.reshape(len(numbers), -1, wide) / by[:, :, None]
                    numbers = blocked.reshape(numbers.shape)
                else:
                    skipped = columns[0] - first * wide
                    numbers = numbers / np.repeat(by, wide, axis=1)[:, skipped : skipped + width]
            codes = round_to_codes(numbers, self.rule.recipe.number, self.rule.quotient_type)
            if self.rule.recipe.scale == "exact":
                self._check_codes(codes, numbers)
            yield pack_codes(codes, self.rule.recipe.per_unit)

    def _check_codes(self, codes: NDArray[np.uint8], numbers: NDArray[np.float32]) -> None:
        """Raise UnsupportedError unless every code is the number that was rounded to it."""
        if np.array_equal(codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32), numbers):
            return
        high, wide = self.blocks
        raise UnsupportedError(
            f"{self.matrix.module}.weight has values that FP8 with one scale for {high} x {wide} does not hold exactly",
            hint="--dtype bf16 --quantize fp8-block rounds all weights; without --quantize they stay as they are",
        )


@value_class
class RoundedIntegers:
    """The array of a weight's codes."""

    weight: RoundedWeight

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{self.weight.matrix.module}.{self.weight.rule.recipe.codes_name}"

    @property
    def dtype(self) -> DType:
        """The element type."""
        return BY_NAME[self.weight.rule.recipe.code_type]

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows, and elements of each."""
        rows, columns = self.weight.matrix.shape
        return rows, -(-columns // self.weight.rule.recipe.per_unit)

    def read_values(self, reader: ByteReader, buffer: BandBuffer, offset: int, into: memoryview) -> int:
        """Fill `into` with the bytes from `offset`; returns 0, for nothing becomes infinite."""
        item, per = self.dtype.unit_bytes, self.weight.rule.recipe.per_unit
        out, written = np.frombuffer(into, np.uint8), 0
        most = max(TILE, self.weight.strip * self.weight.matrix.shape[1]) // per
        for rows, units in split_run(offset // item, (offset + len(out)) // item, self.shape[1], most):
            columns = units[0] * per, units[1] * per
            for codes in self.weight.find_codes(reader, buffer, rows, columns):
                data = np.ascontiguousarray(codes).view(np.uint8).reshape(-1)
                out[written : written + data.size] = data
                written += data.size
        return 0


@value_class
class RoundedScales:
    """The array of a weight's scales."""

    weight: RoundedWeight
    suffix: str = "weight_scale"
    """What it is called in its module."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{self.weight.matrix.module}.{self.suffix}"

    @property
    def dtype(self) -> DType:
        """The element type."""
        return BY_NAME[self.weight.rule.stored_type]

    @property
    def shape(self) -> tuple[int, ...]:
        """The grid, or one for the whole weight."""
        return (1,) if self.weight.rule.recipe.block == (0, 0) else self.weight.grid

    def read_values(self, reader: ByteReader, buffer: BandBuffer, offset: int, into: memoryview) -> int:
        """Fill `into` with the bytes from `offset`; returns 0, for nothing becomes infinite."""
        out, weight = np.frombuffer(into, np.uint8), self.weight
        if weight.rule.recipe.block == (0, 0):
            out[:] = weight.find_scale_of_all(reader, buffer).reshape(-1).view(np.uint8)[offset : offset + len(out)]
            return 0
        wide = weight.grid[1] * self.dtype.unit_bytes
        high = 1 if weight.rule.recipe.block[0] > 1 else weight.strip
        end = offset + len(out)
        for strip in range(offset // (wide * high), -(-end // (wide * high))):
            start = strip * wide * high
            data = np.ascontiguousarray(weight.find_scales(reader, buffer, strip)).view(np.uint8).reshape(-1)
            here = max(offset, start), min(end, start + data.size)
            out[here[0] - offset : here[1] - offset] = data[here[0] - start : here[1] - start]
        return 0


@value_class
class WholeScale:
    """The array with the number beside scales in FP8."""

    weight: RoundedWeight
    dtype: DType = BY_NAME["F32"]
    shape: tuple[int, ...] = (1,)

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{self.weight.matrix.module}.weight_global_scale"

    def read_values(self, reader: ByteReader, buffer: BandBuffer, offset: int, into: memoryview) -> int:
        """Fill `into` with the bytes from `offset`; returns 0, for nothing becomes infinite."""
        data = np.array([self.weight.find_whole(reader, buffer)], np.float32).view(np.uint8)
        np.frombuffer(into, np.uint8)[:] = data[offset : offset + len(into)]
        return 0
