"""Plans the optimizer states of `torch_dist` checkpoints, from which Megatron-LM resumes on any mesh.

Every array of trained weights is there once for each state, and once in fp32, which is the optimizer's copy: the
weights that Megatron-LM goes on from (`sharded_param_state_fully_reshardable` of `optimizer/distrib_optimizer.py`).
What is not divided, such as steps and settings, is in `common.pt`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.dtype import BY_NAME
from shardctl.errors import UnsupportedError
from shardctl.libraries.megatron.layers import TITLE
from shardctl.training import format_state_name, split_state_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from shardctl.libraries.arrays.composite import CompositeArray
    from shardctl.libraries.megatron.dist_arrays import StackCell
    from shardctl.libraries.torch_save.pickle_writer import Value
    from shardctl.libraries.writer import PackRequest
    from shardctl.manifest import TrainingState
    from shardctl.settings import Setting

SHARDING: Final = "fully_reshardable"
MASTERS: Final = "param"
"""The state that is the weights themselves."""
SCHEDULE: Final = "opt_param_scheduler"
"""What the learning rate's schedule is called, before the names of its settings."""
_STATES: Final = ("exp_avg", "exp_avg_sq")
_STEP: Final = "step"
_TYPE: Final = BY_NAME["F32"]
_KEY: Final = re.compile(r"optimizer\.state\.[^.]+\.(.+)")
_PLAIN: Final[dict[str | int, Value]] = {
    "wd_mult": 1.0,
    "lr_mult": 1.0,
    "is_decoupled_lr": False,
    "default_config": True,
}
_ADAM: Final[dict[str | int, Value]] = {
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "bias_correction": True,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
"""What torch's Adam and Transformer Engine's expect in a group."""
_NOT_SETTINGS: Final = frozenset({"params", "initial_lr", "is_expert_parallel", "pre_wd_mult", "pre_lr_mult", _STEP})


def find_array_name(key: str) -> str:
    """Find the array that a key is of, or of a state of which it is.

    >>> find_array_name("optimizer.state.exp_avg.output_layer.weight"), find_array_name("output_layer.weight")
    ('output_layer.weight', 'output_layer.weight')
    """
    found = _KEY.fullmatch(key)
    return found[1] if found is not None else key


def list_trained(order: PackRequest) -> frozenset[str]:
    """List the parameters that have states.

    Raises UnsupportedError for a state that Megatron-LM's optimizer has not, or that a parameter has alone.
    """
    held: dict[str, set[str]] = {}
    for name in order.have.training.states if order.have.training is not None else ():
        state, parameter = split_state_name(name) or ("", name)
        if state not in {*_STATES, _STEP}:
            raise UnsupportedError(
                f"{parameter} has a state {state}, and {TITLE}'s optimizer has only {' and '.join(_STATES)}",
                hint="add --optimizer-states drop",
            )
        held.setdefault(parameter, set()).add(state)
    for parameter, states in held.items():
        missing = [state for state in _STATES if state not in states]
        if missing:
            raise UnsupportedError(f"{parameter} has no state {missing[0]}", hint="add --optimizer-states drop")
    return frozenset(held)


def list_state_cells(cells: Collection[StackCell], trained: Collection[str]) -> Iterator[StackCell]:
    """List the cells of every state of the arrays of `cells`; raises UnsupportedError for one trained in part."""
    for cell in cells:
        tensors = {piece.tensor for composite in cell.pieces for piece in composite.pieces}
        if tensors.isdisjoint(trained):
            continue
        if not tensors <= set(trained):
            raise UnsupportedError(
                f"{cell.name} of {TITLE} has optimizer states for all of {', '.join(sorted(tensors))}, or for none",
                hint="add --optimizer-states drop",
            )
        for state in (MASTERS, *_STATES):
            pieces = cell.pieces if state == MASTERS else tuple(_rename_pieces(each, state) for each in cell.pieces)
            yield replace(cell, name=f"optimizer.state.{state}.{cell.name}", pieces=pieces, dtype=_TYPE)


def _rename_pieces(content: CompositeArray, state: str) -> CompositeArray:
    pieces = (replace(piece, tensor=format_state_name(state, piece.tensor)) for piece in content.pieces)
    return replace(content, pieces=tuple(pieces))


def build_optimizer_state(training: TrainingState, *, routed: bool) -> dict[str | int, Value]:
    """Build what all ranks of the optimizer share; if `routed`, experts have an optimizer of their own."""
    common: list[dict[str | int, Value]] = []
    for expert in (False, True)[: 1 + routed]:
        groups: list[Value] = [_build_group(training, expert=expert, decayed=each) for each in (True, False)]
        common.append({"optimizer": {"param_groups": groups}, "param_state_sharding_type": SHARDING})
    return dict(enumerate(common)) if routed else common[0]


def _build_group(training: TrainingState, *, expert: bool, decayed: bool) -> dict[str | int, Value]:
    """Build the settings of the group of matrices, or of vectors, which have no weight decay."""
    settings = _find_settings(training, expert=expert, decayed=decayed)
    rate = settings.get("lr", 0.0)
    kept: dict[str | int, Value] = {name: value for name, value in settings.items() if name not in _NOT_SETTINGS}
    found: dict[str | int, Value] = {
        **_PLAIN,
        "max_lr": settings.get("initial_lr", rate),
        "min_lr": 0.0,
        **_ADAM,
        "lr": rate,
        "weight_decay": 0.0,
        **kept,
        "is_expert_parallel": expert,
        "wd_mult": 1.0 if decayed else 0.0,
        "step": training.step or 0,
    }
    return found


def _find_settings(training: TrainingState, *, expert: bool, decayed: bool) -> Mapping[str, Setting]:
    """Find the settings of the group that is most like the one that is asked for."""

    def unlike(settings: Mapping[str, Setting]) -> tuple[bool, bool]:
        has_decay = settings.get("wd_mult", settings.get("weight_decay", 0.0)) != 0.0
        return has_decay != decayed, bool(settings.get("is_expert_parallel")) != expert

    return min((group.settings for group in training.groups), key=unlike, default={})


def build_schedule(training: TrainingState) -> dict[str | int, Value]:
    """Build the state of the learning rate's schedule, with what is known of it."""
    settings = _find_settings(training, expert=False, decayed=True)
    rate, decay = settings.get("initial_lr", settings.get("lr", 0.0)), settings.get("weight_decay", 0.0)
    found: dict[str | int, Value] = {
        "max_lr": rate,
        "lr_warmup_steps": 0,
        "num_steps": 0,
        "lr_decay_style": "constant",
        "lr_decay_steps": 1,
        "min_lr": 0.0,
        "start_wd": decay,
        "end_wd": decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": 1,
    }
    before = f"{SCHEDULE}/"
    return found | {k.removeprefix(before): v for k, v in training.progress.items() if k.startswith(before)}


def note_unknown_progress(training: TrainingState) -> Iterator[str]:
    """Note what Megatron-LM has to be told, because the source does not say it."""
    if not training.progress:
        rate = _find_settings(training, expert=False, decayed=True)
        yield (
            f"the schedule of the learning rate and the samples seen are not known: start {TITLE} with "
            "--override-opt_param-scheduler, and from core 0.19 on with --min-lr 0 and --lr "
            f"{rate.get('initial_lr', rate.get('lr', 0.0))}, by which it finds the groups of parameters"
        )
