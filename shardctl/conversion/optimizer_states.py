"""Decides whether a conversion includes optimizer states, and how they are cut."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

from shardctl.base.amounts import format_file_size, format_plural
from shardctl.base.errors import SourceError, UnsupportedError, UsageError, format_first_few
from shardctl.libraries.catalogue import format_choice, load_layouts
from shardctl.models.tables.fusion import TensorFusion
from shardctl.tensors.manifest import OpaqueObject, Tensor
from shardctl.tensors.training import (
    SETTINGS,
    add_states,
    add_steps,
    encode_settings,
    format_state_name,
    split_state_name,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from shardctl.libraries.arrays.form import ArrayForm
    from shardctl.libraries.writer import Layout
    from shardctl.models import Model
    from shardctl.tensors.manifest import Manifest
    from shardctl.tensors.placement import PartitionSpec

_ORBAX_FORMAT: Final = "orbax"
_OPTIMIZER_STATE_PREFIX: Final = "opt_state."
"""How names of an optimizer's states begin in a checkpoint of flax's `TrainState`."""
States = Literal["keep", "drop"] | None
"""What `--optimizer-states` says; None leaves it to the layout."""


def add_optimizer_states(have: Manifest, wished: States, layout: Layout) -> Manifest:
    """Return the manifest with its optimizer states among its tensors if they travel along, else without any training.

    States that are left behind though nobody said so are in its warnings.

    Raises UsageError if they are asked for and there are none, or the layout has no place for them; SourceError if
    they would travel along and cannot be read.
    """
    unreadable = have.training.unreadable if have.training is not None else ""
    if unreadable and (wished == "keep" or (wished is None and layout.states == "by default")):
        raise SourceError(unreadable, hint="add --optimizer-states drop to convert the weights without them")
    there = have.training is not None and bool(have.training.states)
    if wished == "keep" and not there:
        raise UsageError(
            "--optimizer-states keep was given, but the source has no optimizer states"
            + (" that can be read" if have.warnings else ""),
            hint="leave it out" + ("; shardctl inspect SRC says what is left behind, and why" if have.warnings else ""),
        )
    if wished == "keep" and layout.states == "none":
        others = format_choice([each.name for each in load_layouts() if each.states != "none"])
        raise UsageError(
            f"layout {layout.name} cannot store optimizer states",
            hint=f"use --to {others}, or leave --optimizer-states out",
        )
    known = there or (have.training is not None and any(group.parameters for group in have.training.groups))
    if wished == "keep" or (wished is None and layout.states == "by default" and known):
        said = have.warnings + tuple(_note_clipping(have, layout))
        return add_states(replace(add_steps(have) if layout.own_steps else have, warnings=said))
    warnings = have.warnings + tuple(_note_tree_states(have))
    if there and wished is None:
        warnings += (f"left behind: {_describe_states(get_states(have).values(), layout)}",)
    extra = {name: tensor for name, tensor in have.extra.items() if split_state_name(name) is None}
    return replace(have, training=None, warnings=warnings, extra=extra)


def _note_tree_states(have: Manifest) -> Iterator[str]:
    """Note what JAX's trainers keep of an optimizer in the tree of a checkpoint, under names that are like weights'."""
    states = (
        [name for name in have.tensors if name.startswith(_OPTIMIZER_STATE_PREFIX)]
        if have.format == _ORBAX_FORMAT
        else []
    )
    if states:
        yield (
            f"{format_first_few(states)} look like an optimizer's, and travel like weights: --exclude"
            f" '^{_OPTIMIZER_STATE_PREFIX}' leaves them out"
        )


def _note_clipping(have: Manifest, layout: Layout) -> Iterator[str]:
    """Note what another trainer than the writer has to be told, or its losses are others from the second step on."""
    training = have.training
    if training is None or not training.clipping or (layout.trainer and training.writer.startswith(layout.trainer)):
        return
    yield (
        f"{training.writer} clipped gradients to a norm of {training.clipping:g}: tell it to the trainer that goes on, "
        "which clips by a setting of its own (Megatron-LM: --clip-grad; DeepSpeed: gradient_clipping)"
    )


def _describe_states(states: Collection[Tensor], layout: Layout) -> str:
    """Say how many optimizer states there are, how large they are, and what would keep them."""
    size = format_file_size(sum(state.nbytes for state in states))
    others = format_choice([f"--to {each.name}" for each in load_layouts() if each.states == "by default"])
    keep = f"use {others}" if layout.states == "none" else "add --optimizer-states keep"
    return f"the optimizer states ({format_plural(len(states), 'tensor')}, {size}); {keep} to take them along"


def filter_states(have: Manifest, parameters: Collection[str]) -> Manifest:
    """Return the manifest with the states of these parameters only."""
    if have.training is None:
        return have
    kept = {n: t for n, t in have.training.states.items() if _split_name(n)[1] in parameters}
    return replace(have, training=replace(have.training, states=kept))


def get_states(have: Manifest) -> Mapping[str, Tensor]:
    """Return the optimizer states of a manifest, by name."""
    return have.training.states if have.training is not None else {}


def build_state_fusions(have: Manifest, fusions: Mapping[str, TensorFusion]) -> dict[str, TensorFusion]:
    """Build the arrays that could hold the states of several parameters: those that could hold the parameters."""
    found = {}
    kinds = dict.fromkeys(state for state, _ in map(_split_name, get_states(have)))
    for fusion in fusions.values():
        for state in kinds:
            names = tuple(format_state_name(state, name) for name in fusion.tensors)
            first, parameter = have.tensors.get(names[0]), have.tensors.get(fusion.tensors[0])
            if first is not None and parameter is not None and first.shape == parameter.shape:
                name = format_state_name(state, fusion.name)
                found[name] = TensorFusion(name, names, fusion.places, fusion.stored)
    return found


def spread_shared_states(have: Manifest, fusions: Mapping[str, TensorFusion]) -> Manifest:
    """Return the manifest with what an array of several parameters has once, such as a step, for each of them.

    It is the first one's until then; other arrays may hold other parameters.
    """
    states = dict(get_states(have))
    kinds = dict.fromkeys(state for state, _ in map(_split_name, states))
    for fusion in fusions.values():
        for state in kinds:
            first = states.get(format_state_name(state, fusion.tensors[0]))
            parameter = have.tensors.get(fusion.tensors[0])
            if first is None or parameter is None or first.shape == parameter.shape:
                continue
            for name in (format_state_name(state, other) for other in fusion.tensors[1:] if other in have.tensors):
                states.setdefault(name, replace(first, name=name, spelling=()))
    if have.training is None:
        return have
    return add_states(replace(have, training=replace(have.training, states=states)))


def name_state_arrays(
    have: Manifest, form: ArrayForm, fusions: Mapping[str, TensorFusion]
) -> tuple[Manifest, ArrayForm]:
    """Return the manifest and its arrays, each optimizer state named after the array of its parameter.

    A state that is not cut as its parameter, such as a step, is there once for an array of several experts, and is the
    first one's; where experts have arrays of their own, each gets it, as does each array with a part of a parameter.

    Raises UnsupportedError if states that are cut would not be in one array as their parameters are.
    """
    experts = {fusion.tensors[0]: fusion.tensors[1:] for fusion in fusions.values()}
    states: dict[str, Tensor] = {}
    names = dict(form.names)
    for name, tensor in get_states(have).items():
        state, parameter = _split_name(name)
        places = form.places.get(parameter, ())
        whole = tensor.shape != have.tensors[parameter].shape
        arrays = [place.array for place in places if not place.position] if places else form.names[parameter][:1]
        if name in form.places or (whole and not arrays):
            states |= {name: tensor} if name in form.places else {}
            continue
        if places and not whole:
            raise UnsupportedError(
                f"{places[0].array} is one array of several experts, but not all of them have a state {state}",
                hint="add --experts split, or --optimizer-states drop",
            )
        states[name] = tensor
        names[name] = tuple(format_state_name(state, array) for array in arrays)
        for other in experts.get(parameter, ()) if not places and whole else ():
            copy = format_state_name(state, other)
            if other in have.tensors and copy not in get_states(have):
                states[copy] = replace(tensor, name=copy, spelling=())
                names[copy] = (format_state_name(state, form.names[other][0]),)
    if have.training is None:
        return have, form
    weights = {name: tensor for name, tensor in have.tensors.items() if name not in have.training.states}
    training = replace(have.training, states=states)
    return add_states(replace(have, tensors=weights, training=training)), replace(form, names=names)


def _split_name(name: str) -> tuple[str, str]:
    return split_state_name(name) or ("", name)


def build_specs(model: Model, have: Manifest) -> dict[str, PartitionSpec]:
    """Build how each tensor is cut: an optimizer state as its parameter, if it has as many dims, else not at all."""
    of_model = model.tensors
    if have.tensors.keys() <= of_model.keys():
        return {name: of_model[name].spec for name in have.tensors}
    found = {}
    for name, tensor in have.tensors.items():
        known = of_model.get(name)
        if known is not None:
            found[name] = known.spec
            continue
        _, parameter = _split_name(name)
        spec = of_model[parameter].spec
        same = len(spec.cuts) == len(tensor.shape)
        found[name] = spec if same else replace(spec, cuts=((),) * len(tensor.shape))
    return found


def build_settings_file(have: Manifest, layout: Layout) -> Iterator[OpaqueObject]:
    """Build the file that says step and hyper-parameters, where the layout has no other place for them."""
    if have.training is not None and layout.states != "by default" and not layout.own_settings:
        content = encode_settings(have.training)
        yield OpaqueObject(SETTINGS, "synthesise", size=len(content), content=content)
