"""Reads optimizer states whose boxes are runs of a flattened part, as Megatron-LM core until 0.15 saved them.

A tensor of shape ``[X, Y]`` cut into parts of ``[x, y]`` was saved as ``[X / x, Y / y, x * y]``, the last dim divided
over the ranks of data parallelism (`strategies/torch.py`, `sharded_tensor_to_torch_sharded_tensor`).
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Chunk, Region, locate_dense_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.tensors.manifest import Tensor


def unflatten_tensor(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor that was saved so, in the `shape` that it has.

    Raises SourceError if the shape does not fit, UnsupportedError for runs that are not stored one element after
    another.
    """
    *grid, length = tensor.shape or (0,)
    fits = len(grid) == len(shape) and all(n > 0 and extent % n == 0 for n, extent in zip(grid, shape, strict=True))
    local = tuple(extent // n for n, extent in zip(grid, shape, strict=True)) if fits else ()
    if not fits or prod(local) != length:
        raise SourceError(
            f"{tensor.name} {list(tensor.shape)} is said to be {list(shape)}, flattened, which does not fit"
        )
    chunks = tuple(part for chunk in tensor.chunks for part in _unflatten_chunk(chunk, local))
    return replace(tensor, shape=shape, chunks=chunks)


def _unflatten_chunk(chunk: Chunk, local: tuple[int, ...]) -> Iterator[Chunk]:
    *_, start = chunk.box.origin
    *ones, length = chunk.box.shape
    if not isinstance(chunk.where, Region) or set(ones) - {1}:
        raise UnsupportedError(f"{chunk.name}: {chunk.box} is a box of several flattened parts")
    if chunk.where.strides[-1] != chunk.dtype.unit_bytes:
        raise UnsupportedError(f"{chunk.name}: {chunk.box} is not stored one element after another")
    at = tuple(n * extent for n, extent in zip(chunk.box.origin[:-1], local, strict=True))
    strides, places = locate_dense_run(chunk.dtype, local, start, start + length)
    for box, shift in places:
        where = Region(chunk.where.file, chunk.where.offset + shift, strides)
        moved = Box(tuple(a + b for a, b in zip(at, box.origin, strict=True)), box.shape)
        yield replace(chunk, box=moved, where=where)
