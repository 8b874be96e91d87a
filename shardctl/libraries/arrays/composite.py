"""Describes another library's arrays as pieces of a model's tensors; reading and writing both follow from it.

An expression such as ``interleave of heads``, ``gate over up``, ``every second row`` or ``padded to 64 rows`` is worked
out, once, into pieces: boxes of tensors, and for each the `ArrayView` through which it lies in the array. Whoever reads
pulls the tensors' chunks out of the stored array by them, whoever writes puts them there.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from shardctl.base.errors import PartitionError
from shardctl.base.value import value_class
from shardctl.tensors.box import Box
from shardctl.tensors.turns import unfold_box
from shardctl.tensors.views import NO_DIM, ArrayView

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardctl.base.dtype import DType
    from shardctl.tensors.manifest import Chunk


@value_class
class Piece:
    """A box of a tensor, and how it runs through an array."""

    tensor: str
    """The canonical name."""
    box: Box
    """Which elements of it."""
    view: ArrayView
    """Where they lie: the view of a tensor of the box's shape, whose first element is the box's origin."""
    affine: str = ""
    """A *named* element-wise change between the array and the tensor, as `Chunk.affine`."""
    turns: int = 1
    """How many parts take turns along the tensor's last dim, which the last dim of `box` counts, as `Chunk.turns`."""

    def pulled(self, chunk: Chunk) -> Chunk | None:
        """Return what a chunk of the array, stored or yet to be written, holds of it; None if nothing."""
        found = self.view.map_chunk_part(chunk, self.box)
        if found is None or (not self.affine and self.turns == 1):
            return found
        return replace(found, affine=self.affine, turns=self.turns)


