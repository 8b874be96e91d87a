"""Reads optimizer states without ZeRO: all in the module's file, under numbers instead of names.

DeepSpeed `runtime/fp16/unfused_optimizer.py` and `fused_optimizer.py` (`state_dict`), and torch's optimizers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from shardctl.libraries.deepspeed.geometry import FlatPartition, list_joined_runs
from shardctl.libraries.deepspeed.optimizer_states import parse_group_settings
from shardctl.libraries.deepspeed.partitions import add_number
from shardctl.libraries.deepspeed.values import as_array, as_dict, as_list, parse_flat_array

if TYPE_CHECKING:
    from shardctl.libraries.deepspeed.checkpoint_pieces import CheckpointPieces
    from shardctl.libraries.deepspeed.model_states import ModelState

_OPTIMIZER_STATE_KEY: Final = "optimizer_state_dict"
_MASTER_GROUPS_KEY: Final = "fp32_groups"
_FLAT_MASTER_GROUPS_KEY: Final = "fp32_groups_flat"


def read_optimizer(rank: int, state: ModelState, found: CheckpointPieces) -> None:
    """Note the master weights and states in the file of one model-parallel rank.

    Which number is which parameter is not in the file. It is known where the optimizer has one group, and as many
    parameters of the same shapes as the module: then they follow one another as there. Else the optimizer is left
    behind, with a warning.
    """
    top = as_dict(state.optimizer)
    base = as_dict(top.get(_OPTIMIZER_STATE_KEY)) or top
    groups = [as_dict(group) for group in as_list(base.get("param_groups"))]
    if state.saved is None or not groups:
        return
    names = _list_parameters(state)
    numbers = [n for group in groups for n in as_list(group.get("params"))]
    states = {n: _collect_arrays(state, node) for n, node in as_dict(base.get("state")).items()}
    if len(groups) != 1 or len(names) != len(numbers) or not _has_fitting_states(state, names, numbers, states):
        found.warnings.append(
            f"{state.path}: the optimizer is left behind, because without ZeRO its states have "
            "numbers instead of names, "
            f"and their parameters cannot be identified ({len(groups)} groups, {len(numbers)} of "
            f"{len(names)} parameters)"
        )
        return
    found.parameters |= dict.fromkeys(names)
    ((_, values),) = parse_group_settings(groups, 0)
    found.groups.setdefault(0, ({}, values))[0].update(dict.fromkeys(names))
    for number, name in zip(numbers, names, strict=True):
        for key, value in states.get(number, {}).items():
            if value.shape == state.module[name].shape:
                found.state(key).add_array(name, rank, value)
            else:
                add_number(found.state(key), name, rank, value)
    _read_master(rank, state, top, names, found)


def _read_master(rank: int, state: ModelState, top: dict[Any, Any], names: list[str], found: CheckpointPieces) -> None:
    if state.saved is None:
        return
    apart = as_list(top.get(_MASTER_GROUPS_KEY))
    for name, node in zip(names, as_list(apart[0]) if len(apart) == 1 else (), strict=False):
        array = as_array(state.saved, node, f"{_MASTER_GROUPS_KEY} of {name}")
        if array is not None and array.shape == state.module[name].shape:
            found.master.add_array(name, rank, array)
    flats = as_list(top.get(_FLAT_MASTER_GROUPS_KEY))
    if len(flats) == 1:
        array = parse_flat_array(state.saved, flats[0], _FLAT_MASTER_GROUPS_KEY)
        shapes = {name: state.module[name].shape for name in names}
        for name, run in list_joined_runs(shapes, FlatPartition(0, 1), array.size):
            found.master.add_run(name, rank, shapes[name], array, run)


def _collect_arrays(state: ModelState, node: object) -> dict[str, Any]:
    found = {}
    for key, value in as_dict(node).items():
        array = as_array(state.saved, value, str(key)[:200]) if state.saved is not None else None
        if array is not None:
            found[str(key)[:200]] = array
    return found


def _list_parameters(state: ModelState) -> list[str]:
    """List the module's parameters, in its order; a tied one once."""
    seen = set()
    names = []
    for name, array in state.module.items():
        if name not in (state.buffers or ()) and (array not in seen or not array.size):
            seen.add(array)
            names.append(name)
    return names


def _has_fitting_states(
    state: ModelState, names: list[str], numbers: list[Any], states: dict[Any, dict[str, Any]]
) -> bool:
    """Return whether every state is as its parameter or one number."""
    for number, name in zip(numbers, names, strict=True):
        if type(number) is not int:
            return False
        shape = state.module[name].shape
        if any(array.shape not in {shape, (), (1,)} for array in states.get(number, {}).values()):
            return False
    return True
