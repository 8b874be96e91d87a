"""Describes parts of a stored array, transposed or not, without reading it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardctl.base.errors import UnsupportedError
from shardctl.base.value import value_class
from shardctl.tensors.bands import ChunkIndex
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Chunk, Region

if TYPE_CHECKING:
    from shardctl.base.dtype import DType
    from shardctl.tensors.manifest import Tensor


@value_class
class StridedView:
    """Elements of one file, by the bytes from one to the next along each dim."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    where: Region

    @staticmethod
    def of(tensor: Tensor) -> StridedView:
        """Return all of a tensor; raises UnsupportedError for one that is stored in several boxes."""
        chunk = tensor.chunks[0]
        if len(tensor.chunks) != 1 or chunk.box != Box.whole(tensor.shape) or not isinstance(chunk.where, Region):
            raise UnsupportedError(f"{tensor.name} is stored in parts; an adapter must be whole")
        return StridedView(tensor.name, tensor.dtype, tensor.shape, chunk.where)

    def in_file(self, path: str) -> StridedView:
        """Return the same in a file of that path."""
        return replace(self, where=Region(path, self.where.offset, self.where.strides))

    def transposed(self) -> StridedView:
        """Return the matrix with its dims swapped."""
        return replace(
            self, shape=self.shape[::-1], where=Region(self.where.file, self.where.offset, self.where.strides[::-1])
        )

    def take(self, dim: int, start: int, count: int, step: int = 1) -> StridedView:
        """Return `count` elements of a dim, `step` apart."""
        shape, strides = list(self.shape), list(self.where.strides)
        offset = self.where.offset + start * strides[dim]
        shape[dim], strides[dim] = count, strides[dim] * step
        return replace(self, shape=tuple(shape), where=Region(self.where.file, offset, tuple(strides)))

    def index(self) -> ChunkIndex:
        """Return what it is read with."""
        return ChunkIndex([Chunk(Box.whole(self.shape), self.dtype, self.where, self.name)])
