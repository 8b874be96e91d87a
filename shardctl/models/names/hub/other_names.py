"""Lets a model's table read names that transformers converts: those of the Hub, or those of its class in memory.

Some families share the class of another, and have names and arrays of their own on the Hub (`sarvam_moe` is saved as
`Glm4MoeForCausalLM`); the tables of others have the names of the Hub, and transformers' classes have others in memory
(`kimi_k25`). Both are read by what transformers' conversions make of the one when they save it as the other.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from shardctl.base.errors import UnsupportedError
from shardctl.models.names.binding import find_canonical_name
from shardctl.models.names.hub.conversion_table import find_conversions
from shardctl.models.names.hub.hub_arrays import build_hub_arrays, save_arrays
from shardctl.models.names.naming import bind_manifest
from shardctl.models.tables.config import ModelConfig
from shardctl.models.tables.fusion import FusionPlaces, TensorFusion, join_tensors
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Tensor
from shardctl.tensors.training import format_state_name, split_state_name
from shardctl.tensors.views import NO_DIM, ArrayView

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from shardctl.models.tables.model import Model
    from shardctl.tensors.manifest import Manifest


def bind_other_names(
    model: Model, stored: Manifest, config: Mapping[str, Any], *, partial: bool = False
) -> tuple[Model, Manifest] | None:
    """Bind stored names that the table of `model` does not have; None if no conversion explains any of them.

    Returns the model with the arrays that explain them, and the manifest under canonical names. Raises as
    `bind_manifest`.
    """
    unknown = {name for name in stored.tensors if find_canonical_name(model, name) is None}
    try:
        known = add_saved_arrays(model, unknown, config)
        if known is not model:
            return known, bind_manifest(known, stored, partial=partial)
        arrays = {array.name: array for array in _list_state_arrays(model, stored, config)}
    except UnsupportedError:  # the stored tensors are not those of this class
        return None
    if unknown.isdisjoint(arrays):
        return None
    line = f"names that {model.architecture} has in memory were read as those of the Hub"
    bound = bind_manifest(model, _convert_manifest(stored, arrays), partial=partial)
    # On the Hub a tied weight has one name.
    once = {name: replace(tensor, spelling=(name,)) for name, tensor in bound.tensors.items() if tensor.ties}
    return model, replace(bound, tensors={**bound.tensors, **once}, warnings=(*bound.warnings, line))


class _HubPart(NamedTuple):
    """A part of an array on the Hub that lies in an array of the class."""

    name: str
    shape: tuple[int, ...]
    """Of the whole array on the Hub."""
    box: Box
    """The part."""
    view: ArrayView
    """How the part runs through the array of the class."""


def add_saved_arrays(model: Model, names: Collection[str], config: Mapping[str, Any]) -> Model:
    """Return a model, whose table has the names of the class in memory, with the arrays on the Hub of these names.

    Returns `model` itself if transformers saves none of them. Raises UnsupportedError if it could not save the model.
    """
    tensors = [Tensor(t.name, t.dtype, t.shape, (), t.ties) for t in model.own()]
    arrays = {
        array.name: replace(array, stored=True)
        for array in build_hub_arrays(model, tensors, config)
        if find_canonical_name(model, array.name) is None
    }
    return model if arrays.keys().isdisjoint(names) else replace(model, fusions={**model.fusions, **arrays})


def _list_state_arrays(model: Model, stored: Manifest, config: Mapping[str, Any]) -> Iterator[TensorFusion]:
    """List the stored arrays by what each holds of the arrays on the Hub, under the names of a model's table."""
    state = [TensorFusion(name, (name,), join_tensors((t.shape,))) for name, t in stored.tensors.items()]
    parts: dict[str, list[_HubPart]] = {array.name: [] for array in state}
    for array in save_arrays(state, find_conversions(ModelConfig(config).architecture(), config), config):
        name = find_canonical_name(model, array.name) or array.name
        for tensor, box, view in zip(array.tensors, array.places.boxes, array.places.views, strict=True):
            parts[tensor] += [_HubPart(name, array.shape, *one) for one in _turn_around(box, view)]
    known: dict[object, FusionPlaces] = {}
    for name, found in parts.items():
        key = tuple(part[1:] for part in found)
        if key not in known:
            known[key] = FusionPlaces.of([p.view for p in found], [p.shape for p in found], [p.box for p in found])
        yield TensorFusion(name, tuple(part.name for part in found), known[key])


def _convert_manifest(stored: Manifest, arrays: Mapping[str, TensorFusion]) -> Manifest:
    """Return what is stored, and the states of optimizers, as the arrays that its parts make."""
    tensors = _join_parts(part for tensor in stored.tensors.values() for part in _take_apart(arrays, tensor, ""))
    training = stored.training
    if training is not None:
        named = ((split_state_name(name) or ("", name), tensor) for name, tensor in training.states.items())
        states = _join_parts(p for (state, name), t in named for p in _take_apart(arrays, replace(t, name=name), state))
        groups = tuple(
            replace(group, parameters=tuple(dict.fromkeys(n for p in group.parameters for n in _list_names(arrays, p))))
            for group in training.groups
        )
        training = replace(training, states=states, groups=groups)
    return replace(stored, tensors=tensors, training=training)


def _take_apart(arrays: Mapping[str, TensorFusion], tensor: Tensor, state: str) -> Iterator[Tensor]:
    """Yield what a tensor, or a state of one, holds of each array; a state of another shape belongs to the first."""
    array = arrays.get(tensor.name)
    parts = array.taken_apart(tensor) if array is not None and tensor.shape == array.shape else ()
    for name, part in parts or [(_list_names(arrays, tensor.name)[0], tensor)]:
        yield replace(part, name=format_state_name(state, name) if state else name, ties=())


def _list_names(arrays: Mapping[str, TensorFusion], parameter: str) -> tuple[str, ...]:
    """List the arrays of which a parameter holds a part."""
    return tuple(dict.fromkeys(arrays[parameter].tensors)) if parameter in arrays else (parameter,)


def _join_parts(parts: Iterable[Tensor]) -> dict[str, Tensor]:
    """Join the parts of each tensor; of numbers such as a step, which each part has, the first stays."""
    found: dict[str, list[Tensor]] = {}
    for part in parts:
        found.setdefault(part.name, []).append(part)
    return {
        name: replace(
            some[0], chunks=tuple(chunk for each in some[: None if some[0].shape else 1] for chunk in each.chunks)
        )
        for name, some in found.items()
    }


def _turn_around(box: Box, view: ArrayView) -> Iterator[tuple[Box, ArrayView]]:
    """Yield the boxes of an array through which a `box` of a tensor runs, and how each lies in the tensor.

    Where the tensor's elements are apart in the array, such as rows in rotary order, each index is a box of its own.
    """
    sparse = [dim for dim, step in enumerate(view.steps) if step > 1 and box.shape[dim] > 1]
    for index in product(*(range(box.shape[dim]) for dim in sparse)):
        first, extents = list(box.origin), list(box.shape)
        origin, shape = list(view.origin), [1] * len(view.origin)
        axes = [NO_DIM] * len(view.origin)
        for dim, position in zip(sparse, index, strict=True):
            first[dim] += position
            extents[dim] = 1
            origin[view.axes[dim]] += view.steps[dim] * position
        for dim, axis in enumerate(view.axes):
            if axis != NO_DIM:
                axes[axis] = dim
                shape[axis] = extents[dim]
        yield Box(tuple(origin), tuple(shape)), ArrayView(tuple(first), tuple(axes))
