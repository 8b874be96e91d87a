"""Pairs the optimizer states of two checkpoints, and compares the settings that trainers keep beside them."""

from __future__ import annotations

import json
from dataclasses import field, replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import format_first_few
from shardctl.base.value import value_class
from shardctl.tensors.training import COUNTED, STEP, add_steps, format_state_name, split_state_name
from shardctl.verify.finding import CheckFinding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardctl.base.settings import Setting
    from shardctl.checkpoint.opened_checkpoint import OpenedCheckpoint
    from shardctl.tensors.manifest import Manifest, Tensor, TrainingState

_PARAM_GROUP_SETTING_KEYS: Final = (
    *("lr", "lr_mult", "min_lr", "max_lr", "weight_decay", "wd_mult", "decoupled_weight_decay"),
    *("betas", "eps", "amsgrad", "maximize", "momentum", "nesterov"),
)
"""What decides the next step of a parameter; other keys of a group say how a library runs it, or where."""


@value_class
class OptimizerChange:
    """A setting of the optimizers that is not the same."""

    name: str
    """`step`, or a key of a group of parameters such as `lr`."""
    a: str
    """The value of the first checkpoint, as JSON."""
    b: str
    parameters: tuple[str, ...] = ()
    """The parameters that have these values; empty for the number of steps."""

    @property
    def where(self) -> str:
        """For which parameters, in words."""
        return f" for {format_first_few(self.parameters)}" if self.parameters else ""


@value_class
class PairedStates:
    """The optimizer states of two checkpoints; both empty where they are not compared."""

    ours: Mapping[str, Tensor] = field(default_factory=dict)
    theirs: Mapping[str, Tensor] = field(default_factory=dict)
    settings: tuple[OptimizerChange, ...] = ()
    uncompared: str = ""
    """What is not compared, and why, if only one of the two has states."""


def pair_states(a: OpenedCheckpoint, b: OpenedCheckpoint) -> PairedStates:
    """Pair the states of `a` with those of `b`.

    Some trainers count steps for each parameter, others once for all or for each array; the states of both are made to
    have one for each parameter, so that a conversion between trainers has the same states.
    """
    first, second = a.manifest, b.manifest
    ours, theirs = _get_states(first), _get_states(second)
    if not ours or not theirs:
        lacking = [each for each, states in ((a, ours), (b, theirs)) if not states]
        return PairedStates(uncompared=_describe_lack(lacking[0]) if len(lacking) == 1 else "")
    assert first.training is not None  # noqa: S101 - both have states
    assert second.training is not None  # noqa: S101
    settings = tuple(_compare_settings(first.training, second.training))
    if not _counts_steps(ours) and not _counts_steps(theirs):
        steps = first.training.step, second.training.step
        if None not in steps and steps[0] != steps[1]:
            settings = (OptimizerChange(STEP, str(steps[0]), str(steps[1])), *settings)
        return PairedStates(ours, theirs, settings)
    ours, theirs = (_spread_steps(_get_states(add_steps(each))) for each in (first, second))
    if _counts_steps(ours) != _counts_steps(theirs):  # one of the two does not know any number of steps
        ours, theirs = (_drop_steps(each) for each in (ours, theirs))
    return PairedStates(ours, theirs, settings)


def check_optimizer_settings(states: PairedStates) -> Iterator[CheckFinding]:
    """Yield an error for each setting of the optimizer that is not the source's."""
    for each in states.settings:
        message = f"the optimizer has {each.name} {each.a}{each.where}; that of the source has {each.b}"
        yield CheckFinding("error", "optimizer", message)


def _get_states(manifest: Manifest) -> Mapping[str, Tensor]:
    return manifest.training.states if manifest.training is not None else {}


def _compare_settings(ours: TrainingState, theirs: TrainingState) -> Iterator[OptimizerChange]:
    """Compare what both say of a parameter."""
    first, second = _list_settings(ours), _list_settings(theirs)
    for key in _PARAM_GROUP_SETTING_KEYS:
        changed: dict[tuple[str, str], list[str]] = {}
        for parameter in first.keys() & second.keys():
            a, b = first[parameter].get(key), second[parameter].get(key)
            if a is not None and b is not None and a != b:
                changed.setdefault((json.dumps(a), json.dumps(b)), []).append(parameter)
        for values, parameters in sorted(changed.items()):
            yield OptimizerChange(key, *values, tuple(sorted(parameters)))


def _list_settings(training: TrainingState) -> dict[str, Mapping[str, Setting]]:
    return {parameter: group.settings for group in training.groups for parameter in group.parameters}


def _counts_steps(states: Mapping[str, Tensor]) -> bool:
    return any(_split_name(name)[0] == STEP for name in states)


def _split_name(name: str) -> tuple[str, str]:
    return split_state_name(name) or ("", name)


def _spread_steps(states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give each parameter the step of the array that holds its moments: an array of several experts has it once."""
    split = {name: _split_name(name) for name in states}
    arrays = {
        parameter: states[name].chunks[0].name
        for name, (kind, parameter) in split.items()
        if kind == COUNTED and states[name].chunks
    }
    counted = {arrays.get(parameter): states[name] for name, (kind, parameter) in split.items() if kind == STEP}
    spread = {
        format_state_name(STEP, parameter): counted[array] for parameter, array in arrays.items() if array in counted
    }
    return {**{name: replace(step, name=name) for name, step in spread.items()}, **states}


def _drop_steps(states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in states.items() if _split_name(name)[0] != STEP}


def _describe_lack(checkpoint: OpenedCheckpoint) -> str:
    training = checkpoint.manifest.training
    unreadable = training.unreadable if training is not None else ""
    if unreadable:
        return f"optimizer states, because those of {checkpoint.source.name} cannot be read: {unreadable}"
    return f"optimizer states, because {checkpoint.source.name} has none"
