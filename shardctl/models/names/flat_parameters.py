"""Takes apart the flat parameters of FSDP1, which hold all parameters of a module in one row, without names or shapes.

Which ones, and in what order, is that of the model's class: depth first, a module's own before those of its children,
tied ones once, and none that an inner module's flat parameter has. With `use_orig_params=True` each begins at a
multiple of 16 bytes and the whole is padded to a multiple of the ranks; else there are no gaps (torch
`distributed/fsdp/_flat_param.py`, `_init_flat_param_and_metadata`). Only the total can be checked.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.base.value import value_class
from shardctl.tensors.manifest import Chunk, Region, Tensor, locate_dense_run

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardctl.models.tables.model import Model
    from shardctl.tensors.manifest import Manifest

_FLAT_PARAMETER_NAME: Final = "_flat_param"
_FSDP_WRAPPER_NAME: Final = "_fsdp_wrapped_module"
_PARAMETER_ALIGNMENT_BYTES: Final = 16
"""Bytes."""


@value_class
class _ParameterPlace:
    """Where in a flat parameter one of its parameters is."""

    name: str
    shape: tuple[int, ...]
    start: int
    """In elements."""


def is_flat_parameter(name: str) -> bool:
    """Return whether this is what FSDP1 calls a flat parameter.

    >>> is_flat_parameter("model.layers.0._flat_param"), is_flat_parameter("flat_param.weight")
    (True, False)
    """
    return name.endswith(_FLAT_PARAMETER_NAME) and name.rpartition(".")[2] == _FLAT_PARAMETER_NAME


def refuse_flat_parameters(stored: Manifest) -> None:
    """Raise UnsupportedError if there are flat parameters: without a model nobody can tell what is in them."""
    flat = next(filter(is_flat_parameter, stored.tensors), None)
    if flat is not None:
        raise UnsupportedError(
            f"{flat!r} holds all parameters of a module of FSDP1 in one row, but not their names and order",
            hint="say which model it is with --config, or save with StateDictType.SHARDED_STATE_DICT",
        )


def split_flat_parameters(model: Model, stored: Manifest) -> Manifest:
    """Return `stored` with the parameters that are in flat ones in place of these; as it is, if there are none.

    Raises SourceError if what `model` should have in a flat parameter is not as much as it holds.
    """
    flat = {_get_module_prefix(name): tensor for name, tensor in stored.tensors.items() if is_flat_parameter(name)}
    if not flat:
        return stored
    shapes = {name: shape for name, shape in model.state().items() if name not in model.aliases}
    members: dict[str, dict[str, tuple[int, ...]]] = {prefix: {} for prefix in flat}
    for name, shape in shapes.items():
        unit = next((p for p in _list_enclosing_modules(name) if p in flat), None)
        if unit is not None:
            members[unit][name] = shape
    ranks = stored.training.ranks if stored.training is not None else None
    tensors = {name: tensor for name, tensor in stored.tensors.items() if not is_flat_parameter(name)}
    for prefix, tensor in flat.items():
        for place in _find_places(tensor, members[prefix], ranks or 1, model.architecture):
            tensors[place.name] = Tensor(place.name, tensor.dtype, place.shape, tuple(_list_chunks(tensor, place)))
    note = f"flat parameters of FSDP1 were divided in the order of {model.architecture}; their sizes fit"
    training = stored.training and replace(stored.training, states={}, groups=(), notes=(*stored.training.notes, note))
    return replace(stored, tensors=tensors, training=training)


def _get_module_prefix(name: str) -> str:
    return ".".join(word for word in name.split(".")[:-1] if word != _FSDP_WRAPPER_NAME)


def _list_enclosing_modules(name: str) -> Iterator[str]:
    """List the names of the modules around a parameter, innermost first; the last is the root's, which is empty."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _find_places(
    flat: Tensor, members: Mapping[str, tuple[int, ...]], ranks: int, architecture: str
) -> Sequence[_ParameterPlace]:
    dense, end = _lay_out_parameters(members, 1)
    if end == flat.size:
        return dense
    aligned, padded = _lay_out_parameters(members, max(_PARAMETER_ALIGNMENT_BYTES // flat.dtype.unit_bytes, 1))
    if -(-padded // ranks) * ranks == flat.size:
        return aligned
    raise SourceError(
        f"{flat.name} has {flat.size:,} elements, but the {len(members)} parameters that {architecture} has there have "
        f"{end:,}, or {padded:,} with gaps",
        hint="some may be frozen or ignored, or the config may belong to another model; save with "
        "StateDictType.SHARDED_STATE_DICT or FULL_STATE_DICT",
    )


def _lay_out_parameters(members: Mapping[str, tuple[int, ...]], alignment: int) -> tuple[list[_ParameterPlace], int]:
    """Return parameters one after another, each at a multiple of `alignment` elements; and the end of the last."""
    found, at = [], 0
    for name, shape in members.items():
        at = -(-at // alignment) * alignment
        found.append(_ParameterPlace(name, shape, at))
        at += prod(shape)
    return found, at


def _list_chunks(flat: Tensor, place: _ParameterPlace) -> Iterator[Chunk]:
    """List what each rank's stretch of a flat parameter holds of one in it."""
    width = flat.dtype.unit_bytes
    size = prod(place.shape)
    for chunk in flat.chunks:
        first = chunk.box.origin[0]
        start = max(first, place.start) - place.start
        stop = min(chunk.box.stop[0], place.start + size) - place.start
        if start >= stop:
            continue
        if not isinstance(chunk.where, Region) or chunk.where.strides != (width,):
            raise SourceError(f"{chunk.name} is not stored in one row")
        offset = chunk.where.offset + (place.start + start - first) * width
        strides, places = locate_dense_run(flat.dtype, place.shape, start, stop)
        for box, shift in places:
            yield Chunk(box, flat.dtype, Region(chunk.where.file, offset + shift, strides), chunk.name)