@value_class
class CompositeArray:
    """An array made of pieces; what none of them fills is padding, zeros, and stands at the end of its first dim.

    >>> q, k = CompositeArray.whole("q", (4, 2)), CompositeArray.whole("k", (2, 2))
    >>> group = join_arrays([q.part(0, 0, 2), k.part(0, 0, 1)])
    >>> group.shape, [str(piece.box) for piece in group.pieces]
    ((3, 2), ['[0:2, 0:2]', '[0:1, 0:2]'])
    """

    shape: tuple[int, ...]
    """In elements."""
    pieces: tuple[Piece, ...]

    @classmethod
    def whole(cls, tensor: str, shape: tuple[int, ...], affine: str = "") -> CompositeArray:
        """Return a tensor as it is."""
        return cls(shape, (Piece(tensor, Box.whole(shape), ArrayView.whole(len(shape)), affine),))

    def unfold_dim(self, turns: int) -> CompositeArray:
        """Return a whole tensor with a further dim, of the parts that take turns along its last one.

        >>> even, odd = CompositeArray.whole("both", (4, 6)).unfold_dim(2).permute_dims((2, 0, 1)).split()
        >>> even.shape, str(odd.pieces[0].box), odd.pieces[0].turns
        ((4, 3), '[0:4, 0:3, 1:2]', 2)
        """
        (piece,) = self.pieces
        box = unfold_box(piece.box, turns)
        return CompositeArray(box.shape, (replace(piece, box=box, view=ArrayView.whole(len(box.shape)), turns=turns),))

    def split(self) -> list[CompositeArray]:
        """Return the arrays of each index along dim 0, without that dim."""
        return [self.at(0, index) for index in range(self.shape[0])]

    @property
    def size(self) -> int:
        """Elements, padding included."""
        return prod(self.shape)

    @property
    def padding(self) -> int:
        """How many elements at the end are zeros.

        Raises ValueError if what the pieces leave free is not a run of whole rows at the end: that would be a mistake
        in a schema, and elements lost.
        """
        free = self.size - sum(piece.box.size for piece in self.pieces)
        if not free:
            return 0
        row = prod(self.shape[1:])
        stop = max((piece.view.image(piece.box.shape).stop[0] for piece in self.pieces if piece.box.size), default=0)
        if free != (self.shape[0] - stop) * row:
            raise ValueError(f"pieces of {self.pieces[0].tensor} and others leave holes in an array of {self.shape}")
        return free

    def pulled(self, chunk: Chunk) -> Iterator[tuple[str, Chunk]]:
        """Yield what a chunk of the array holds of each tensor, by the tensor's name."""
        for piece in self.pieces:
            found = piece.pulled(chunk)
            if found is not None:
                yield piece.tensor, found

    def part(self, dim: int, start: int, stop: int) -> CompositeArray:
        """Return indices `start` to `stop` along a dim."""
        if (start, stop) == (0, self.shape[dim]):
            return self
        if not 0 <= start <= stop <= self.shape[dim]:
            raise PartitionError(f"an array of {list(self.shape)} has no part {start}:{stop} along dim {dim}")
        cut = (_cut_piece(piece, dim, start, stop) for piece in self.pieces)
        return CompositeArray(
            _replace_at(self.shape, dim, stop - start), tuple(piece for piece in cut if piece is not None)
        )

    def share(self, dim: int, index: int, count: int) -> CompositeArray:
        """Return the part of rank `index` of `count`; raises PartitionError, by tensor, if parts would not be equal."""
        extent = self.shape[dim]
        if extent % count:
            raise PartitionError(
                f"{self.pieces[0].tensor if self.pieces else 'an array'}: {extent} rows or columns "
                f"cannot be divided into {count} equal parts"
            )
        return self.part(dim, index * extent // count, (index + 1) * extent // count)

    def shares(self, dim: int, count: int) -> list[CompositeArray]:
        """Return the parts of all ranks; raises as `share`."""
        return [self.share(dim, index, count) for index in range(count)]

    def permute_dims(self, axes: Sequence[int]) -> CompositeArray:
        """Return the array with its dims in another order: dim `d` of the result is dim ``axes[d]`` of this."""
        place = {old: new for new, old in enumerate(axes)}
        pieces = (
            replace(
                piece,
                view=ArrayView(
                    tuple(piece.view.origin[old] for old in axes),
                    tuple(place.get(axis, NO_DIM) for axis in piece.view.axes),
                    piece.view.steps,
                ),
            )
            for piece in self.pieces
        )
        return CompositeArray(tuple(self.shape[old] for old in axes), tuple(pieces))

    @property
    def transposed(self) -> CompositeArray:
        """The array with its last two dims exchanged."""
        last = len(self.shape) - 1
        return self.permute_dims((*range(last - 1), last, last - 1))

    def pad_rows(self, extent: int) -> CompositeArray:
        """Return the array with zeros behind it along dim 0, up to `extent` rows."""
        if extent < self.shape[0]:
            raise PartitionError(f"an array of {list(self.shape)} cannot be padded to {extent} rows")
        return CompositeArray(_replace_at(self.shape, 0, extent), self.pieces)

    def padded_with_last(self, extent: int) -> CompositeArray:
        """Return the array with its last row behind it, again and again, up to `extent` rows."""
        rows = self.shape[0]
        return join_arrays([self, *[self.part(0, rows - 1, rows)] * (extent - rows)])

    def at(self, dim: int, index: int) -> CompositeArray:
        """Return the array of one index along a dim, without that dim."""
        kept = [d for d in range(len(self.shape)) if d != dim]
        place = {old: new for new, old in enumerate(kept)}
        pieces = []
        for piece in self.part(dim, index, index + 1).pieces:
            view = piece.view
            origin = tuple(view.origin[old] for old in kept)
            axes = tuple(place.get(axis, NO_DIM) for axis in view.axes)
            pieces.append(replace(piece, view=ArrayView(origin, axes, view.steps)))
        return CompositeArray(tuple(self.shape[old] for old in kept), tuple(pieces))


@value_class
class SchemaEntry:
    """One array that a rank stores."""

    name: str
    content: CompositeArray
    shape: tuple[int, ...] = ()
    """As its file declares it, where that is not the shape of the content: the same elements in another shape."""
    dtype: DType | None = None
    """The type that it must have; None for that of its tensors."""
    constant: bytes | None = None
    """The bytes of an array that no tensor has anything of; then the content has no pieces, and `dtype` is given."""
    optional: bool = False
    """Whether a checkpoint may lack it; it is written all the same."""

    @property
    def declared(self) -> tuple[int, ...]:
        """The shape that its file says."""
        return self.shape or self.content.shape


def build_constant_entry(name: str, shape: tuple[int, ...], dtype: DType, data: bytes) -> SchemaEntry:
    """Build an array of `data`, which is made of no tensor."""
    return SchemaEntry(name, CompositeArray(shape, ()), dtype=dtype, constant=data)


def join_arrays(parts: Sequence[CompositeArray], dim: int = 0) -> CompositeArray:
    """Return arrays one behind another along a dim."""
    pieces: list[Piece] = []
    start = 0
    for part in parts:
        pieces += _move_pieces(part, dim, start) if start else part.pieces
        start += part.shape[dim]
    return CompositeArray(_replace_at(parts[0].shape, dim, start), tuple(_fuse_pieces(pieces, dim)))


def stack_arrays(parts: Sequence[CompositeArray]) -> CompositeArray:
    """Return arrays of one shape, one a index of a new dim 0."""
    pieces = [
        replace(
            piece,
            view=ArrayView((index, *piece.view.origin), shift_axes(piece.view.axes, 1), piece.view.steps),
        )
        for index, part in enumerate(parts)
        for piece in part.pieces
    ]
    return CompositeArray((len(parts), *parts[0].shape), tuple(pieces))


def shift_axes(axes: Sequence[int], by: int) -> tuple[int, ...]:
    """Return the dims of an array that has `by` more before its own."""
    return tuple(axis if axis == NO_DIM else axis + by for axis in axes)


def interleave_arrays(parts: Sequence[CompositeArray], dim: int = 0) -> CompositeArray:
    """Return arrays of one shape that take turns along a dim: the first of each, the second of each, and so on.

    >>> even, odd = CompositeArray.whole("even", (2,)), CompositeArray.whole("odd", (2,))
    >>> [piece.view for piece in interleave_arrays([even, odd]).pieces]
    [ArrayView(origin=(0,), axes=(0,), steps=(2,)), ArrayView(origin=(1,), axes=(0,), steps=(2,))]
    """
    pieces = []
    for turn, part in enumerate(parts):
        for piece in part.pieces:
            view = piece.view
            origin = _replace_at(view.origin, dim, view.origin[dim] * len(parts) + turn)
            steps = tuple(
                step * len(parts) if axis == dim else step for axis, step in zip(view.axes, view.steps, strict=True)
            )
            pieces.append(replace(piece, view=ArrayView(origin, view.axes, steps)))
    return CompositeArray(_replace_at(parts[0].shape, dim, parts[0].shape[dim] * len(parts)), tuple(pieces))


def round_up_to_multiple(rows: int, unit: int) -> int:
    """Return the least multiple of `unit` that is no less, as vocabularies are padded to.

    >>> round_up_to_multiple(63, 2), round_up_to_multiple(64, 2)
    (64, 64)
    """
    return -(-rows // unit) * unit


def _cut_piece(piece: Piece, dim: int, start: int, stop: int) -> Piece | None:
    """Return what a piece has between two indices of a dim of the array, counted from the first of them."""
    view, box = piece.view, piece.box
    at = view.origin[dim]
    if dim not in view.axes:
        if not start <= at < stop:
            return None
        return replace(piece, view=replace(view, origin=_replace_at(view.origin, dim, at - start)))
    along = view.axes.index(dim)
    step, extent = view.steps[along], box.shape[along]
    first = max(-((at - start) // step), 0)
    last = min(-((at - stop) // step), extent)
    if first >= last:
        return None
    inside = Box(_replace_at(box.origin, along, box.origin[along] + first), _replace_at(box.shape, along, last - first))
    return replace(
        piece, box=inside, view=replace(view, origin=_replace_at(view.origin, dim, at + step * first - start))
    )


def _move_pieces(part: CompositeArray, dim: int, by: int) -> Iterator[Piece]:
    for piece in part.pieces:
        origin = piece.view.origin
        yield replace(piece, view=replace(piece.view, origin=_replace_at(origin, dim, origin[dim] + by)))


def _fuse_pieces(pieces: Sequence[Piece], dim: int) -> Iterator[Piece]:
    """Join pieces that go on where the one before ends, both in the tensor and in the array."""
    before: Piece | None = None
    for piece in pieces:
        if before is not None:
            both = _fuse_pair(before, piece, dim)
            if both is not None:
                before = both
                continue
            yield before
        before = piece
    if before is not None:
        yield before


def _fuse_pair(one: Piece, other: Piece, dim: int) -> Piece | None:
    """Return two pieces as one, if they are one stretch along a dim of the array, in steps of one."""
    same = one.tensor == other.tensor and one.affine == other.affine and one.view.axes == other.view.axes
    if not same or one.turns != other.turns or one.view.steps != other.view.steps or dim not in one.view.axes:
        return None
    along = one.view.axes.index(dim)
    extent = one.box.shape[along]
    if one.view.steps[along] != 1 or _replace_at(one.box.shape, along, 0) != _replace_at(other.box.shape, along, 0):
        return None
    goes_on = _replace_at(one.box.origin, along, one.box.origin[along] + extent) == other.box.origin
    if not goes_on or _replace_at(one.view.origin, dim, one.view.origin[dim] + extent) != other.view.origin:
        return None
    return replace(one, box=Box(one.box.origin, _replace_at(one.box.shape, along, extent + other.box.shape[along])))


def _replace_at(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])
