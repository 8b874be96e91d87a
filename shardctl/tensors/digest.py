"""Computes the digest, which is the same for every layout: position-keyed sums over a tensor's elements.

The definition, its guarantees with their proofs, and test vectors are in ``docs/design/digest.md``; a reader of that
page alone must be able to compute the same numbers. This module is the fast way to do it: a block of elements becomes
float64 in a thread's scratch, BLAS takes the inner product of each row with the column keys (exact, since it stays
below 2^53), and integers modulo 2^64 do the rest.

    >>> from shardctl.tensors.box import Box
    >>> from shardctl.base.dtype import BY_NAME
    >>> sums = compute_box_sums(bytes(16), BY_NAME["F32"], Box((0,), (4,)), (4,))
    >>> len(compute_tensor_digest(sums, BY_NAME["F32"], (4,)))
    32
"""

from __future__ import annotations

import re
import threading
from functools import cache, lru_cache
from hashlib import blake2b, shake_128
from itertools import pairwise
from math import prod
from operator import gt, itemgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardctl.base.huge_pages import allocate_pages
from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from shardctl.base.dtype import DType
    from shardctl.tensors.box import Box

Buffer: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]
"""Bytes without gaps; an array must be C-contiguous."""

Keys = TypeVar("Keys")

LANES: Final = 2
"""Independent sums per part: two accidents in 2^40 are not the same accident."""
_TENSOR_HASH: Final = blake2b(digest_size=16, person=b"shardctl1 tensor")
"""To be copied, which takes half of the time of making one."""

_TILE_SIDE_ELEMENTS: Final = 1 << 16
"""Rows and columns per tile: 2^16 elements below 2^16 with keys below 2^20 still sum exactly in a float64."""
_COLUMN_KEY_BITS: Final = 20
_ROW_KEY_DISTINCT_BITS: Final = 29
"""Row keys differ in these low bits, so that two elements swapped within a column of a tile cannot cancel."""

_PLACE_BITS: Final = 17
"""Enough for the place of each word that keys are selected from."""

_BLOCK_ELEMENTS: Final = 1 << 18
"""Elements converted at a time: 2 MiB of float64, near the cores' caches and enough to outweigh Python's calls."""
_COLUMNS_PER_CALL: Final = 1 << 8
"""Columns per BLAS call: NumPy keeps the GIL through a matmul of up to 500 results, and a block has four times that."""
_NARROW_UNITS_PER_CALL: Final = 1 << 7
"""Units per BLAS call of elements of at most 8 bits, which are multiplied as float32: see `_multiply_codes`."""
_MIN_NARROW_EXTENT: Final = 16
"""Rows, and units of a row, from which on this is faster."""
_MAX_ELEMENTS_PER_CALL: Final = 1 << 13
"""Elements per BLAS call: from 9,216 up some versions of OpenBLAS start threads, which would fight the caller's."""
_MIN_ROWS_PER_BLOCK: Final = 16
"""Rows in a block where there are so many: BLAS calls of few rows cost more."""
_MAX_SMALL_TENSOR_ELEMENTS: Final = 1 << 12
"""Elements up to which a whole tensor is multiplied with integer keys at once: calls would cost more than the work."""
_MAX_PENDING_ROW_SUMS: Final = 1 << 15
"""Row sums of one lane kept at a time before the row keys are applied."""

_BITS_PER_BYTE: Final = 8
_SIGNED_BYTE_BIAS: Final = 128
_HALF_BITS: Final = _COLUMN_KEY_BITS // 2


