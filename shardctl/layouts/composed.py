"""From the model's tensors to the arrays of another library: the writing direction of every schema."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from shardctl.box import Box, disjoint
from shardctl.errors import CutError, UnsupportedError, some
from shardctl.manifest import Chunk, Manifest, Region, dense_strides

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from shardctl.dialect import Dialect
    from shardctl.dtype import DType
    from shardctl.manifest import File
    from shardctl.mesh import Mesh
    from shardctl.models import Model
    from shardctl.schemas.composite import Entry
    from shardctl.schemas.schema import Schema


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked of a layout whose arrays another library defines."""

    have: Manifest
    """The tensors to write."""
    model: Model
    mesh: Mesh
    dtypes: Mapping[str, DType]
    """By tensor, as a cast asks for."""
    config: Mapping[str, object]
    """The decoded `config.json`."""
    stages: tuple[int, ...] | None = None
    """Layers per pipeline stage, if they were given."""
    max_shard_size: int | None = None
    """Bytes of tensors per file."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options that only some layouts have, such as `vllm_profile`, if they were given."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout whose arrays another library defines."""

    name: str
    """What `--to` accepts."""
    pack: Callable[[Order], Manifest]
    """The files for an order, yet to be written.

    Raises as `composed` and `target`, and UsageError for options or a mesh that the layout cannot have.
    """
    schema: Schema
    prefix: Callable[[Dialect, int], str]
    """What the paths of the files of one of the mesh's ranks begin with, if it has any."""
    options: frozenset[str] = frozenset()
    """Those of `Order.options` that mean something to it."""
    max_shard_size: bool = False
    """Whether a rank may have several files."""


@dataclass(frozen=True, slots=True)
class Composed:
    """One array of a rank's file: what an `Array` is for layouts of the model's own tensors."""

    entry: Entry
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
        """What each tensor has in the array, which is stored densely from where `region` begins."""
        content = self.entry.content
        where = replace(region, strides=dense_strides(self.dtype, content.shape))
        stored = Chunk(Box.whole(content.shape), self.dtype, where, self.name)
        return content.pulled(stored)


def composed(order: Order, schema: Schema, dialect: Dialect) -> dict[int, list[Composed]]:
    """The arrays of every rank that has some.

    Raises as `Schema.arrays`, and UnsupportedError, by name, for a tensor that was filtered out, or tensors of several
    types in one array.
    """
    arrays: dict[int, list[Composed]] = {rank: [] for rank in dialect.ranks}
    for rank, entry in schema.arrays(order.model, dialect):
        arrays[rank].append(_composed(order, schema, entry))
    return arrays


def _composed(order: Order, schema: Schema, entry: Entry) -> Composed:
    if entry.constant is not None:
        assert entry.dtype is not None  # noqa: S101 - as an entry promises
        return Composed(entry, entry.dtype)
    for piece in entry.content.pieces:
        if piece.tensor not in order.have.tensors:
            raise UnsupportedError(f"{schema.title} needs every tensor, and {piece.tensor} is not there")
    kinds = {order.dtypes[piece.tensor]: piece.tensor for piece in entry.content.pieces}
    if entry.dtype is None and len(kinds) > 1:
        (one, first), (two, second), *_ = kinds.items()
        raise UnsupportedError(
            f"{entry.name} of {schema.title} cannot hold both {first}, which is {one}, and {second}, which is {two}",
            hint="cast to one type with --dtype",
        )
    if entry.dtype is None and not kinds:
        raise CutError(
            f"{entry.name} of {schema.title} would be padding alone on one of the ranks", hint="use a smaller --tp"
        )
    dtype = entry.dtype or next(iter(kinds))
    if dtype.unit_elements > 1:
        raise UnsupportedError(f"{entry.name}: {schema.title} is not written with weights of {dtype}")
    return Composed(entry, dtype)


def target(
    layout: str,
    order: Order,
    schema: Schema,
    dialect: Dialect,
    files: Mapping[str, File],
    stored: Iterable[tuple[str, Chunk]],
) -> Manifest:
    """The manifest of `files` in which the parts of tensors are `stored`.

    Buffers are left out, for they are computed from the config, and layers that predict further tokens, which is said.
    Raises UnsupportedError, by name, for any other tensor that is not stored whole, and for one that is stored in
    several types.
    """
    chunks: dict[str, list[Chunk]] = {}
    for name, chunk in stored:
        chunks.setdefault(name, []).append(chunk)
    tensors, left = {}, []
    for name, tensor in order.have.tensors.items():
        found, row = tuple(chunks.get(name, ())), order.model.tensors[name].row
        if not found and (row.buffer or row.optional):
            left += [] if row.buffer else [name]
            continue
        if _stored(tuple(chunk.box for chunk in found)) != tensor.size:
            what = "no place" if not found else "no place for all"
            raise UnsupportedError(f"{schema.title} has {what} for {name} of {order.model.architecture}")
        kinds = {chunk.dtype for chunk in found}
        if len(kinds) > 1:
            raise UnsupportedError(f"{name} would be stored as {' and as '.join(sorted(map(str, kinds)))}")
        tensors[name] = replace(tensor, dtype=found[0].dtype, chunks=found)
    said = f"{some(left)} of layers that predict further tokens are left behind: {schema.title} has no place for them"
    return Manifest(layout, tensors, files, order.have.objects, warnings=(said,) * bool(left), dialect=dialect)


@lru_cache(maxsize=4096)
def _stored(boxes: tuple[Box, ...]) -> int:
    """How many elements are in at least one of the boxes; layers are alike."""
    return sum(box.size for _, box in disjoint(boxes))
