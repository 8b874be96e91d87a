"""Reads, compares and writes tensors in bands: row-major stretches of at most one block.

>>> from shardctl.base.dtype import BY_NAME
>>> [str(box) for box in split_bands((4, 8), BY_NAME["F32"], block=64)]
['[0:2, 0:8]', '[2:4, 0:8]']
"""

from __future__ import annotations

from functools import cache
from itertools import product
from math import isqrt, prod
from typing import TYPE_CHECKING, Any, Final, Protocol

import ml_dtypes
import numpy as np

from shardctl.base.errors import UnsupportedError
from shardctl.base.huge_pages import allocate_pages
from shardctl.base.value import value_class
from shardctl.tensors.box import Box, BoxIndex
from shardctl.tensors.manifest import GAMMA_LESS_ONE, ConstantFill, compute_dense_strides, narrow_chunk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import DTypeLike, NDArray

    from shardctl.base.dtype import DType
    from shardctl.tensors.manifest import Chunk, Region, Tensor

PAGE: Final = 4096
"""Memory and offsets of direct I/O are multiples of it, so what lies in memory as it will in the file is not copied."""

_MEMORY_ALIGNMENT_BYTES: Final = 8
"""Bytes; numbers in memory begin at multiples of it."""

OVER_READ = 2
"""A gapped piece is read in one call, gaps included, if that reads at most this many times its own bytes."""

_AFFINE_OFFSETS: Final = {GAMMA_LESS_ONE: np.float32(1)}
"""By name, what is added to what is stored."""
_NUMPY_FLOAT_TYPES: Final[dict[str, DTypeLike]] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