@value_class
class DigestSums:
    """The sums over some of a tensor's elements, modulo 2^64: part by part, each with its lanes.

    Sums over disjoint boxes add up, in any order.

    >>> DigestSums((1, 2)) + DigestSums((3, 2**64 - 1))
    DigestSums(words=(4, 1))
    >>> DigestSums.parse(str(DigestSums((10, 255))))
    DigestSums(words=(10, 255))
    """

    words: tuple[int, ...]
    """``words[part * LANES + lane]``, each below 2^64."""

    @classmethod
    def zero(cls, dtype: DType) -> DigestSums:
        """Return the sums over no element of `dtype`."""
        return cls((0,) * (count_element_parts(dtype) * LANES))

    @classmethod
    def parse(cls, text: str) -> DigestSums:
        """Return the sums that `str` wrote, as 16 hexadecimal digits a word."""
        if not re.fullmatch("(?:[0-9a-f]{16})+", text):
            raise ValueError(f"digest sums are groups of 16 hexadecimal digits, not {text!r}")
        return cls(tuple(int(text[i : i + 16], 16) for i in range(0, len(text), 16)))

    def __add__(self, other: DigestSums) -> DigestSums:
        if len(self.words) != len(other.words):
            raise ValueError(f"digest sums of {len(self.words)} and {len(other.words)} words do not add")
        return DigestSums(tuple((a + b) % 2**64 for a, b in zip(self.words, other.words, strict=True)))

    def __str__(self) -> str:
        return "".join(f"{word:016x}" for word in self.words)


