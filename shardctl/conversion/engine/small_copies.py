"""Moves runs of small tensors: one read, one product for those that are alike, and one write for what lies together."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from shardctl.tensors.bands import PAGE, build_unit_slices, get_unit_type
from shardctl.tensors.digest import DigestSums, compute_stacked_sums
from shardctl.tensors.manifest import ConstantFill, Region, compute_dense_strides
from shardctl.tensors.small_tensors import locate_small_tensor, stack_alike

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from shardctl.base.dtype import DType
    from shardctl.tensors.bands import ByteReader, ByteWriter
    from shardctl.tensors.copyplan import TensorCopy
    from shardctl.tensors.small_tensors import TensorRun

_Piece = tuple[str, int, int, int, Any]
"""A file, offset and bytes; where in the run's bytes they lie, or -1 and the part of an array that holds them."""


def locate_small_copy(copy: TensorCopy) -> Region | None:
    """Return where a small tensor is read from, if it is written as it is, in dense boxes; None for others."""
    source, target = copy.source, copy.target
    if (
        source.turns > 1
        or source.dtype is not target.dtype
        or copy.source.encoded_bytes is not None
        or len(copy.reads) != 1
    ):
        return None
    for chunk in target.chunks:
        where = chunk.where
        if chunk.affine or chunk.aside or chunk.dtype is not source.dtype:
            return None
        if not isinstance(where, ConstantFill) and where.strides != compute_dense_strides(chunk.dtype, chunk.box.shape):
            return None
    return locate_small_tensor(source, copy.reads)


def move_run(
    run: TensorRun,
    copies: Sequence[TensorCopy],
    reader: ByteReader,
    writer: ByteWriter,
    *,
    data: NDArray[np.uint8],
    scratch: NDArray[np.uint8],
    turn: float,
) -> tuple[list[DigestSums], Counter[str]]:
    """Read the tensors of a run and write them everywhere; returns the sums of each, and the bytes of each file.

    `data` has room for the run, `scratch` for as much and a page; `turn` says which share of the files comes last.
    """
    regions = [where for copy in copies if isinstance(where := copy.reads[0].where, Region)]
    data = data[: run.size]
    reader.read_at(regions[0].file, run.offset, data.data)
    begins = [where.offset - run.offset for where in regions]
    sums: list[DigestSums] = [DigestSums(())] * len(copies)
    for places, dtype, shape, rows in stack_alike(data, [(at, c.source) for at, c in zip(begins, copies, strict=True)]):
        for place, words in zip(places, compute_stacked_sums(rows, dtype, shape).tolist(), strict=True):
            sums[place] = DigestSums(tuple(words))
    pieces = sorted(_list_pieces(copies, begins, data), key=lambda piece: piece[:2])
    written: Counter[str] = Counter()
    chains = list(_join_pieces(pieces, len(data)))
    first = int(turn * len(chains))
    for chain in chains[first:] + chains[:first]:
        path, offset = chain[0][:2]
        found = _gather_pieces(chain, data, scratch[offset % PAGE :])
        writer.write_at(path, offset, found.data)
        written[path] += len(found)
    return sums, written


def _list_pieces(copies: Sequence[TensorCopy], begins: Sequence[int], data: NDArray[np.uint8]) -> Iterator[_Piece]:
    cuts: dict[tuple[DType, tuple[int, ...], int], tuple[Any, ...]] = {}  # by box
    for copy, begin in zip(copies, begins, strict=True):
        dtype, shape = copy.source.dtype, copy.source.shape
        for chunk in copy.target.chunks:
            where, box = chunk.where, chunk.box
            if isinstance(where, ConstantFill):
                continue
            nbytes = dtype.nbytes(box.shape)
            if box.shape == shape:
                yield where.file, where.offset, nbytes, begin, None
            elif nbytes:
                cut = cuts.get((dtype, shape, id(box)))
                if cut is None:
                    cut = get_unit_type(dtype), dtype.unit_shape(shape), build_unit_slices(box, dtype)
                    cuts[dtype, shape, id(box)] = cut
                band = data[begin : begin + copy.source.nbytes].view(cut[0]).reshape(cut[1])
                yield where.file, where.offset, nbytes, -1, band[cut[2]]


def _join_pieces(pieces: Sequence[_Piece], most: int) -> Iterator[Sequence[_Piece]]:
    """Split pieces, in order, into chains of at most `most` bytes that lie together in a file."""
    if not pieces:
        return
    ends, size = [0], 0
    for number, (before, piece) in enumerate(pairwise(pieces), 1):
        size += before[2]
        if piece[:2] != (before[0], before[1] + before[2]) or size + piece[2] > most:
            ends.append(number)
            size = 0
    for start, stop in pairwise([*ends, len(pieces)]):
        yield pieces[start:stop]


def _gather_pieces(chain: Sequence[_Piece], data: NDArray[np.uint8], into: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the bytes of a chain one after another: those of the run, if they lie so there, or else a copy."""
    begin = chain[0][3]
    if begin >= 0 and all(b[3] == a[3] + a[2] for a, b in pairwise(chain)):
        return data[begin : begin + sum(piece[2] for piece in chain)]
    done = 0
    for _, _, nbytes, at, part in chain:
        flat = into[done : done + nbytes]
        if at >= 0:
            flat[:] = data[at : at + nbytes]
        else:
            flat.view(part.dtype).reshape(part.shape)[...] = part
        done += nbytes
    return into[:done]
