"""Finds a model's tensors in another library's arrays: the reading direction of every schema."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from shardctl.base.amounts import format_plural
from shardctl.base.errors import SourceError, UnsupportedError, format_first_few
from shardctl.tensors.box import Box, BoxIndex
from shardctl.tensors.manifest import Region, Tensor, compute_dense_strides
from shardctl.tensors.training import format_state_name, split_state_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from shardctl.libraries.arrays.composite import SchemaEntry
    from shardctl.libraries.arrays.schema import Schema
    from shardctl.models import Model
    from shardctl.tensors.manifest import Chunk, Manifest, TrainingState
    from shardctl.tensors.naming_scheme import NamingScheme


BRIDGE_ADAPTER: Final = (
    "matrices of an adapter of Megatron-Bridge: its AutoBridge.export_adapter_ckpt makes a PEFT adapter of them, which "
    "shardctl reads and merges"
)


def bind_arrays(schema: Schema, model: Model, stored: Manifest, read: Callable[[str, int, int], bytes]) -> Manifest:
    """Return `stored`, whose dialect is of `schema`, as the model's tensors.

    `read` gives bytes of a file from an offset.

    Raises SourceError, by name, for an array that is missing, has another shape than the model gives it, or a type
    unlike that of its neighbours; UnsupportedError for one that the schema does not know, and for a constant whose
    value is another; else as `Schema.arrays`.
    """
    dialect = stored.dialect
    assert dialect is not None  # noqa: S101 - the caller chose the schema by it
    chunks: dict[str, list[Chunk]] = {}
    known: set[str] = set()
    missing: list[str] = []
    padded: list[str] = []
    for name, entry in _list_entries(schema, model, dialect):
        known.add(name)
        tensor = stored.tensors.get(name)
        if tensor is None:
            if not entry.optional:
                missing.append(name)
        elif entry.constant is not None:
            _check_constant(entry, tensor, read)
        else:
            for part, chunk in pull_chunks(entry, tensor):
                chunks.setdefault(part, []).append(chunk)
            if entry.content.padding and not _is_zero(entry, tensor, read):
                padded.append(name)
    unknown = [name for name in stored.tensors if name not in known]
    left = [name for name in unknown if schema.left_behind is not None and schema.left_behind.fullmatch(name)]
    unknown = [name for name in unknown if name not in left]
    if unknown:
        raise UnsupportedError(
            f"{schema.title} has no {format_first_few(unknown)} in {model.architecture or 'this model'}",
            hint=BRIDGE_ADAPTER
            if any(".adapter." in name for name in unknown)
            else f"the config may belong to another model, or the files to another version{schema.strangers}",
        )
    if missing:
        raise SourceError(
            f"the checkpoint lacks {format_first_few(missing)}, which {schema.title} has for {model.architecture}",
            hint="a file may be missing, or the config may belong to another model",
        )
    tensors = {name: _build_tensor(model, name, chunks[name]) for name in model.tensors if name in chunks}
    bound = replace(
        stored,
        tensors=tensors,
        dialect=None,
        warnings=(
            *stored.warnings,
            *_note_changed(tensors.values()),
            *_note_dropped(padded),
            *_note_left_behind(left, model),
        ),
    )
    if stored.training is not None:
        bound = replace(bound, training=_bind_training(schema, model, dialect, stored.training))
    return bound


def _note_changed(tensors: Iterable[Tensor]) -> Iterator[str]:
    """Yield what to say of tensors whose elements are not those that are stored."""
    changed = [tensor for tensor in tensors if any(chunk.affine for chunk in tensor.chunks)]
    if changed:
        kinds = " and ".join(
            sorted({f"{chunk.affine} in {tensor.dtype}" for tensor in changed for chunk in tensor.chunks})
        )
        yield (
            f"{format_first_few([tensor.name for tensor in changed])} are stored as {kinds}; they are "
            "converted back, and rounded to that type where it cannot hold the sum"
        )


def _is_zero(entry: SchemaEntry, tensor: Tensor, read: Callable[[str, int, int], bytes]) -> bool:
    """Return whether the first row behind the tensors of an array is stored in one piece and zero, as padding is."""
    rows = entry.content.shape[0] - entry.content.padding // (entry.content.size // entry.content.shape[0])
    for stored in tensor.chunks:
        chunk = _reshape_chunk(entry, stored)
        at = rows - chunk.box.origin[0]
        if isinstance(chunk.where, Region) and 0 <= at < chunk.box.shape[0] and not any(chunk.box.origin[1:]):
            size = chunk.dtype.nbytes((1, *chunk.box.shape[1:]))
            if any(read(chunk.where.file, chunk.where.offset + at * chunk.where.strides[0], size)):
                return False
    return True


def _note_dropped(padded: list[str]) -> Iterator[str]:
    """Yield what to say of arrays whose padding is none, or was trained."""
    if padded:
        yield (
            f"the rows of {format_first_few(padded)} after the last token are not zero, but are left "
            "out as padding; if they are tokens, --true-vocab or vocab_size is too small"
        )


def _note_left_behind(left: list[str], model: Model) -> Iterator[str]:
    """Yield what to say of layers that the model's config does not have."""
    if left:
        yield (
            f"left behind: {format_plural(len(left), 'array')} of layers that predict further tokens, for which "
            f"{model.architecture or 'the model'} has no place ({format_first_few(left)})"
        )


