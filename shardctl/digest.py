"""The layout-independent digest: position-keyed sums over the elements of a global tensor, whoever holds them.

The definition, its guarantees with their proofs, and test vectors are in ``docs/design/digest.md``; a reader of that
page alone must be able to compute the same numbers. This module is the fast way to do it: a block of elements becomes
float64 in scratch that stays in the cache, BLAS takes the inner product of each row with the column keys (exact, since
it stays below 2^53), and integers modulo 2^64 do the rest.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import blake2b, shake_128
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardctl.box import Box
    from shardctl.dtype import DType

Buffer: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]
"""Bytes without gaps; an array must be C-contiguous."""

LANES: Final = 2
"""Independent sums per part: two accidents in 2^40 are not the same accident."""

_TILE: Final = 1 << 16
"""Rows and columns per tile: 2^16 elements below 2^16 with keys below 2^20 still sum exactly in a float64."""
_COLUMN_KEY_BITS: Final = 20
_ROW_KEY_DISTINCT_BITS: Final = 29
"""Row keys differ in their low bits, so that swapping two elements of one column cannot cancel: 16 + 20 + 28 < 65."""

_BLOCK: Final = 1 << 15
"""Elements converted at a time. 256 KiB of float64 stay in a core's second-level cache, yet outweigh Python's calls."""
_CALL: Final = 1 << 13
"""Elements per BLAS call: OpenBLAS starts threads of its own from 9,216 up, and would fight the caller's."""
_STRIP: Final = 1 << 11
"""Columns per BLAS call where there are rows enough: the matrix-vector kernels want at least four rows a call."""
_GROUP: Final = 1 << 13
"""Row sums kept at a time before the row keys are applied."""


@dataclass(frozen=True, slots=True)
class Sums:
    """The sums over some of a tensor's elements, modulo 2^64: part by part, each with its lanes.

    Sums over disjoint boxes add up, in any order.

    >>> Sums((1, 2)) + Sums((3, 2**64 - 1))
    Sums(words=(4, 1))
    >>> Sums.parse(str(Sums((10, 255))))
    Sums(words=(10, 255))
    """

    words: tuple[int, ...]
    """``words[part * LANES + lane]``, each below 2^64."""

    @classmethod
    def zero(cls, dtype: DType) -> Sums:
        """The sums over no element of `dtype`."""
        return cls((0,) * (parts(dtype) * LANES))

    @classmethod
    def parse(cls, text: str) -> Sums:
        """The sums that `str` wrote, as 16 hexadecimal digits a word."""
        if not re.fullmatch("(?:[0-9a-f]{16})+", text):
            raise ValueError(f"digest sums are groups of 16 hexadecimal digits, not {text!r}")
        return cls(tuple(int(text[i : i + 16], 16) for i in range(0, len(text), 16)))

    def __add__(self, other: Sums) -> Sums:
        if len(self.words) != len(other.words):
            raise ValueError(f"digest sums of {len(self.words)} and {len(other.words)} words do not add")
        return Sums(tuple((a + b) % 2**64 for a, b in zip(self.words, other.words, strict=True)))

    def __str__(self) -> str:
        return "".join(f"{word:016x}" for word in self.words)


