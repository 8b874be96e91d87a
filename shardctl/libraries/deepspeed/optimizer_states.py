"""Reads a `*_optim_states.pt`: one rank's flat partitions of master weights and optimizer states.

Written by DeepSpeed `runtime/zero/stage_1_and_2.py` (`state_dict`), `runtime/zero/stage3.py` (`_rigid_state_dict`) and
`runtime/bf16_optimizer.py` (`state_dict`).
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.base.settings import as_setting
from shardctl.base.value import state_class
from shardctl.libraries.deepspeed.geometry import FlatPartition
from shardctl.libraries.deepspeed.values import (
    FileArray,
    as_array,
    as_dict,
    as_integer,
    as_list,
    as_number,
    is_name,
    parse_flat_array,
)
from shardctl.libraries.torch_save.pickle_tree import CallNode, as_mapping
from shardctl.libraries.torch_save.reading import open_saved

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.base.settings import Setting
    from shardctl.libraries.torch_save.tensors import SavedFile
    from shardctl.storage import Source

_OPTIMIZER_STATE_KEY: Final = "optimizer_state_dict"
_FLAT_PARTITION_KEY: Final = "single_partition_of_fp32_groups"
_FLAT_GROUPS_KEY: Final = "fp32_flat_groups"
_BASE_STATE_KEY: Final = "base_optimizer_state"
_STEP_KEY: Final = "step"
WEIGHTS: Final = 3
"""The stage that parts weights, too."""


@state_class
class FlatGroup:
    """One group of parameters, made flat: this rank's part."""

    master: FileArray
    part: FlatPartition
    length: int
    """Elements of each part, with its padding."""
    paddings: tuple[int, ...] = ()
    """Zeros after each parameter."""
    states: dict[str, FileArray] = field(default_factory=dict)
    """Those of the optimizer that are as long as the part, by name."""
    numbers: dict[str, FileArray | float] = field(default_factory=dict)
    """Those that are one number for the whole group."""
    mapped: dict[str, tuple[int, int]] = field(default_factory=dict)
    """What the file itself says of the parameters in the part: how many elements of each, and from which on."""
    strange: list[str] = field(default_factory=list)
    """States of another kind."""


@state_class
class OptimizerState:
    """One rank's file, read."""

    path: str
    stage: int | None
    """Of ZeRO; None for BF16_Optimizer, which is not one of them."""
    groups: list[FlatGroup]
    settings: list[tuple[tuple[int, ...], dict[str, Setting]]]
    """Per group of parameters the numbers of its flat groups, and its hyper-parameters."""
    world: int = 1
    """Data-parallel ranks."""
    clipping: float | None = None
    """The norm to which gradients were clipped, 0 for none."""


def read_optimizer_state(source: Source, path: str, rank: int, world: int) -> OptimizerState:
    """Read one file, of data-parallel `rank`; `world` is their number, if the file does not say it.

    Raises:
        SourceError: it is damaged, or not what its name says.
        HostileError: it tries to run code or to exhaust the reader.
        UnsupportedError: a kind of partition that is not converted.
    """
    saved = open_saved(source, path)
    tree = as_mapping(saved.tree)
    state = as_mapping((tree or {}).get(_OPTIMIZER_STATE_KEY))
    if tree is None or state is None:
        raise SourceError(f"{path} is not the state of an optimizer: it has no entry {_OPTIMIZER_STATE_KEY!r}")
    world = max((as_integer(n) or 0 for n in _list_part_counts(state.get("partition_count"))), default=0) or world
    if _FLAT_GROUPS_KEY in state:
        found = _parse_scattered_state(saved, state, rank, world)
    elif _FLAT_PARTITION_KEY in state:
        found = _parse_joined_state(saved, state, rank, world)
        if _is_shuffled(tree):
            for flats in found.groups:
                flats.mapped = {}
    else:
        raise UnsupportedError(f"{path} has no flat partitions of weights; it was not written by a ZeRO optimizer")
    found.world = world
    said = as_dict(tree.get("ds_config")).get("gradient_clipping")  # stage 3 has it there alone, if it was given
    found.clipping = as_number(state.get("clip_grad", said))
    return found


def _is_shuffled(tree: Mapping[Any, Any]) -> bool:
    """Return whether parameters were handed to ranks in turn: DeepSpeed then maps them as if they had not been."""
    zero = as_dict(as_dict(tree.get("ds_config")).get("zero_optimization"))
    return bool(zero.get("round_robin_gradients"))


