"""What becomes of the optimizer in a conversion: whether its states travel along, and how they are cut."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

from shardctl.errors import UnsupportedError, UsageError
from shardctl.layouts import hf, ranks
from shardctl.manifest import Opaque
from shardctl.training import SETTINGS, dump_settings, split_state, with_states

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from shardctl.layouts.form import Form
    from shardctl.manifest import Manifest, Tensor
    from shardctl.models import Model
    from shardctl.placement import Spec

States = Literal["keep", "drop"] | None
"""What `--optimizer-states` says; None leaves it to the layout."""

_SERVING: Final = (hf.NAME, ranks.NAME)
"""Layouts that are read to run a model: they get optimizer states only if somebody asks for them."""


def with_optimizer(have: Manifest, wished: States, layout: str) -> Manifest:
    """The manifest with its optimizer states among its tensors if they travel along, else without any training.

    Raises UsageError if they are asked for and there are none, or the layout has no place for them.
    """
    there = have.training is not None and bool(have.training.states)
    if wished == "keep" and not there:
        raise UsageError("--optimizer-states keep, but the source has no optimizer states", hint="leave it out")
    if wished == "keep" and layout == hf.NAME:
        raise UsageError(
            f"layout {layout} has no place for optimizer states",
            hint="use --to dcp or --to ranks, or leave --optimizer-states out",
        )
    if wished == "keep" or (wished is None and layout not in _SERVING):
        return with_states(have)
    return replace(have, training=None)


def filtered_states(have: Manifest, parameters: Collection[str]) -> Manifest:
    """The manifest with the states of these parameters only."""
    if have.training is None:
        return have
    kept = {n: t for n, t in have.training.states.items() if (split_state(n) or ("", ""))[1] in parameters}
    return replace(have, training=replace(have.training, states=kept))


def states_of(have: Manifest) -> Mapping[str, Tensor]:
    """The optimizer states of a manifest, by name."""
    return have.training.states if have.training is not None else {}


def check_form(have: Manifest, form: Form) -> None:
    """Raise UnsupportedError if optimizer states would be written apart where their parameters are written in one."""
    for name in states_of(have):
        state, parameter = split_state(name) or ("", name)
        place = form.places.get(parameter)
        if place is not None:
            raise UnsupportedError(
                f"{place.array} is one array of several experts, and the {state} of each is kept by itself",
                hint="add --experts split, or --optimizer-states drop",
            )


def specs(model: Model, have: Manifest) -> dict[str, Spec]:
    """How each tensor is cut: an optimizer state as its parameter, if it has as many dims, else not at all."""
    found = {}
    for name, tensor in have.tensors.items():
        known = model.tensors.get(name)
        if known is not None:
            found[name] = known.spec
            continue
        _, parameter = split_state(name) or ("", name)
        spec = model.tensors[parameter].spec
        same = len(spec.cuts) == len(tensor.shape)
        found[name] = spec if same else replace(spec, cuts=((),) * len(tensor.shape))
    return found


def settings_file(have: Manifest, layout: str) -> Iterator[Opaque]:
    """The file that says step and hyper-parameters, where the layout has no other place for them."""
    if have.training is not None and layout in _SERVING:
        content = dump_settings(have.training)
        yield Opaque(SETTINGS, "synthesise", size=len(content), content=content)