def parts(dtype: DType) -> int:
    """How many 16-bit parts an element of `dtype` is split into, each with sums of its own; 1 if it is narrower."""
    return max(1, dtype.bits // 16)


def partial(data: Buffer, dtype: DType, box: Box, shape: Sequence[int]) -> Sums:
    """The sums over the elements of `box`, a box of a global tensor of `shape`, whose row-major bytes are `data`.

    Holds the GIL only between blocks, and may run in many threads at once; each keeps 256 KiB of scratch and
    allocates at most a MiB while it runs.

    Raises:
        ValueError: the box is not inside the tensor, or `data` has not the bytes of the box.
        UnsupportedError: the box cuts a byte that holds several elements.
    """
    if len(box.shape) != len(shape) or any(stop > size for stop, size in zip(box.stop, shape, strict=True)):
        raise ValueError(f"box {box} is not inside a tensor of shape {tuple(shape)}")
    if not box.size:
        return Sums.zero(dtype)
    *leading, width = dtype.unit_shape(box.shape) or (1,)
    *_, column = dtype.unit_shape(box.origin) or (0,)
    units = _units(data, dtype, prod(leading), width)
    total = np.zeros((parts(dtype), LANES), np.uint64)
    per_unit = dtype.unit_elements
    rows = _Rows(box, shape)
    for start, stop in _strips(column * per_unit, (column + width) * per_unit, len(units)):
        strip = units[:, start // per_unit - column : stop // per_unit - column]
        total += _strip_sums(strip, dtype, rows, start)
    return Sums(tuple(total.ravel().tolist()))


def tensor_digest(sums: Sums, dtype: DType, shape: Sequence[int]) -> str:
    """The digest of a global tensor, 32 hexadecimal digits, from the sums over all its elements."""
    if len(sums.words) != parts(dtype) * LANES:
        raise ValueError(f"a digest of {dtype} takes {parts(dtype) * LANES} sums, not {len(sums.words)}")
    text = f"{dtype} {_shape_text(shape)} {sums}"
    return blake2b(text.encode(), digest_size=16, person=b"shardctl1 tensor").hexdigest()


def checkpoint_digest(rows: Iterable[tuple[str, DType, Sequence[int], str]]) -> str:
    """The digest of a checkpoint from its tensors' (name, dtype, shape, tensor digest), in any order.

    Raises:
        ValueError: two tensors have one name.
    """
    entries: dict[bytes, str] = {}
    for name, dtype, shape, digest in rows:
        encoded = name.encode("utf-8", "surrogatepass")
        if encoded in entries:
            raise ValueError(f"two tensors are named {name!r}")
        entries[encoded] = f"{digest} {dtype} {_shape_text(shape)} {len(encoded)}:"
    state = blake2b(digest_size=16, person=b"shardctl1 ckpt")
    for encoded in sorted(entries):
        state.update(entries[encoded].encode() + encoded + b"\n")
    return f"shardctl1:{state.hexdigest()}"


def _shape_text(shape: Sequence[int]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"


# --- keys: see "Keys" in docs/design/digest.md


def _words(label: str, count: int) -> NDArray[np.uint64]:
    """The first `count` 64-bit words of the key stream of `label`."""
    stream = shake_128(f"shardctl1 {label}".encode()).digest(8 * count)
    words: NDArray[np.uint64] = np.frombuffer(stream, "<u8").astype(np.uint64)
    return words


def _distinct(words: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
    """The first tile's worth of `words` whose low `bits` are neither zero nor those of a word before."""
    low = words & np.uint64(2**bits - 1)
    _, first = np.unique(low, return_index=True)
    first.sort()
    return words.take(first[low[first] != 0][:_TILE])


@cache
def _column_keys() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The column keys ``[lanes, 65536]``, and the sums ``[lanes, 65537]`` of the keys before each column."""
    drawn = (_distinct(_words(f"column {lane}", _TILE * 9 // 8), _COLUMN_KEY_BITS) for lane in range(LANES))
    keys = np.stack(list(drawn)) & np.uint64(2**_COLUMN_KEY_BITS - 1)
    before = np.zeros((LANES, _TILE + 1))
    np.cumsum(keys, axis=1, out=before[:, 1:])
    return keys.astype(np.float64), before


@cache
def _row_keys() -> NDArray[np.uint64]:
    """The row keys ``[lanes, 65536]``."""
    drawn = (_words(f"row {lane}", _TILE * 9 // 8) | np.uint64(1) for lane in range(LANES))
    return np.stack([_distinct(words, _ROW_KEY_DISTINCT_BITS) for words in drawn])


@lru_cache(maxsize=4096)
def _tile_keys(row_tile: int, column_tile: int) -> NDArray[np.uint64]:
    """The keys ``[lanes, 1]`` of a tile."""
    return _words(f"tile {row_tile} {column_tile}", LANES)[:, None] | np.uint64(1)


# --- sums


class _Rows:
    """Which flattened rows of the tensor the rows of a box are; they ascend."""

    def __init__(self, box: Box, shape: Sequence[int]) -> None:
        self._origin, self._extents, self._sizes = box.origin[:-1], box.shape[:-1], tuple(shape[:-1])
        first = span = 0
        for origin, extent, size in zip(self._origin, self._extents, self._sizes, strict=True):
            first = first * size + origin
            span = span * size + extent - 1
        self._first = first if span == prod(self._extents) - 1 else None
        """The first row if no row of the tensor lies between two of the box."""

    def keys(self, start: int, stop: int, column_tile: int) -> NDArray[np.uint64]:
        """Row key times tile key ``[lanes, stop - start]`` of the box's rows `start` to `stop`."""
        table = _row_keys()
        if self._first is not None:
            tile, within = divmod(self._first + start, _TILE)
            if within + stop - start <= _TILE:
                return table[:, within : within + stop - start] * _tile_keys(tile, column_tile)
        tiles, within_tiles = np.divmod(self._flat(start, stop), _TILE)
        keys: NDArray[np.uint64] = table[:, within_tiles]
        edges = [0, *(np.flatnonzero(np.diff(tiles)) + 1).tolist(), len(tiles)]
        for a, b in pairwise(edges):
            keys[:, a:b] *= _tile_keys(int(tiles[a]), column_tile)
        return keys

    def _flat(self, start: int, stop: int) -> NDArray[np.intp]:
        index = np.arange(start, stop)
        if self._first is not None:
            return self._first + index
        within = np.unravel_index(index, self._extents)
        return np.ravel_multi_index(tuple(o + i for o, i in zip(self._origin, within, strict=True)), self._sizes)


class _Scratch(threading.local):
    """Each thread's block of float64."""

    def __init__(self) -> None:
        self.block = np.empty(_BLOCK)


_scratch = _Scratch()


def _units(data: Buffer, dtype: DType, rows: int, width: int) -> NDArray[Any]:
    """`data` as little-endian words ``[rows, units, words of a unit]``: its 16-bit parts, or else its bytes."""
    octets = np.frombuffer(data, np.uint8)
    if (size := octets.size) != rows * width * dtype.unit_bytes:
        raise ValueError(f"{size} bytes given for {rows} x {width} units of {dtype}")
    return octets.view("<u2" if dtype.unit_bytes % 2 == 0 else "u1").reshape(rows, width, -1)


def _strips(start: int, stop: int, rows: int) -> Iterator[tuple[int, int]]:
    """Columns `start` to `stop` in strips that a BLAS call can take and that no tile's edge crosses."""
    width = max(_STRIP, _CALL // rows & -8)  # a multiple of every unit
    while start < stop:
        end = min(stop, start + width, start - start % _TILE + _TILE)
        yield start, end
        start = end


def _strip_sums(units: NDArray[Any], dtype: DType, rows: _Rows, column: int) -> NDArray[np.uint64]:
    """The sums ``[parts, lanes]`` over a strip ``[rows, units, words]`` of a box that starts at `column`."""
    n_parts = parts(dtype)
    width = units.shape[1] * dtype.unit_elements
    keys, before = _column_keys()
    a = column % _TILE
    b = a + width
    columns = keys[:, a:b]
    ones = (before[:, b] - before[:, a])[:, None, None]  # of each element's bits plus one, the one
    step = max(1, _BLOCK // (n_parts * width))
    group = max(step, _GROUP // n_parts)
    total = np.zeros((n_parts, LANES), np.uint64)
    for start in range(0, len(units), group):
        stop = min(start + group, len(units))
        dots = np.empty((LANES, n_parts, stop - start))
        for first in range(start, stop, step):
            last = min(first + step, stop)
            block = _scratch.block[: n_parts * (last - first) * width].reshape(n_parts, last - first, width)
            words = units[first:last] if dtype.unit_elements == 1 else _codes(units[first:last], dtype)
            np.copyto(block, words.transpose(2, 0, 1))
            _dot(block, columns, dots[:, :, first - start : last - start])
        dots += ones
        exact = dots.astype(np.int64).view(np.uint64)
        total += np.einsum("lpr,lr->pl", exact, rows.keys(start, stop, column // _TILE))
    return total


def _codes(units: NDArray[np.uint8], dtype: DType) -> NDArray[Any]:
    """The codes ``[rows, elements, 1]`` in units ``[rows, units, bytes]`` of a type narrower than a byte."""
    packed = units[:, :, 0].astype(np.uint32)
    for i in range(1, dtype.unit_bytes):
        packed |= units[:, :, i].astype(np.uint32) << np.uint32(8 * i)
    shifts = np.arange(0, dtype.bits * dtype.unit_elements, dtype.bits, dtype=np.uint32)
    return ((packed[:, :, None] >> shifts) & np.uint32(2**dtype.bits - 1)).reshape(len(units), -1, 1)


def _dot(block: NDArray[np.float64], columns: NDArray[np.float64], out: NDArray[np.float64]) -> None:
    """The inner product ``[lanes, parts, rows]`` of each row of a block ``[parts, rows, width]`` with each lane's keys.

    One NumPy call, which makes many BLAS calls of at most `_CALL` elements.
    """
    n_parts, rows, width = block.shape
    if width == 1:  # where BLAS is ten times slower
        np.multiply(block[:, :, 0], columns[:, :, None], out=out)
        return
    each = min(rows, max(1, _CALL // width))
    even = rows - rows % each
    for a, b, size in ((0, even, each), (even, rows, rows - even)):
        if a < b:
            np.matmul(
                block[:, a:b].reshape(n_parts, -1, size, width),
                columns[:, None, None, :, None],
                out=out[:, :, a:b].reshape(LANES, n_parts, -1, size, 1),
            )
