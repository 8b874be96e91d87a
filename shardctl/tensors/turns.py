"""Sees the last dim of a tensor as two where the parts of an array take turns along it, as gpt-oss's gate and up do.

Every second column is no box of a tensor ``[rows, columns]``, but it is one of ``[rows, columns / 2, 2]``, which is the
same elements in the same order. A chunk whose `turns` are 2 has a box of that shape. Whoever copies or compares unfolds
the tensors first, so that all chunks are of one shape; names, digests and records have the tensor's own.

>>> fold_box(Box((0, 1, 0), (4, 2, 2)), 2)
Box(origin=(0, 2), shape=(4, 4))
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Region

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.base.dtype import DType
    from shardctl.tensors.digest import Buffer, DigestSums
    from shardctl.tensors.manifest import Chunk, Tensor


def count_turns(shape: tuple[int, ...], part: Box) -> int:
    """Count the parts that take turns along the last dim of a tensor, of which `part`, of a dim more, is all of one.

    >>> count_turns((2, 8), Box((0, 0, 1), (2, 4, 1))), count_turns((2, 8), Box.whole((2, 8)))
    (2, 1)
    """
    return shape[-1] // part.shape[-2] if len(part.shape) > len(shape) else 1


def unfold_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Unfold tensors of one shape alike, if any of their chunks is of a shape with turns; else return them as they are.

    Raises UnsupportedError for chunks of different turns, and for types narrower than a byte.
    """
    turns = {chunk.turns for tensor in tensors for chunk in tensor.chunks} - {1}
    if not turns:
        return tensors
    if len(turns) > 1:
        raise UnsupportedError(f"{tensors[0].name} is stored in parts that take turns in several ways")
    return tuple(_unfold_tensor(tensor, *turns) for tensor in tensors)


def fold_box(box: Box, turns: int) -> Box:
    """Return the box of the tensor's own shape that is an unfolded one, or the smallest that holds it."""
    if turns == 1:
        return box
    *origin, last, _ = box.origin
    *shape, extent, _ = box.shape
    return Box((*origin, last * turns), (*shape, extent * turns))


def unfold_box(box: Box, turns: int) -> Box:
    """Return the unfolded box that is one of the tensor's own shape; its last dim has whole turns."""
    if turns == 1:
        return box
    *origin, last = box.origin
    *shape, extent = box.shape
    if last % turns or extent % turns:
        raise ValueError(f"{box} has no whole turns of {turns}")
    return Box((*origin, last // turns, 0), (*shape, extent // turns, turns))


def fold_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return a tensor's own shape, whether it is unfolded or not."""
    return fold_box(Box.whole(tensor.shape), tensor.turns).shape


def compute_band_sums(data: Buffer, dtype: DType, box: Box, tensor: Tensor) -> DigestSums:
    """Compute the digest's sums over a band of a tensor; an unfolded one has whole turns."""
    from shardctl.tensors.digest import compute_box_sums

    return compute_box_sums(data, dtype, fold_box(box, tensor.turns), fold_shape(tensor))


def _unfold_tensor(tensor: Tensor, turns: int) -> Tensor:
    if not tensor.shape or tensor.shape[-1] % turns:
        raise SourceError(f"{tensor.name} {list(tensor.shape)} has no {turns} parts that take turns in its last dim")
    chunks = (part for chunk in tensor.chunks for part in _unfold_chunk(chunk, turns))
    shape = unfold_box(Box.whole(tensor.shape), turns).shape
    return replace(tensor, shape=shape, chunks=tuple(chunks), turns=turns)


def _unfold_chunk(chunk: Chunk, turns: int) -> Iterator[Chunk]:
    """Yield a chunk in unfolded boxes: one, and one more at each end that is not that of a turn."""
    if chunk.turns == turns:
        yield replace(chunk, turns=1)
        return
    if chunk.dtype.unit_elements > 1:
        raise UnsupportedError(f"{chunk.name} is {chunk.dtype}, whose bytes hold elements of several parts")
    *origin, start = chunk.box.origin
    *shape, extent = chunk.box.shape
    stop = start + extent
    first, last = min(-(-start // turns) * turns, stop), max(stop // turns * turns, start)
    edges = [(start, first), (first, last), (last, stop)] if first <= last else [(start, stop)]
    for begin, end in edges:
        if begin >= end:
            continue
        whole = begin % turns == 0 and end % turns == 0
        parts = ((end - begin) // turns, turns) if whole else (1, end - begin)
        box = Box((*origin, begin // turns, begin % turns), (*shape, *parts))
        where = chunk.where
        if isinstance(where, Region):
            *before, step = where.strides
            offset = where.offset + (begin - start) * step
            where = replace(where, offset=offset, strides=(*before, step * turns, step))
        yield replace(chunk, box=box, where=where)