def count_element_parts(dtype: DType) -> int:
    """Count how many 16-bit parts an element of `dtype` is split into, each with sums of its own.

    1 if it is narrower.
    """
    return max(1, dtype.bits // 16)


def compute_box_sums(data: Buffer, dtype: DType, box: Box, shape: Sequence[int]) -> DigestSums:
    """Compute the sums over the elements of `box` of a global tensor of `shape`; `data` are the box's row-major bytes.

    Holds the GIL only between blocks, and may run in many threads at once; each keeps 2.5 MiB of scratch and
    allocates at most 3 MiB while it runs.

    Raises:
        ValueError: the box is not inside the tensor, or `data` has not the bytes of the box.
        UnsupportedError: the box cuts a byte that holds several elements.
    """
    if len(box.shape) != len(shape) or any(map(gt, box.stop, shape)):
        raise ValueError(f"box {box} is not inside a tensor of shape {tuple(shape)}")
    size = box.size
    if not size:
        return DigestSums.zero(dtype)
    if (
        size <= _MAX_SMALL_TENSOR_ELEMENTS
        and box.shape == tuple(shape)
        and dtype.bits >= _BITS_PER_BYTE
        and dtype.unit_elements == 1
    ):
        return _compute_small_sums(data, dtype, box.shape)
    *leading, width = dtype.unit_shape(box.shape) or (1,)
    *_, column = dtype.unit_shape(box.origin) or (0,)
    units = _split_units(data, dtype, prod(leading), width)
    rows = _RowKeys(box, shape)
    n_parts, each = count_element_parts(dtype), dtype.unit_elements
    total = np.zeros((n_parts, LANES), np.uint64)
    widest = _BLOCK_ELEMENTS // (n_parts * min(len(units), _MIN_ROWS_PER_BLOCK))
    stretch = _COLUMNS_PER_CALL // n_parts if dtype.bits > _BITS_PER_BYTE else _NARROW_UNITS_PER_CALL * each
    for start, stop in _split_strips(column * each, (column + width) * each, widest, stretch):
        strip = units[:, start // each - column : stop // each - column]
        _add_strip(total, strip, dtype.bits, rows, range(start, stop), stretch)
    return DigestSums(tuple(total.ravel().tolist()))


def _compute_small_sums(data: Buffer, dtype: DType, shape: tuple[int, ...]) -> DigestSums:
    """Compute the sums over a whole tensor of few elements, all of which are in the first tile."""
    *leading, width = shape or (1,)
    keys, sums = _multiply_small_keys(prod(leading), width)
    words = _split_units(data, dtype, keys.shape[1], 1)[:, 0].astype(np.uint64)
    return DigestSums(tuple((words.T @ keys.T + sums).ravel().tolist()))


def compute_stacked_sums(data: NDArray[np.uint8], dtype: DType, shape: Sequence[int]) -> NDArray[np.uint64]:
    """Compute the words ``[tensors, parts * lanes]`` of the sums over many whole tensors, one in each row of `data`.

    They must be in one tile: at most 65,536 rows and columns.

    Raises:
        ValueError: the rows of `data` have not the bytes of a tensor, or it is too large.
    """
    *leading, width = dtype.unit_shape(shape) or (1,)
    rows, each, n_parts = prod(leading), dtype.unit_elements, count_element_parts(dtype)
    if not rows * width or max(rows, width * each) > _TILE_SIDE_ELEMENTS:
        raise ValueError(f"a tensor of shape {tuple(shape)} is empty or not in one tile")
    units = _split_units(data, dtype, len(data) * rows, width)
    keys = _draw_row_keys()[:, :rows] * _draw_tile_keys(0, 0)
    total = np.zeros((len(data), n_parts, LANES), np.uint64)
    widest = _BLOCK_ELEMENTS // (n_parts * min(len(units), _MIN_ROWS_PER_BLOCK))
    stretch = _COLUMNS_PER_CALL // n_parts if dtype.bits > _BITS_PER_BYTE else _NARROW_UNITS_PER_CALL * each
    for start, stop in _split_strips(0, width * each, widest, stretch):
        strip, columns = units[:, start // each : stop // each], range(start, stop)
        for a, b in _split_groups(len(data), n_parts * rows, len(columns), stretch):
            dots = _multiply_rows(strip[a * rows : b * rows], dtype.bits, n_parts, columns, stretch)
            total[a:b] += np.einsum("lpstr,lr->tpl", dots.reshape(*dots.shape[:3], b - a, rows), keys)
    return total.reshape(len(data), -1)


def compute_tensor_digest(sums: DigestSums, dtype: DType, shape: Sequence[int]) -> str:
    """Compute the digest of a global tensor, 32 hexadecimal digits, from the sums over all its elements."""
    if len(sums.words) != count_element_parts(dtype) * LANES:
        raise ValueError(f"a digest of {dtype} takes {count_element_parts(dtype) * LANES} sums, not {len(sums.words)}")
    return hash_tensor_sums(str(sums), dtype, shape)


def hash_tensor_sums(text: str, dtype: DType, shape: Sequence[int]) -> str:
    """Hash the sums over all elements of a tensor, as `DigestSums` writes them, to its digest."""
    state = _TENSOR_HASH.copy()
    state.update(f"{dtype.name} {_format_shape(tuple(shape))} {text}".encode())
    return state.hexdigest()


def compute_checkpoint_digest(rows: Iterable[tuple[str, DType, Sequence[int], str]]) -> str:
    """Compute the digest of a checkpoint from its tensors' (name, dtype, shape, tensor digest), in any order.

    Raises:
        ValueError: two tensors have one name.
    """
    state, before = blake2b(digest_size=16, person=b"shardctl1 ckpt"), None
    for name, dtype, shape, digest in sorted(rows, key=itemgetter(0)):  # as their bytes in UTF-8 sort
        if name == before:
            raise ValueError(f"two tensors are named {name!r}")
        encoded, before = name.encode("utf-8", "surrogatepass"), name
        state.update(f"{digest} {dtype.name} {_format_shape(tuple(shape))} {len(encoded)}:".encode() + encoded + b"\n")
    return f"shardctl1:{state.hexdigest()}"


@lru_cache(maxsize=4096)  # a model has few shapes
def _format_shape(shape: tuple[int, ...]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"


def _draw_key_words(label: str, count: int) -> NDArray[np.uint64]:
    """Draw the first `count` 64-bit words of the key stream of `label` (docs/design/digest.md, "Keys")."""
    stream = shake_128(f"shardctl1 {label}".encode()).digest(8 * count)
    words: NDArray[np.uint64] = np.frombuffer(stream, "<u8").astype(np.uint64)
    return words


def _select_distinct_words(words: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
    """Select the first tile's worth of `words` whose low `bits` are neither zero nor those of a word before."""
    low = words & np.uint64(2**bits - 1)
    order = np.sort(low << np.uint64(_PLACE_BITS) | np.arange(len(words), dtype=np.uint64))  # sorts faster than pairs
    values, places = order >> np.uint64(_PLACE_BITS), order & np.uint64(2**_PLACE_BITS - 1)
    first = np.sort(places[(values != 0) & np.append(True, values[1:] != values[:-1])])
    kept: NDArray[np.uint64] = words[first[:_TILE_SIDE_ELEMENTS]]
    return kept


def _draw_once(draw: Callable[[], Keys]) -> Callable[[], Keys]:
    """Keep what a function returns; of threads that ask at the same time one computes it, and the others wait."""
    turn, kept = threading.Lock(), list[Keys]()

    def get_drawn() -> Keys:
        with turn:
            if not kept:
                kept.append(draw())
            return kept[0]

    return get_drawn


@_draw_once
def _draw_column_keys() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Draw the column keys ``[lanes, 65536]``, and the sums ``[lanes, 65537]`` of the keys before each column."""
    drawn = (
        _select_distinct_words(_draw_key_words(f"column {lane}", _TILE_SIDE_ELEMENTS * 9 // 8), _COLUMN_KEY_BITS)
        for lane in range(LANES)
    )
    keys = np.stack(list(drawn)) & np.uint64(2**_COLUMN_KEY_BITS - 1)
    before = np.zeros((LANES, _TILE_SIDE_ELEMENTS + 1))
    np.cumsum(keys, axis=1, out=before[:, 1:])
    return keys.astype(np.float64), before


@lru_cache(maxsize=8)  # 4 MiB at most, which is all columns of a tile for elements of 32 bits
def _spread_column_keys(n_parts: int, start: int, stop: int) -> NDArray[np.float64]:
    """Spread the keys of columns ``[lanes * parts, columns * parts]``: a part's key at its own words, zero elsewhere.

    So the words of elements are multiplied as they lie, each part with a row of keys.
    """
    keys = _draw_column_keys()[0][:, start:stop]
    spread = np.zeros((LANES, n_parts, stop - start, n_parts))
    for part in range(n_parts):
        spread[:, part, :, part] = keys
    return spread.reshape(LANES * n_parts, -1)


@_draw_once
def _draw_half_keys() -> NDArray[np.float32]:
    """Draw the column keys as ``[2 * lanes, 65536]``: the low 10 bits of each lane's, then the high 10 bits."""
    keys = _draw_column_keys()[0].astype(np.uint32)
    return np.concatenate([keys & (2**_HALF_BITS - 1), keys >> _HALF_BITS]).astype(np.float32)


@_draw_once
def _draw_row_keys() -> NDArray[np.uint64]:
    """Draw the row keys ``[lanes, 65536]``."""
    drawn = (_draw_key_words(f"row {lane}", _TILE_SIDE_ELEMENTS * 9 // 8) | np.uint64(1) for lane in range(LANES))
    return np.stack([_select_distinct_words(words, _ROW_KEY_DISTINCT_BITS) for words in drawn])


@lru_cache(maxsize=4096)
def _draw_tile_keys(row_tile: int, column_tile: int) -> NDArray[np.uint64]:
    """Draw the keys ``[lanes, 1]`` of a tile."""
    return _draw_key_words(f"tile {row_tile} {column_tile}", LANES)[:, None] | np.uint64(1)


@lru_cache(maxsize=16)  # a MiB at most
def _multiply_small_keys(rows: int, width: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Multiply the keys of each element of a small tensor ``[lanes, elements]``, and sum them up ``[lanes]``."""
    columns = _draw_column_keys()[0][:, None, :width].astype(np.uint64)
    keys = ((_draw_row_keys()[:, :rows] * _draw_tile_keys(0, 0))[:, :, None] * columns).reshape(LANES, -1)
    return keys, keys.sum(1, dtype=np.uint64)


class _RowKeys:
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
        """Return row key times tile key ``[lanes, stop - start]`` of the box's rows `start` to `stop`."""
        table = _draw_row_keys()
        if self._first is not None:
            tile, within = divmod(self._first + start, _TILE_SIDE_ELEMENTS)
            if within + stop - start <= _TILE_SIDE_ELEMENTS:
                return table[:, within : within + stop - start] * _draw_tile_keys(tile, column_tile)
        tiles, within_tiles = np.divmod(self._flat(start, stop), _TILE_SIDE_ELEMENTS)
        keys: NDArray[np.uint64] = table[:, within_tiles]
        edges = [0, *(np.flatnonzero(np.diff(tiles)) + 1).tolist(), len(tiles)]
        for a, b in pairwise(edges):
            keys[:, a:b] *= _draw_tile_keys(int(tiles[a]), column_tile)
        return keys

    def _flat(self, start: int, stop: int) -> NDArray[np.intp]:
        index = np.arange(start, stop)
        if self._first is not None:
            return self._first + index
        within = np.unravel_index(index, self._extents)
        return np.ravel_multi_index(tuple(o + i for o, i in zip(self._origin, within, strict=True)), self._sizes)


class _ThreadScratch(threading.local):
    """Each thread's block of float64, the same memory as float32, and codes beside these."""

    def __init__(self) -> None:
        self.block = allocate_pages(_BLOCK_ELEMENTS * 8).view(np.float64)
        self.numbers = self.block.view(np.float32)
        self.codes = np.empty(2 * _BLOCK_ELEMENTS, np.uint8)


_scratch = _ThreadScratch()


def _split_units(data: Buffer, dtype: DType, rows: int, width: int) -> NDArray[Any]:
    """Return `data` as little-endian words ``[rows, units, words of a unit]``: its 16-bit parts, or else its bytes."""
    octets = np.frombuffer(data, np.uint8)
    if (size := octets.size) != rows * width * dtype.unit_bytes:
        raise ValueError(f"{size} bytes given for {rows} x {width} units of {dtype}")
    return octets.view("<u2" if dtype.unit_bytes % 2 == 0 else "u1").reshape(rows, width, -1)


def _split_strips(start: int, stop: int, most: int, stretch: int) -> Iterator[tuple[int, int]]:
    """Split columns `start` to `stop` into strips of one tile and at most `most` columns.

    A strip is many whole stretches, or part of one.
    """
    while start < stop:
        end = min(stop, start + most, start - start % _TILE_SIDE_ELEMENTS + _TILE_SIDE_ELEMENTS)
        if end - start > stretch:
            end -= (end - start) % stretch
        yield start, end
        start = end


def _add_strip(
    total: NDArray[np.uint64], units: NDArray[Any], bits: int, rows: _RowKeys, columns: range, stretch: int
) -> None:
    """Add to `total` ``[parts, lanes]`` the sums over a strip ``[rows, units, words]`` at `columns` of the tensor."""
    tile = columns.start // _TILE_SIDE_ELEMENTS
    for start, stop in _split_groups(len(units), len(total), len(columns), stretch):
        dots = _multiply_rows(units[start:stop], bits, len(total), columns, stretch)
        total += np.einsum("lpsr,lr->pl", dots, rows.keys(start, stop, tile))


def _split_groups(rows: int, n_parts: int, columns: int, stretch: int) -> Iterator[tuple[int, int]]:
    """Split rows, or what has some, into groups with so few sums that these are kept at a time."""
    group = max(1, _MAX_PENDING_ROW_SUMS // (n_parts * max(1, columns // stretch)))
    for start in range(0, rows, group):
        yield start, min(start + group, rows)


def _multiply_rows(units: NDArray[Any], bits: int, n_parts: int, columns: range, stretch: int) -> NDArray[np.uint64]:
    """Compute the products ``[lanes, parts, stretches, rows]`` of a strip of `columns` with their keys, as integers."""
    keys, before = _draw_column_keys()
    a = columns.start % _TILE_SIDE_ELEMENTS
    b = a + len(columns)
    narrow = bits <= _BITS_PER_BYTE and min(units.shape[:2]) >= _MIN_NARROW_EXTENT
    less = _SIGNED_BYTE_BIAS if narrow and bits == _BITS_PER_BYTE else 0
    ones = (before[:, b] - before[:, a])[:, None, None]  # of each element's bits plus one, the one
    dots = np.empty((LANES, n_parts, 1 if narrow else max(1, len(columns) // stretch), len(units)))
    if narrow:
        _multiply_codes(units, bits, _draw_half_keys()[:, a:b], dots[:, 0, 0])
    else:
        _multiply_keys(units, bits, keys[:, a:b] if n_parts == 1 else _spread_column_keys(n_parts, a, b), dots)
    dots[:, :, 0] += ones * (1 + less)
    return dots.astype(np.int64).view(np.uint64)


def _multiply_keys(units: NDArray[Any], bits: int, keys: NDArray[np.float64], out: NDArray[np.float64]) -> None:
    """Compute the inner products ``[lanes, parts, stretches, rows]`` of the words of `units` with the `keys` of each.

    Two calls of NumPy do a block of words. BLAS multiplies all lanes and parts at once, so that a block is read once.
    """
    lanes, n_parts, stretches, rows = out.shape
    width = keys.shape[1]
    vectors = keys.reshape(lanes * n_parts, stretches, -1).swapaxes(0, 1)
    product = np.multiply if width == 1 else np.matmul  # BLAS takes ten times as long to multiply by a number
    sums = out.reshape(lanes * n_parts, stretches, rows)
    for start, stop, step, call in _split_blocks(
        rows, _BLOCK_ELEMENTS // width, _MAX_ELEMENTS_PER_CALL * stretches // width
    ):
        block = _scratch.block[: step * width].reshape(step, width)
        matrices = block.reshape(-1, call, stretches, width // stretches).transpose(0, 2, 3, 1)
        blocks = units[start:stop].reshape(-1, step, *units.shape[1:])
        results = sums[..., start:stop].reshape(*sums.shape[:2], len(blocks), -1, call).transpose(2, 3, 1, 0, 4)
        for words, result in zip(blocks, results, strict=True):
            _widen_words(words, bits, block)
            product(vectors, matrices, out=result)


def _widen_words(units: NDArray[Any], bits: int, block: NDArray[np.float64]) -> None:
    """Write the words of `units` ``[rows, units, words]`` as numbers to `block` ``[rows, words of all units]``."""
    if bits < _BITS_PER_BYTE:
        codes = np.empty((*units.shape[:2], block.shape[1] // units.shape[1]), np.uint8)
        _unpack_codes(units, bits, codes.transpose(2, 0, 1))
        units = codes
    np.copyto(block, units.reshape(block.shape))


def _multiply_codes(units: NDArray[np.uint8], bits: int, keys: NDArray[np.float32], out: NDArray[np.float64]) -> None:
    """Compute the inner products ``[lanes, rows]`` of elements of at most 8 bits with the halves of the column `keys`.

    For these a float32 is enough, and twice as fast: bytes are taken less 128 and keys by halves of 10 bits, so that a
    sum over 2^7 products stays within 2^24. Of narrower elements a byte is the sum of its fields, each times a key.
    """
    rows, units_wide, n_bytes = units.shape
    octets, halves, width = units.reshape(rows, -1), len(keys), units_wide * n_bytes
    masks, elements, scales = _list_fields(bits, n_bytes)
    planes = len(masks)
    stretches = width // min(units_wide, _NARROW_UNITS_PER_CALL)
    of_bytes = keys.reshape(halves, units_wide, -1)[:, :, elements] * scales  # [halves, units, planes, bytes of a unit]
    vectors = of_bytes.transpose(2, 0, 1, 3).reshape(planes, halves, stretches, -1).swapaxes(1, 2)[:, None]
    wanted = np.tile(masks, units_wide if n_bytes > 1 else 1)[:, None]  # NumPy applies one mask faster than a row
    for start, stop, step, call in _split_blocks(
        rows, 2 * _BLOCK_ELEMENTS // (planes * width), _MAX_ELEMENTS_PER_CALL * stretches // width
    ):
        shape = planes, step, width
        numbers, codes = (scratch[: prod(shape)].reshape(shape) for scratch in (_scratch.numbers, _scratch.codes))
        matrices = numbers.reshape(planes, -1, call, stretches, width // stretches).transpose(0, 1, 3, 4, 2)
        results = out[:, start:stop].reshape(halves // 2, -1, step // call, call).transpose(1, 2, 0, 3)
        for words, result in zip(octets[start:stop].reshape(-1, step, width), results, strict=True):
            if bits == _BITS_PER_BYTE:
                np.bitwise_xor(words, np.uint8(_SIGNED_BYTE_BIAS), out=codes[0])  # signed, this is the byte less 128
            else:
                np.bitwise_and(words, wanted, out=codes)
            np.copyto(numbers, codes.view(np.int8) if bits == _BITS_PER_BYTE else codes)
            sums = np.matmul(vectors, matrices).sum((0, 2), np.float64)
            np.add(sums[:, : halves // 2], sums[:, halves // 2 :] * 2**_HALF_BITS, out=result)


@cache
def _list_fields(bits: int, n_bytes: int) -> tuple[NDArray[np.uint8], NDArray[np.intp], NDArray[np.float32]]:
    """List the stretches of bits of each byte of a unit that belong to one element: masks, elements, scales.

    Each is ``[fields, bytes]``. The bits of a field, times its scale, are what it adds to its element; a byte with
    fewer fields than another has empty ones.
    """
    fields: list[list[tuple[int, int, float]]] = [[] for _ in range(n_bytes)]
    for element in range(n_bytes * _BITS_PER_BYTE // bits):
        for byte, found in enumerate(fields):
            low, high = (
                min(max(bit - byte * _BITS_PER_BYTE, 0), _BITS_PER_BYTE)
                for bit in (bits * element, bits * (element + 1))
            )
            if low < high:
                found.append(((1 << high) - (1 << low), element, 2.0 ** (byte * _BITS_PER_BYTE - bits * element)))
    most = max(map(len, fields))
    table = [found + [(0, 0, 0.0)] * (most - len(found)) for found in fields]
    masks, elements, scales = np.array(table).transpose(2, 1, 0)
    return masks.astype(np.uint8), elements.astype(np.intp), scales.astype(np.float32)


def _split_blocks(rows: int, per_block: int, per_call: int) -> Iterator[tuple[int, int, int, int]]:
    """Split rows into runs of blocks ``(start, stop, rows of a block, rows of a call)``.

    First whole blocks, then what is left in whole calls, then the rest in one.
    """
    per_block, done = max(1, per_block), 0
    while done < rows:
        per_block = min(per_block, rows - done)
        per_call = max(1, min(per_call, per_block))
        per_block -= per_block % per_call
        stop = rows - (rows - done) % per_block
        yield done, stop, per_block, per_call
        done = stop


def _unpack_codes(units: NDArray[np.uint8], bits: int, codes: NDArray[np.uint8]) -> None:
    """Write codes of `bits` bits, low bits first, of `units` ``[rows, units, bytes]`` to ``[codes, rows, units]``."""
    for element in range(len(codes)):
        code = codes[element]
        byte, shift = divmod(bits * element, _BITS_PER_BYTE)
        np.right_shift(units[:, :, byte], np.uint8(shift), out=code)
        if shift + bits > _BITS_PER_BYTE:
            np.bitwise_or(code, units[:, :, byte + 1] << np.uint8(_BITS_PER_BYTE - shift), out=code)
        if shift + bits != _BITS_PER_BYTE:
            np.bitwise_and(code, np.uint8(2**bits - 1), out=code)
