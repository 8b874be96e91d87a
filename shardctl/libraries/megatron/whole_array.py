"""Describes an array of a Megatron-LM model by its pieces, and how ranks divide it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardctl.base.value import value_class
from shardctl.libraries.arrays.composite import CompositeArray, join_arrays

if TYPE_CHECKING:
    from shardctl.base.dtype import DType


@value_class
class WholeArray:
    """An array of the model, and how the ranks that share a layer divide it."""

    name: str
    """That of megatron-core's local layers, without the layer's."""
    pieces: tuple[CompositeArray, ...]
    """Each is divided by itself; a rank's parts, and the whole, are joined along dim 0."""
    dim: int | None = None
    """The dim along which they are divided; None for an array that every rank has whole."""
    expert: int | None = None
    """Of which routed expert it is."""
    dtype: DType | None = None
    """The type that it must have."""
    parts: tuple[str, ...] = ()
    """What `torch_dist` calls its pieces, if it keeps each in an array of its own."""
    groups: int = 0
    """Into how many groups of heads each piece is cut, if those of a group follow each other."""

    @property
    def content(self) -> CompositeArray:
        """All of it, as it would be on one rank."""
        return self._group_by_group(range(self.groups)) if self.groups else join_arrays(self.pieces)

    def share(self, index: int, count: int) -> CompositeArray:
        """Return what rank `index` of `count` has; raises PartitionError, by tensor, if parts would not be equal."""
        if self.dim is None or count == 1:
            return self.content
        if not self.groups:
            return join_arrays([piece.share(self.dim, index, count) for piece in self.pieces])
        if self.groups % count:  # a rank's rows begin or end inside of a group
            return self.content.share(self.dim, index, count)
        return self._group_by_group(range(index * self.groups // count, (index + 1) * self.groups // count))

    def _group_by_group(self, groups: range) -> CompositeArray:
        return join_arrays([piece.share(0, group, self.groups) for group in groups for piece in self.pieces])