def _parse_joined_state(saved: SavedFile, state: Mapping[Any, Any], rank: int, world: int) -> OptimizerState:
    """Parse stages 1 and 2, and BF16_Optimizer, whose parts keep their padding and which says no stage."""
    stage = as_integer(state.get("zero_stage"))
    base = state.get(_BASE_STATE_KEY)
    elastic = isinstance(base, list)
    by_group = as_list(base) if elastic else as_dict(as_dict(base).get("state"))
    groups = []
    for place, node in enumerate(as_list(state[_FLAT_PARTITION_KEY])):
        master = parse_flat_array(saved, node, f"{_FLAT_PARTITION_KEY}[{place}]")
        padding = _take_integer(state.get("group_paddings"), place)
        length = master.size + ((padding or 0) if stage is not None else 0)
        part = _locate_partition(saved.path, _take_integer(state.get("partition_count"), place), rank, world)
        paddings = as_list(_take_item(state.get("param_alignment_paddings"), place))
        found = FlatGroup(master, part, length, tuple(as_integer(n) or 0 for n in paddings))
        for name, address in as_dict(_take_item(state.get("param_slice_mappings"), place)).items():
            found.mapped[name] = _parse_fragment_address(saved.path, address)
        values = _take_item(by_group, place) if elastic else as_dict(by_group).get(place)
        _sort_states(saved, found, values)
        if elastic and as_integer(state.get("base_optimizer_state_step")) is not None:
            found.numbers.setdefault(_STEP_KEY, float(state["base_optimizer_state_step"]))
        groups.append(found)
    settings = _parse_settings_and_steps([] if elastic else as_list(as_dict(base).get("param_groups")), groups)
    return OptimizerState(saved.path, stage, groups, settings)


def _parse_scattered_state(saved: SavedFile, state: Mapping[Any, Any], rank: int, world: int) -> OptimizerState:
    """Parse stage 3."""
    base = as_dict(state.get(_OPTIMIZER_STATE_KEY))
    by_group = as_dict(base.get("state"))
    parts = as_list(state.get("ds_zero_partition_groups"))
    groups = []
    for place, node in enumerate(as_list(state[_FLAT_GROUPS_KEY])):
        master = parse_flat_array(saved, node, f"{_FLAT_GROUPS_KEY}[{place}]")
        own = as_dict(parts[place]) if place < len(parts) else {}
        count = as_integer(own.get("partition_count")) or world
        at = as_integer(own.get("partition_rank"))
        kinds = max(1, world // count)
        part = FlatPartition(rank // kinds if at is None else at, count, rank % kinds, kinds)
        found = FlatGroup(master, part, master.size)
        _sort_states(saved, found, by_group.get(place))
        groups.append(found)
    return OptimizerState(
        saved.path,
        as_integer(state.get("zero_stage")),
        groups,
        _parse_settings_and_steps(as_list(base.get("param_groups")), groups),
    )


def _sort_states(saved: SavedFile, found: FlatGroup, node: object) -> None:
    for key, value in as_dict(node).items():
        name = str(key)[:200]
        held = as_array(saved, value, name)
        if held is not None and held.size == 1 and (held.shape == () or found.length != 1):
            found.numbers[name] = held
        elif held is not None and len(held.shape) == 1 and held.size in {found.length, found.master.size}:
            found.states[name] = parse_flat_array(saved, value, name)
        elif held is None and (said := as_number(value)) is not None:
            found.numbers[name] = said
        elif value is not None:
            found.strange.append(name)


def parse_group_settings(nodes: list[Any], groups: int) -> list[tuple[tuple[int, ...], dict[str, Setting]]]:
    """Parse, per group of parameters, the numbers of its flat groups (of `groups`) and its hyper-parameters."""
    found = []
    for node in nodes:
        held = as_dict(node)
        members = tuple(n for n in as_list(held.get("params")) if type(n) is int and 0 <= n < groups)
        values = {
            key: value[0]
            for key, node in held.items()
            if is_name(key) and key != "params" and (value := as_setting(node)) is not None
        }
        found.append((members, values))
    return found


def _parse_settings_and_steps(
    nodes: list[Any], groups: list[FlatGroup]
) -> list[tuple[tuple[int, ...], dict[str, Setting]]]:
    """Parse hyper-parameters; some optimizers keep the member of steps among them."""
    found = parse_group_settings(nodes, len(groups))
    for members, values in found:
        step = as_integer(values.get(_STEP_KEY))
        for member in members if step is not None else ():
            groups[member].numbers.setdefault(_STEP_KEY, float(step or 0))
    return found


def _locate_partition(path: str, count: object, rank: int, world: int) -> FlatPartition:
    """Find which part a rank has. Experts are in fewer parts than ranks, each on ranks of different experts."""
    parts = as_integer(count) or world
    if world % parts:
        raise SourceError(f"{path} is of {world} data-parallel ranks, but has a group in {parts} parts")
    kinds = world // parts
    return FlatPartition(rank // kinds, parts, rank % kinds, kinds)


def _parse_fragment_address(path: str, node: object) -> tuple[int, int]:
    """Parse the numbers of a pickled `fragment_address`: how many, from which on."""
    state = as_mapping(node.state) if isinstance(node, CallNode) else None
    if isinstance(node, CallNode) and state is None and node.kwargs:
        state = node.kwargs
    numel, start = (as_integer(state.get("numel")), as_integer(state.get("start"))) if state else (None, None)
    if numel is None or start is None:
        raise SourceError(f"{path} is malformed: the place of a parameter has no start and length")
    return numel, start


def _list_part_counts(node: object) -> list[Any]:
    """List parts per group, or the one number for all."""
    return as_list(node) or [node]


def _take_integer(node: object, place: int) -> int | None:
    """Return the number at a place of a list, or the one number that is there in place of a list."""
    return as_integer(_take_item(node, place)) if isinstance(node, list | tuple) else as_integer(node)


def _take_item(node: object, place: int) -> Any:  # noqa: ANN401 - a node of a tree
    parts = as_list(node)
    return parts[place] if place < len(parts) else None
