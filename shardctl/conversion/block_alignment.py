"""Lays safetensors files out so that tensors begin where they do in a block of the source, to share its blocks."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from shardctl.libraries.files.file_names import SAFETENSORS
from shardctl.libraries.safetensors.header import HEADER_ALIGNMENT, pad_header
from shardctl.tensors.bands import PAGE, ChunkIndex, find_whole_region
from shardctl.tensors.copyplan import join_manifests
from shardctl.tensors.manifest import Region, narrow_chunk

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardctl.tensors.copyplan import CopyPlan, TensorCopy
    from shardctl.tensors.manifest import CheckpointFile, Chunk, Tensor


def align_files(plan: CopyPlan) -> CopyPlan:
    """Return the plan with spaces after the headers of safetensors files, up to 4,088 bytes in each.

    As many bytes as can then lie in a block as they do in the source's files; other files stay as they are.
    """
    shifts = {path: shift for path, shift in _choose_shifts(plan).items() if shift}
    if not shifts:
        return plan
    want = plan.want
    files = {path: _shift_file(file, shifts.get(path, 0)) for path, file in want.files.items()}
    tensors = {name: _shift_tensor(tensor, shifts) for name, tensor in want.tensors.items()}
    return join_manifests(plan.have, replace(want, files=files, tensors=tensors))


def _choose_shifts(plan: CopyPlan) -> dict[str, int]:
    """Choose for each file how many bytes further its arrays should begin."""
    votes: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for copy in plan.copies:
        if copy.source.dtype is copy.target.dtype and copy.source.encoded_bytes is None:
            for file, shift, nbytes in _list_stretches(copy):
                if file.endswith(SAFETENSORS) and not shift % HEADER_ALIGNMENT:
                    votes[file][shift] += nbytes
    return {file: counts.most_common(1)[0][0] for file, counts in votes.items()}


def _list_stretches(copy: TensorCopy) -> Iterator[tuple[str, int, int]]:
    """Yield what both store alike: the target's file, how far its place in a block is from the source's, and bytes."""
    reads = ChunkIndex(copy.reads)
    for chunk in copy.target.chunks:
        if isinstance(chunk.where, Region) and not chunk.aside and chunk.dtype is copy.source.dtype:
            for read in reads.within(chunk.box):
                here = find_whole_region(read, read.box)
                there = find_whole_region(narrow_chunk(chunk, read.box), read.box)
                if here is not None and there is not None:
                    yield there.file, (here.offset - there.offset) % PAGE, chunk.dtype.nbytes(read.box.shape)


def _shift_file(file: CheckpointFile, shift: int) -> CheckpointFile:
    if not shift:
        return file
    (_, header), *others = file.literals
    literals = ((0, pad_header(header, shift)), *((offset + shift, data) for offset, data in others))
    blanks = tuple((offset + shift, size) for offset, size in file.blanks)
    return replace(file, size=file.size + shift, literals=literals, blanks=blanks)


def _shift_tensor(tensor: Tensor, shifts: Mapping[str, int]) -> Tensor:
    return replace(tensor, chunks=tuple(_shift_chunk(chunk, shifts) for chunk in tensor.chunks))


def _shift_chunk(chunk: Chunk, shifts: Mapping[str, int]) -> Chunk:
    where = chunk.where
    if not isinstance(where, Region) or not shifts.get(where.file):
        return chunk
    return replace(chunk, where=replace(where, offset=where.offset + shifts[where.file]))
