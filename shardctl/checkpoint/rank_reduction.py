"""Computes tensors of which every rank has a copy of its own: their sum or mean, as the library's converter does.

Ranks of GPT-NeoX add their own biases to partial outputs, which are then summed, and their norms drift apart.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.base.value import value_class
from shardctl.checkpoint.computed_source import ComputedSource
from shardctl.libraries.catalogue import get_schema
from shardctl.models.adaptation.numbers import COMPUTABLE, read_numbers, round_numbers
from shardctl.tensors.bands import ChunkIndex
from shardctl.tensors.box import Box
from shardctl.tensors.cast import cast_elements
from shardctl.tensors.manifest import Chunk, Region, compute_dense_strides

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from shardctl.base.dtype import DType
    from shardctl.storage import Source
    from shardctl.tensors.bands import BandBuffer, ByteReader
    from shardctl.tensors.manifest import Manifest, Tensor

_REDUCTION_CHUNK_ELEMENTS: Final = 1 << 12
"""Elements computed at a time, of each rank: biases and norms are short, and every thread has buffers of its own."""
_THREAD_BYTES: Final = 1 << 20
"""Upper bound of what all threads hold: some 64 of them, each with a run in fp32 of the sum, a rank and the result."""
_F32_DTYPE: Final = BY_NAME["F32"]


@value_class
class ReducedVector:
    """The sum or mean of the arrays that ranks have, each addition rounded to their type, in the order of ranks."""

    name: str
    copies: tuple[ChunkIndex, ...]
    dtype: DType
    mean: bool

    def read_values(self, reader: ByteReader, buffer: BandBuffer, offset: int, into: memoryview) -> int:
        """Fill `into` with the bytes from `offset`; returns how many finite values became infinite."""
        item = self.dtype.unit_bytes
        out = np.frombuffer(into, np.uint8)
        first, last = offset // item, (offset + len(out)) // item
        overflowed = 0
        for start in range(first, last, _REDUCTION_CHUNK_ELEMENTS):
            stop = min(start + _REDUCTION_CHUNK_ELEMENTS, last)
            values = self._reduce_copies([read_numbers(reader, buffer, copy, ((start, stop),)) for copy in self.copies])
            place = out[(start - first) * item : (stop - first) * item]
            overflowed += cast_elements(values.view(np.uint8).reshape(-1), _F32_DTYPE, self.dtype, place).overflowed
        return overflowed

    def _reduce_copies(self, copies: list[NDArray[np.float32]]) -> NDArray[np.float32]:
        total = copies[0]
        for each in copies[1:]:
            total = round_numbers(total + each, self.dtype.name)
        if not self.mean:
            return total
        same = np.all([each == copies[0] for each in copies[1:]], axis=0)
        return np.where(same, copies[0], total / np.float32(len(copies)))


def reduce_rank_arrays(source: Source, stored: Manifest, config: Mapping[str, Any]) -> tuple[Source, Manifest]:
    """Return a source that computes what ranks have copies of, and the manifest in which they all have the result.

    Raises SourceError if a rank lacks its copy, or has one unlike the others, and UnsupportedError for a type that is
    not computed with.
    """
    dialect = stored.dialect
    choose = get_schema(dialect.schema).reduction if dialect is not None else None
    if dialect is None or choose is None or len(dialect.ranks) == 1:
        return source, stored
    tensors, arrays = dict(stored.tensors), dict[str, ReducedVector]()
    first = dialect.ranks[0]
    for name in [name.removeprefix(first) for name in stored.tensors if name.startswith(first)]:
        how = choose(config, name)
        if how:
            copies = [_get_copy(stored, f"{prefix}{name}") for prefix in dialect.ranks.values()]
            path = f"{how} of ranks/{name}"
            arrays[path] = _build_vector(name, copies, how)
            for copy in copies:
                where = Region(path, 0, compute_dense_strides(copy.dtype, copy.shape))
                chunk = Chunk(Box.whole(copy.shape), copy.dtype, where, copy.name)
                tensors[copy.name] = replace(copy, chunks=(chunk,))
    count = f"{len(dialect.ranks)} tensor-parallel ranks"
    note = f"{len(arrays):,} biases and norms are sums or means of the copies of {count}"
    computed = ComputedSource(source, arrays, thread_bytes=_THREAD_BYTES, note=note)
    return computed, replace(stored, tensors=tensors)


def _get_copy(stored: Manifest, name: str) -> Tensor:
    found = stored.tensors.get(name)
    if found is None:
        raise SourceError(f"{name} is in no file of the checkpoint", hint="a rank's file may not have been copied")
    return found


def _build_vector(name: str, copies: list[Tensor], how: Literal["sum", "mean"]) -> ReducedVector:
    first = copies[0]
    for each in copies:
        if (each.shape, each.dtype) != (first.shape, first.dtype):
            raise SourceError(f"{each.name} is {each.dtype} {list(each.shape)}, but {first.name} {first.dtype}")
    if first.dtype.name not in COMPUTABLE or len(first.shape) != 1:
        raise UnsupportedError(f"{first.name} is {first.dtype} {list(first.shape)}, of which no {how} is computed")
    return ReducedVector(name, tuple(ChunkIndex(copy.chunks) for copy in copies), first.dtype, how == "mean")