def _list_entries(schema: Schema, model: Model, dialect: NamingScheme) -> Iterator[tuple[str, SchemaEntry]]:
    for rank, entry in schema.arrays(model, dialect):
        yield f"{dialect.ranks[rank]}{entry.name}", entry


def _build_tensor(model: Model, name: str, chunks: list[Chunk]) -> Tensor:
    dtypes = {chunk.dtype: chunk for chunk in chunks}
    if len(dtypes) > 1:
        (one, first), (two, second), *_ = dtypes.items()
        raise SourceError(f"{name} is {one} in {first.name}, but {two} in {second.name}")
    return Tensor(name, chunks[0].dtype, model.tensors[name].shape, tuple(chunks))


def pull_chunks(entry: SchemaEntry, tensor: Tensor) -> Iterator[tuple[str, Chunk]]:
    """Yield what an array that is stored holds of each tensor."""
    if tensor.shape != entry.declared:
        raise SourceError(
            f"{tensor.name} has shape {list(tensor.shape)}, but the model gives it {list(entry.declared)}",
            hint="the config may belong to another model, or files of the last ranks may be missing",
        )
    pieces = entry.content.pieces
    index = _build_index(tuple(piece.view.image(piece.box.shape) for piece in pieces))
    for stored in tensor.chunks:
        chunk = _reshape_chunk(entry, stored)
        for position, _ in index.find_overlaps(chunk.box):
            part = pieces[position].pulled(chunk)
            if part is not None:
                yield pieces[position].tensor, part


@lru_cache(maxsize=256)
def _build_index(images: tuple[Box, ...]) -> BoxIndex:
    """Build the index once: layers are alike, and so are the places of their tensors."""
    return BoxIndex(images)


def _reshape_chunk(entry: SchemaEntry, chunk: Chunk) -> Chunk:
    """Return a chunk of the declared array as one of the content's shape."""
    if entry.declared == entry.content.shape:
        return chunk
    dense = compute_dense_strides(chunk.dtype, chunk.box.shape)
    if chunk.box != Box.whole(entry.declared) or (isinstance(chunk.where, Region) and chunk.where.strides != dense):
        raise UnsupportedError(f"{chunk.name} is not stored row by row, so it cannot be seen in another shape")
    shape = entry.content.shape
    where = chunk.where
    if isinstance(where, Region):
        where = replace(where, strides=compute_dense_strides(chunk.dtype, shape))
    return replace(chunk, box=Box.whole(shape), where=where)


def _check_constant(entry: SchemaEntry, tensor: Tensor, read: Callable[[str, int, int], bytes]) -> None:
    """Raise if what is stored is not the constant that the schema has there: it would be lost."""
    if tensor.shape != entry.declared or (entry.dtype is not None and tensor.dtype != entry.dtype):
        raise SourceError(
            f"{tensor.name} is {tensor.dtype} {list(tensor.shape)} but {entry.dtype} {list(entry.declared)} is expected"
        )
    for chunk in tensor.chunks:
        if isinstance(chunk.where, Region):
            found = read(chunk.where.file, chunk.where.offset, chunk.dtype.nbytes(chunk.box.shape))
            if found != entry.constant:
                raise UnsupportedError(
                    f"{tensor.name} in {chunk.where.file} has other values than a model that is not quantized"
                )


def _bind_training(schema: Schema, model: Model, dialect: NamingScheme, stored: TrainingState) -> TrainingState:
    """Return the states of each tensor: one that has the shape of an array is taken apart as the array is.

    A single number, such as a step, is that of every tensor in the array. Raises UnsupportedError for other shapes.
    """
    by_array: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in stored.states.items():
        state, parameter = split_state_name(name) or ("", name)
        by_array.setdefault(parameter, []).append((state, tensor))
    found: dict[str, dict[str, list[Chunk]]] = {}
    parts: dict[str, tuple[str, ...]] = {}
    for name, entry in _list_entries(schema, model, dialect):
        if name in by_array:
            parts[name] = tuple(dict.fromkeys(piece.tensor for piece in entry.content.pieces))
        for state, tensor in by_array.get(name, ()):
            if not tensor.shape:
                for part in parts[name]:
                    found.setdefault(part, {}).setdefault(format_state_name(state, part), []).extend(tensor.chunks)
                continue
            if tensor.shape != entry.declared:
                raise UnsupportedError(
                    f"{tensor.name} has shape {list(tensor.shape)}, unlike its parameter {list(entry.declared)}"
                )
            for part, chunk in pull_chunks(entry, tensor):
                plain = replace(chunk, affine="")  # a gradient is the same, whatever is added to its parameter
                found.setdefault(part, {}).setdefault(format_state_name(state, part), []).append(plain)
    by_array = {
        name: states
        for name, states in by_array.items()
        if name in parts or schema.left_behind is None or schema.left_behind.fullmatch(name) is None
    }
    unknown = [name for name in by_array if name not in parts]
    if unknown:
        raise UnsupportedError(f"{schema.title} has no {format_first_few(unknown)}, which have optimizer states")
    states = {
        state: Tensor(state, chunks[0].dtype, chunks[0].box.shape and model.tensors[part].shape, tuple(chunks))
        for part in model.tensors
        for state, chunks in found.get(part, {}).items()
    }
    groups = tuple(
        replace(
            group, parameters=tuple(dict.fromkeys(part for name in group.parameters for part in parts.get(name, ())))
        )
        for group in stored.groups
    )
    return replace(stored, states=states, groups=groups)
