"""Finds small tensors that lie next to each other in a file, which are read by one call and digested by few.

To read and digest a tensor by itself costs about as much time as 100 KB of its bytes.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Final

import numpy as np

from shardctl.base.value import value_class
from shardctl.tensors.manifest import ConstantFill, compute_dense_strides

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardctl.base.dtype import DType
    from shardctl.tensors.manifest import Chunk, Region, Tensor

_MAX_SMALL_TENSOR_SIZE: Final = 1 << 16
"""Elements and bytes of a small tensor: all of it is in the first tile of the digest."""
_MAX_RUN_BYTES: Final = 1 << 20
"""Bytes of a run: it stays in the core's cache, and there is another one for each thread."""
_MAX_GAP_BYTES: Final = 4 << 10
"""Bytes between two neighbours that are read along, such as the header of a record of an archive."""


@value_class
class TensorRun:
    """Tensors that follow one another in a list and in a file."""

    numbers: range
    """Their places in the list."""
    offset: int
    """Where the first of them begins in the file."""
    size: int
    """Bytes from there to the end of the last; 0 for a tensor that is alone."""
    payload: int
    """Bytes of these that are elements."""


def locate_small_tensor(tensor: Tensor, chunks: Sequence[Chunk]) -> Region | None:
    """Return where a small tensor is whole and as it is wanted, if the first of `chunks` is that; None for others."""
    if not chunks:
        return None
    chunk, dtype, shape = chunks[0], tensor.dtype, tensor.shape
    where = chunk.where
    if chunk.affine or chunk.dtype is not dtype or isinstance(where, ConstantFill) or chunk.box.shape != shape:
        return None
    return where if where.strides == _compute_small_strides(dtype, shape) else None


@lru_cache(maxsize=4096)  # a model has few shapes
def _compute_small_strides(dtype: DType, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Compute the byte strides of a tensor if it is small; None for others."""
    size = prod(shape)
    small = 0 < size <= _MAX_SMALL_TENSOR_SIZE and size * dtype.bits <= 8 * _MAX_SMALL_TENSOR_SIZE
    return compute_dense_strides(dtype, shape) if small else None


def split_runs(places: Iterable[tuple[Region | None, int]], block: int) -> Iterator[TensorRun]:
    """Split a list into runs of at most `block` bytes; `places` are the region and the bytes of each small tensor.

    A tensor without a region is alone.
    """
    most = min(block, _MAX_RUN_BYTES)
    first = count = start = stop = payload = 0
    file = None
    for region, nbytes in places:
        where = region if nbytes <= most else None
        if (
            where is None
            or where.file != file
            or not 0 <= where.offset - stop <= _MAX_GAP_BYTES
            or where.offset + nbytes - start > most
        ):
            if count > first:
                yield TensorRun(range(first, count), start, stop - start, payload)
            first, payload = count, 0
            file, start = (where.file, where.offset) if where is not None else (None, 0)
            stop = start
        count += 1
        if where is not None:
            stop = where.offset + nbytes
            payload += nbytes
    if count > first:
        yield TensorRun(range(first, count), start, stop - start, payload)


def stack_alike(
    data: NDArray[np.uint8], tensors: Sequence[tuple[int, Tensor]]
) -> Iterator[tuple[list[int], DType, tuple[int, ...], NDArray[np.uint8]]]:
    """Stack the bytes of tensors that have one type and shape: their places, the two, and rows ``[tensors, bytes]``.

    `tensors` come with the byte of `data` at which each begins.
    """
    alike: dict[tuple[DType, tuple[int, ...]], list[int]] = defaultdict(list)
    for place, (_, tensor) in enumerate(tensors):
        alike[tensor.dtype, tensor.shape].append(place)
    for (dtype, shape), places in alike.items():
        nbytes = dtype.nbytes(shape)
        windows = np.lib.stride_tricks.sliding_window_view(data, nbytes)
        yield places, dtype, shape, windows[[tensors[place][0] for place in places]]