class ByteReader(Protocol):
    """Anything with byte-range reads."""

    def read_at(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into`."""


class ByteWriter(Protocol):
    """Anything with byte-range writes."""

    def write_at(self, path: str, offset: int, data: memoryview | bytes) -> None:
        """Write all of `data`."""


def split_bands(
    shape: Sequence[int], dtype: DType, block: int, *, fastest: int | None = None, origin: Sequence[int] | None = None
) -> Iterator[Box]:
    """Split a tensor of `shape`, or such a box at `origin`, into disjoint bands of at most `block` bytes.

    They are in order. A band is a row-major stretch: whole rows where they fit, else a stretch of one row. Where the
    storage is permuted, `fastest` names the dim that is contiguous there, and bands become two-dimensional tiles over
    it and the last dim.
    """
    if not prod(shape):
        return
    if dtype.nbytes((_round_to_units(prod(shape), dtype),)) <= block:
        yield Box(tuple(origin), tuple(shape)) if origin is not None else Box.whole(shape)
        return
    extents = (
        _compute_tile_extents(shape, dtype, block, fastest)
        if fastest is not None
        else _compute_band_extents(shape, dtype, block)
    )
    begins = origin if origin is not None else (0,) * len(shape)
    ends = [begin + extent for begin, extent in zip(begins, shape, strict=True)]
    starts = [range(*each) for each in zip(begins, ends, extents, strict=True)]
    for at in product(*starts):
        yield Box(at, tuple(min(e, end - a) for e, end, a in zip(extents, ends, at, strict=True)))


def split_tensor_bands(
    tensor: Tensor, dtype: DType, block: int, *, fastest: int | None = None, within: Box | None = None
) -> Iterator[Box]:
    """Split a tensor, or a box `within` it, into bands as `split_bands`; those of an unfolded one have whole turns.

    A box of one part alone, which is compared with its copy, has bands of that part.
    """
    box, turns = within or Box.whole(tensor.shape), tensor.turns
    if turns == 1:
        yield from split_bands(box.shape, dtype, block, fastest=fastest, origin=box.origin)
        return
    *origin, part = box.origin
    *shape, parts = box.shape
    last = len(shape) - 1
    tile = None if fastest is None or fastest >= last else fastest
    for band in split_bands(shape, dtype, block // parts, fastest=tile, origin=origin):
        yield Box((*band.origin, part), (*band.shape, parts))


def _compute_band_extents(shape: Sequence[int], dtype: DType, block: int) -> list[int]:
    extents = [1] * len(shape)
    room = block
    for dim in reversed(range(len(shape))):
        if dim == len(shape) - 1:
            units = max(room // dtype.unit_bytes, 1)
            extents[dim] = min(shape[dim], units * dtype.unit_elements)
            room = block // max(dtype.nbytes((_round_to_units(extents[dim], dtype),)), 1)
        else:
            extents[dim] = min(shape[dim], max(room, 1))
            room //= extents[dim]
        if extents[dim] < shape[dim]:
            break
    return extents


def _compute_tile_extents(shape: Sequence[int], dtype: DType, block: int, fastest: int) -> list[int]:
    last = len(shape) - 1
    units = max(block // dtype.unit_bytes, 1)
    side = isqrt(units)
    extents = [1] * len(shape)
    extents[last] = min(shape[last], max(side * dtype.unit_elements, 1))
    extents[fastest] = min(shape[fastest], max(units * dtype.unit_elements // extents[last], 1))
    room = units * dtype.unit_elements // extents[fastest]
    extents[last] = min(shape[last], max(room // dtype.unit_elements * dtype.unit_elements, 1))
    return extents


def _round_to_units(extent: int, dtype: DType) -> int:
    return -(-extent // dtype.unit_elements) * dtype.unit_elements


def find_fastest_dim(chunks: Sequence[Chunk]) -> int | None:
    """Find the dim along which permuted storage is contiguous, or None if all chunks are stored row-major."""
    for chunk in chunks:
        if isinstance(chunk.where, ConstantFill):
            continue
        if chunk.where.strides == compute_dense_strides(chunk.dtype, chunk.box.shape):
            continue
        dims = [d for d, n in enumerate(chunk.box.shape) if n > 1]
        if not dims:
            continue
        fastest = min(dims, key=lambda d, s=chunk.where.strides: (s[d], -d))  # type: ignore[misc]
        if fastest != dims[-1]:
            return fastest
    return None


@cache
def get_unit_type(dtype: DType) -> np.dtype[np.void] | np.dtype[np.unsignedinteger]:
    """Return the NumPy type of one unit, as bits: an unsigned integer, or raw bytes for odd widths."""
    size = dtype.unit_bytes
    return np.dtype(f"<u{size}") if size in {1, 2, 4, 8} else np.dtype(f"V{size}")


def view_band(buffer: NDArray[np.uint8], dtype: DType, box: Box) -> NDArray[np.generic]:
    """Return the start of `buffer` as the row-major array of the units of `box`."""
    shape = dtype.unit_shape(box.shape)
    return buffer[: prod(shape) * dtype.unit_bytes].view(get_unit_type(dtype)).reshape(shape)


def allocate_aligned(nbytes: int) -> NDArray[np.uint8]:
    """Allocate memory that begins with a page, and `PAGE` bytes more, to begin where a file's page will."""
    return allocate_pages(nbytes + PAGE)


def find_page_shift(chunks: Sequence[Chunk], box: Box, dtype: DType) -> int:
    """Find at which byte of a page the band `box` of `dtype` should begin, to lie in memory as in the chunks' files.

    That is decided by the first chunk that has whole rows of the band; of others the columns are gathered anyway.
    """
    for chunk in chunks:
        if not isinstance(chunk.where, ConstantFill) and chunk.box.shape[1:] == box.shape[1:]:
            rows = chunk.box.origin[0] - box.origin[0] if box.shape else 0
            before = dtype.nbytes(box.shape) * rows // box.shape[0] if rows else 0
            shift = (chunk.where.offset - before) % PAGE
            return shift if shift % _MEMORY_ALIGNMENT_BYTES == 0 else 0
    return 0


class BandBuffer:
    """Reads and writes bands through one scratch buffer; one per thread.

    `block` bytes of scratch bound what is gathered or scattered at once; gaps of up to `gap` bytes between what is
    wanted are read along, whatever OVER_READ says.
    """

    def __init__(self, block: int, gap: int = 0) -> None:
        self._block = block
        self.scratch = allocate_aligned(block)
        self._gap = gap

    def read(self, reader: ByteReader, chunks: ChunkIndex, box: Box, into: NDArray[np.uint8]) -> int:
        """Assemble `box` row-major at the start of `into`; returns the elements found, so that holes are noticed."""
        dtype = chunks.chunks[0].dtype
        whole = find_whole_region(chunks.chunks[0], box)
        if whole is not None:
            reader.read_at(whole.file, whole.offset, into[: dtype.nbytes(box.shape)].data)
            return box.size
        band = view_band(into, dtype, box)
        found = 0
        for chunk in chunks.within(box):
            part = band[build_unit_slices(chunk.box, dtype, box.origin)]
            found += chunk.box.size
            if isinstance(chunk.where, ConstantFill):
                part[...] = np.frombuffer(chunk.where.unit, part.dtype)[0]
                continue
            limits = _GapLimits(self._block, OVER_READ, self._gap)
            for piece in _split_pieces(part, chunk.where.offset, chunk.where.strides, limits):
                view = piece.view
                if piece.dense and view.flags.c_contiguous:
                    reader.read_at(chunk.where.file, piece.offset, view.reshape(-1).view(np.uint8).data)
                else:
                    reader.read_at(chunk.where.file, piece.offset, self.scratch[: piece.span].data)
                    view[...] = np.ndarray(view.shape, view.dtype, self.scratch, 0, piece.strides)
            if chunk.affine:
                part[...] = _decode_affine(part, dtype, chunk.affine)
        return found

    def write(self, writer: ByteWriter, chunk: Chunk, within: Box, data: NDArray[np.uint8]) -> int:
        """Write the part of the band `within` (row-major at the start of `data`) that `chunk` wants; returns bytes."""
        if isinstance(chunk.where, ConstantFill):
            return 0
        whole = find_whole_region(chunk, within)
        if whole is not None:
            nbytes = chunk.dtype.nbytes(within.shape)
            writer.write_at(whole.file, whole.offset, data[:nbytes].data)
            return nbytes
        part = view_band(data, chunk.dtype, within)[build_unit_slices(chunk.box, chunk.dtype, within.origin)]
        if chunk.affine:
            part = _encode_affine(part, chunk.dtype, chunk.affine, chunk.name)
        for piece in _split_pieces(part, chunk.where.offset, chunk.where.strides, _GapLimits(self._block)):
            assert piece.dense, f"{chunk.name}: {chunk.where} overlaps itself"  # noqa: S101 - a layout's bug
            if piece.view.flags.c_contiguous:
                flat = piece.view.reshape(-1).view(np.uint8)
            else:
                begin = piece.offset % PAGE
                flat = self.scratch[begin : begin + piece.span]
                flat.view(piece.view.dtype).reshape(piece.view.shape)[...] = piece.view
            writer.write_at(chunk.where.file, piece.offset, flat.data)
        return int(part.nbytes)


def find_whole_region(chunk: Chunk, box: Box) -> Region | None:
    """Return where the bytes of `box` lie as they are wanted, if `chunk` is this box; most tensors need no more."""
    where = chunk.where
    if isinstance(where, ConstantFill) or chunk.affine or chunk.box != box:
        return None
    return where if where.strides == compute_dense_strides(chunk.dtype, box.shape) else None


class ChunkIndex:
    """Chunks of one tensor, found by box."""

    __slots__ = ("_index", "chunks")

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.chunks = tuple(chunks)
        self._index = BoxIndex([chunk.box for chunk in self.chunks])

    def within(self, box: Box) -> Iterator[Chunk]:
        """Yield the part of each chunk that lies in `box`."""
        for position, common in self._index.find_overlaps(box):
            yield narrow_chunk(self.chunks[position], common)

    def find_shift(self, box: Box) -> int:
        """Find at which byte of a page the band `box` should begin, so that direct reads of the chunks copy nothing."""
        return find_page_shift(list(self.within(box)), box, self.chunks[0].dtype)


def build_unit_slices(box: Box, dtype: DType, origin: Sequence[int] | None = None) -> tuple[Any, ...]:
    """Build an index that selects `box` of an array of units, which begins at `origin`.

    Two 4-bit elements are one unit.

    Its Ellipsis keeps 0-d results arrays.
    """
    slices = box.slices(origin)
    per = dtype.unit_elements
    if per > 1 and slices:
        last = slices[-1]
        slices = (*slices[:-1], slice(last.start // per, last.stop // per))
    return (*slices, ...)


@value_class
class _StridedPiece:
    """A part of a strided region that one call can move."""

    offset: int
    """In the file, of its first byte."""
    span: int
    """Bytes from its first to its last, gaps included."""
    view: NDArray[np.generic]
    """Its place in the band, dims in storage order."""
    strides: tuple[int, ...]
    """In the file, in bytes."""

    @property
    def dense(self) -> bool:
        """Whether the file holds it row-major without gaps or overlap; an equal span is not enough."""
        step = self.view.dtype.itemsize
        for extent, stride in zip(reversed(self.view.shape), reversed(self.strides), strict=True):
            if extent != 1 and stride != step:
                return False
            step *= extent
        return True


@value_class
class _GapLimits:
    """Which gapped pieces are moved in one call; one that is dense on both sides may have any size."""

    span: int
    """Bytes from first to last at most."""
    slack: int = 1
    """At least one byte in so many belongs to it,"""
    gap: int = 0
    """or else no gap has more bytes than this."""

    def allows_gap(self, span: int, own: int, gap: int) -> bool:
        """Return whether a piece of `span` bytes, `own` of which are wanted, is one call."""
        return span <= self.span and (span <= self.slack * own or gap <= self.gap)


def _split_pieces(
    view: NDArray[np.generic], offset: int, strides: Sequence[int], limits: _GapLimits
) -> Iterator[_StridedPiece]:
    """Cut a strided region into pieces that one call each can move."""
    dims = sorted((d for d, n in enumerate(view.shape) if n != 1), key=lambda d: (-strides[d], d))
    ones = [d for d, n in enumerate(view.shape) if n == 1]
    drop: Any = (..., *(0 for _ in ones))
    ordered = view.transpose([*dims, *ones])[drop]
    yield from _cut_piece(_build_piece(ordered, offset, tuple(strides[d] for d in dims)), limits)


def _build_piece(view: NDArray[np.generic], offset: int, strides: tuple[int, ...]) -> _StridedPiece:
    span = view.dtype.itemsize + sum((n - 1) * s for n, s in zip(view.shape, strides, strict=True))
    return _StridedPiece(offset, span, view, strides)


def _find_widest_gap(piece: _StridedPiece) -> int:
    """Find bytes of the longest stretch between two elements of a piece."""
    span, widest = piece.view.dtype.itemsize, 0
    for extent, stride in zip(reversed(piece.view.shape), reversed(piece.strides), strict=True):
        widest = max(widest, stride - span)
        span += (extent - 1) * stride
    return widest


def _cut_piece(piece: _StridedPiece, limits: _GapLimits) -> Iterator[_StridedPiece]:
    view, strides = piece.view, piece.strides
    if (piece.dense and view.flags.c_contiguous) or limits.allows_gap(piece.span, view.nbytes, _find_widest_gap(piece)):
        yield piece
        return
    inner = _build_piece(view[0, ...], piece.offset, strides[1:])
    fits = inner.span <= limits.span and strides[0]
    rows = max((limits.span - inner.span) // strides[0] + 1, 1) if fits else 1
    if rows > 1 and limits.allows_gap(
        inner.span + (rows - 1) * strides[0], rows * inner.view.nbytes, _find_widest_gap(piece)
    ):
        for start in range(0, view.shape[0], rows):
            yield _build_piece(view[start : start + rows], piece.offset + start * strides[0], strides)
    else:
        for row in range(view.shape[0]):
            yield from _cut_piece(_build_piece(view[row, ...], piece.offset + row * strides[0], strides[1:]), limits)


def _decode_affine(stored: NDArray[Any], dtype: DType, affine: str) -> NDArray[Any]:
    """Return the elements that are meant by stored ones, both as bits of `dtype`.

    A sum is rounded to nearest, ties to even.

    Raises UnsupportedError for a change that is not known, or of a type that is not changed.
    """
    return _shift_elements(stored, dtype, affine, 1)


def _encode_affine(meaning: NDArray[Any], dtype: DType, affine: str, name: str) -> NDArray[Any]:
    """Encode the elements to store for those that are meant, both as bits of `dtype`.

    Raises UnsupportedError as `_decode_affine`, and, naming the array, if the difference cannot be told exactly:
    whoever reads it would get other elements than were meant.
    """
    found = _shift_elements(meaning, dtype, affine, -1)
    back = _shift_elements(found, dtype, affine, 1)
    if not np.array_equal(back, meaning):
        wrong = int(np.count_nonzero(back != meaning))
        raise UnsupportedError(
            f"{name}: {wrong:,} of its elements cannot be stored as {affine} in {dtype} without rounding",
            hint="cast to fp32 with --dtype fp32",
        )
    return found


def _shift_elements(bits: NDArray[Any], dtype: DType, affine: str, sign: int) -> NDArray[Any]:
    if affine not in _AFFINE_OFFSETS or dtype.name not in _NUMPY_FLOAT_TYPES:
        raise UnsupportedError(f"elements of {dtype} cannot be changed by {affine!r}")
    kind = np.dtype(_NUMPY_FLOAT_TYPES[dtype.name])
    values = np.ascontiguousarray(bits).view(kind).astype(np.float32) + sign * _AFFINE_OFFSETS[affine]
    return values.astype(kind).view(bits.dtype).reshape(bits.shape)
