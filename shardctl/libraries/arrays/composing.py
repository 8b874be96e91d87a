"""Makes another library's arrays from a model's tensors: the writing direction of every schema."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from shardctl.base.errors import PartitionError, UnsupportedError, format_first_few
from shardctl.base.value import value_class
from shardctl.tensors.box import Box, make_disjoint
from shardctl.tensors.manifest import Chunk, Manifest, Region, compute_dense_strides

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from shardctl.base.dtype import DType
    from shardctl.libraries.arrays.composite import SchemaEntry
    from shardctl.libraries.arrays.schema import Schema
    from shardctl.libraries.writer import PackRequest
    from shardctl.tensors.manifest import CheckpointFile
    from shardctl.tensors.naming_scheme import NamingScheme


@value_class
class ComposedArray:
    """One array of a rank's file: what an `Array` is for layouts of the model's own tensors."""

    entry: SchemaEntry
    dtype: DType

    @property
    def name(self) -> str:
        """As the file has it."""
        return self.entry.name

    @property
    def box(self) -> Box:
        """All of the array, in the shape that its file declares."""
        return Box.whole(self.entry.declared)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.dtype.nbytes(self.entry.declared)

    @property
    def constant(self) -> bytes | None:
        """Its bytes, if no tensor has anything of it."""
        return self.entry.constant

    @property
    def padding(self) -> int:
        """How many bytes at its end are zeros that belong to no tensor."""
        if self.entry.constant is not None:
            return 0
        return self.entry.content.padding * self.dtype.unit_bytes

    def chunks(self, region: Region) -> Iterator[tuple[str, Chunk]]:
        """Yield what each tensor has in the array, which is stored densely from where `region` begins."""
        content = self.entry.content
        where = replace(region, strides=compute_dense_strides(self.dtype, content.shape))
        stored = Chunk(Box.whole(content.shape), self.dtype, where, self.name)
        return content.pulled(stored)


def compose_arrays(order: PackRequest, schema: Schema, dialect: NamingScheme) -> dict[int, list[ComposedArray]]:
    """Return the arrays of every rank that has some.

    Raises as `Schema.arrays`, and UnsupportedError, by name, for a tensor that was filtered out, or tensors of several
    types in one array.
    """
    arrays: dict[int, list[ComposedArray]] = {rank: [] for rank in dialect.ranks}
    for rank, entry in schema.arrays(order.model, dialect):
        arrays[rank].append(_compose_array(order, schema, entry))
    return arrays


def _compose_array(order: PackRequest, schema: Schema, entry: SchemaEntry) -> ComposedArray:
    if entry.constant is not None:
        assert entry.dtype is not None  # noqa: S101 - as an entry promises
        return ComposedArray(entry, entry.dtype)
    for piece in entry.content.pieces:
        if piece.tensor not in order.have.tensors:
            raise UnsupportedError(f"{schema.title} needs every tensor, but {piece.tensor} is missing")
    kinds = {order.dtypes[piece.tensor]: piece.tensor for piece in entry.content.pieces}
    if entry.dtype is None and len(kinds) > 1:
        (one, first), (two, second), *_ = kinds.items()
        raise UnsupportedError(
            f"{entry.name} of {schema.title} cannot hold both {first}, which is {one}, and {second}, which is {two}",
            hint="cast to one type with --dtype",
        )
    if entry.dtype is None and not kinds:
        raise PartitionError(
            f"{entry.name} of {schema.title} would be only padding on one of the ranks", hint="use a smaller --tp"
        )
    dtype = entry.dtype or next(iter(kinds))
    if dtype.unit_elements > 1:
        raise UnsupportedError(f"{entry.name}: {schema.title} cannot be written with weights of {dtype}")
    return ComposedArray(entry, dtype)


def build_manifest(
    layout: str,
    order: PackRequest,
    schema: Schema,
    dialect: NamingScheme,
    files: Mapping[str, CheckpointFile],
    stored: Iterable[tuple[str, Chunk]],
    copies: tuple[Collection[str], Sequence[str]] = ((), ()),
) -> Manifest:
    """Build the manifest of `files` in which the parts of tensors are `stored`.

    Buffers are left out, for they are computed from the config, and layers that predict further tokens, which is said.
    `copies` are tensors that the library takes from elsewhere, and what is to be said of them.
    Raises UnsupportedError, by name, for any other tensor that is not stored whole, and for one that is stored in
    several types.
    """
    chunks: dict[str, list[Chunk]] = {}
    for name, chunk in stored:
        chunks.setdefault(name, []).append(chunk)
    tensors, left = {}, []
    for name, tensor in order.have.tensors.items():
        found, row = tuple(chunks.get(name, ())), order.model.tensors[name].row
        if not found and (row.buffer or row.optional or name in copies[0]):
            left += [] if row.buffer or name in copies[0] else [name]
            continue
        if _count_stored_elements(tuple(chunk.box for chunk in found if not chunk.aside)) != tensor.size:
            what = "no place" if not found else "no place for all"
            raise UnsupportedError(f"{schema.title} has {what} for {name} of {order.model.architecture}")
        kinds = {chunk.dtype for chunk in found if not chunk.aside}
        if len(kinds) > 1:
            raise UnsupportedError(f"{name} would be stored as {' and as '.join(sorted(map(str, kinds)))}")
        tensors[name] = replace(tensor, dtype=kinds.pop(), chunks=found)
    said = (
        f"{format_first_few(left)} of layers that predict further tokens are left behind: {schema.title} has "
        f"no place for them{f'; {schema.further}' if schema.further else ''}"
    )
    warnings = (*copies[1], *(said,) * bool(left))
    return Manifest(layout, tensors, files, order.have.objects, warnings=warnings, dialect=dialect)


@lru_cache(maxsize=4096)
def _count_stored_elements(boxes: tuple[Box, ...]) -> int:
    """Count how many elements are in at least one of the boxes; layers are alike."""
    return sum(box.size for _, box in make_disjoint(boxes))
