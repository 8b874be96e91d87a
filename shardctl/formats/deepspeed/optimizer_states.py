"""What a `*_optim_states.pt` says: one rank's flat partitions of the fp32 master weights and of optimizer states.

Written by DeepSpeed `runtime/zero/stage_1_and_2.py` (`state_dict`), `runtime/zero/stage3.py` (`_rigid_state_dict`) and
`runtime/bf16_optimizer.py` (`state_dict`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from shardctl.errors import SourceError, UnsupportedError
from shardctl.formats.deepspeed.geometry import Partition
from shardctl.formats.deepspeed.values import Array, flat, integer, is_name, items, number, table, tensor
from shardctl.formats.pickle_tree import Call, mapping
from shardctl.formats.torch_save import open_saved
from shardctl.settings import as_setting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.formats.torch_tensors import Saved
    from shardctl.settings import Setting
    from shardctl.storage import Source

_STATE: Final = "optimizer_state_dict"
_JOINED: Final = "single_partition_of_fp32_groups"
_SCATTERED: Final = "fp32_flat_groups"
_BASE: Final = "base_optimizer_state"
_STEP: Final = "step"
WEIGHTS: Final = 3
"""The stage that parts weights, too."""


@dataclass(slots=True)
class Flats:
    """One group of parameters, made flat: this rank's part."""

    master: Array
    part: Partition
    length: int
    """Elements of each part, with its padding."""
    paddings: tuple[int, ...] = ()
    """Zeros after each parameter."""
    states: dict[str, Array] = field(default_factory=dict)
    """Those of the optimizer that are as long as the part, by name."""
    numbers: dict[str, Array | float] = field(default_factory=dict)
    """Those that are one number for the whole group."""
    mapped: dict[str, tuple[int, int]] = field(default_factory=dict)
    """What the file itself says of the parameters in the part: how many elements of each, and from which on."""
    strange: list[str] = field(default_factory=list)
    """States of another kind."""


@dataclass(slots=True)
class OptimizerState:
    """One rank's file, read."""

    path: str
    stage: int | None
    """Of ZeRO; None for BF16_Optimizer, which is not one of them."""
    groups: list[Flats]
    settings: list[tuple[tuple[int, ...], dict[str, Setting]]]
    """Per group of parameters the numbers of its flat groups, and its hyper-parameters."""
    world: int = 1
    """Data-parallel ranks."""


def read_optimizer_state(source: Source, path: str, rank: int, world: int) -> OptimizerState:
    """Read one file, of data-parallel `rank`; `world` is their number, if the file does not say it.

    Raises:
        SourceError: it is damaged, or not what its name says.
        HostileError: it tries to run code or to exhaust the reader.
        UnsupportedError: a kind of partition that is not converted.
    """
    saved = open_saved(source, path)
    tree = mapping(saved.tree)
    state = mapping((tree or {}).get(_STATE))
    if tree is None or state is None:
        raise SourceError(f"{path} is not the state of an optimizer: it has no entry {_STATE!r}")
    world = max((integer(n) or 0 for n in _counts(state.get("partition_count"))), default=0) or world
    if _SCATTERED in state:
        found = _scattered(saved, state, rank, world)
    elif _JOINED in state:
        found = _joined(saved, state, rank, world)
        if _is_shuffled(tree):
            for flats in found.groups:
                flats.mapped = {}
    else:
        raise UnsupportedError(f"{path} has no flat partitions of weights; it was not written by a ZeRO optimizer")
    found.world = world
    return found


def _is_shuffled(tree: Mapping[Any, Any]) -> bool:
    """Whether parameters were handed to ranks in turn: DeepSpeed then maps them as if they had not been."""
    zero = table(table(tree.get("ds_config")).get("zero_optimization"))
    return bool(zero.get("round_robin_gradients"))


def _joined(saved: Saved, state: Mapping[Any, Any], rank: int, world: int) -> OptimizerState:
    """Stages 1 and 2, and BF16_Optimizer, whose parts keep their padding and which says no stage."""
    stage = integer(state.get("zero_stage"))
    base = state.get(_BASE)
    elastic = isinstance(base, list)
    by_group = items(base) if elastic else table(table(base).get("state"))
    groups = []
    for place, node in enumerate(items(state[_JOINED])):
        master = flat(saved, node, f"{_JOINED}[{place}]")
        padding = _nth(state.get("group_paddings"), place)
        length = master.size + ((padding or 0) if stage is not None else 0)
        part = _part(saved.path, _nth(state.get("partition_count"), place), rank, world)
        paddings = items(_item(state.get("param_alignment_paddings"), place))
        found = Flats(master, part, length, tuple(integer(n) or 0 for n in paddings))
        for name, address in table(_item(state.get("param_slice_mappings"), place)).items():
            found.mapped[name] = _address(saved.path, address)
        values = _item(by_group, place) if elastic else table(by_group).get(place)
        _sort_states(saved, found, values)
        if elastic and integer(state.get("base_optimizer_state_step")) is not None:
            found.numbers.setdefault(_STEP, float(state["base_optimizer_state_step"]))
        groups.append(found)
    settings = _settings([] if elastic else items(table(base).get("param_groups")), groups)
    return OptimizerState(saved.path, stage, groups, settings)


def _scattered(saved: Saved, state: Mapping[Any, Any], rank: int, world: int) -> OptimizerState:
    """Stage 3."""
    base = table(state.get(_STATE))
    by_group = table(base.get("state"))
    parts = items(state.get("ds_zero_partition_groups"))
    groups = []
    for place, node in enumerate(items(state[_SCATTERED])):
        master = flat(saved, node, f"{_SCATTERED}[{place}]")
        own = table(parts[place]) if place < len(parts) else {}
        count = integer(own.get("partition_count")) or world
        at = integer(own.get("partition_rank"))
        kinds = max(1, world // count)
        part = Partition(rank // kinds if at is None else at, count, rank % kinds, kinds)
        found = Flats(master, part, master.size)
        _sort_states(saved, found, by_group.get(place))
        groups.append(found)
    return OptimizerState(
        saved.path, integer(state.get("zero_stage")), groups, _settings(items(base.get("param_groups")), groups)
    )


def _sort_states(saved: Saved, found: Flats, node: object) -> None:
    for key, value in table(node).items():
        name = str(key)[:200]
        held = tensor(saved, value, name)
        if held is not None and held.size == 1 and (held.shape == () or found.length != 1):
            found.numbers[name] = held
        elif held is not None and len(held.shape) == 1 and held.size in {found.length, found.master.size}:
            found.states[name] = flat(saved, value, name)
        elif held is None and (said := number(value)) is not None:
            found.numbers[name] = said
        elif value is not None:
            found.strange.append(name)


def settings(nodes: list[Any], groups: int) -> list[tuple[tuple[int, ...], dict[str, Setting]]]:
    """Per group of parameters the numbers of its flat groups, of which there are `groups`, and hyper-parameters."""
    found = []
    for node in nodes:
        held = table(node)
        members = tuple(n for n in items(held.get("params")) if type(n) is int and 0 <= n < groups)
        values = {
            key: value[0]
            for key, node in held.items()
            if is_name(key) and key != "params" and (value := as_setting(node)) is not None
        }
        found.append((members, values))
    return found


def _settings(nodes: list[Any], groups: list[Flats]) -> list[tuple[tuple[int, ...], dict[str, Setting]]]:
    """Hyper-parameters; some optimizers keep the member of steps among them."""
    found = settings(nodes, len(groups))
    for members, values in found:
        step = integer(values.get(_STEP))
        for member in members if step is not None else ():
            groups[member].numbers.setdefault(_STEP, float(step or 0))
    return found


def _part(path: str, count: object, rank: int, world: int) -> Partition:
    """Which part a rank has. Experts are in fewer parts than there are ranks, each on ranks of different experts."""
    parts = integer(count) or world
    if world % parts:
        raise SourceError(f"{path} is of {world} data-parallel ranks, but has a group in {parts} parts")
    kinds = world // parts
    return Partition(rank // kinds, parts, rank % kinds, kinds)


def _address(path: str, node: object) -> tuple[int, int]:
    """The numbers of a pickled `fragment_address`: how many, from which on."""
    state = mapping(node.state) if isinstance(node, Call) else None
    if isinstance(node, Call) and state is None and node.kwargs:
        state = node.kwargs
    numel, start = (integer(state.get("numel")), integer(state.get("start"))) if state else (None, None)
    if numel is None or start is None:
        raise SourceError(f"{path} is malformed: the place of a parameter has no start and length")
    return numel, start


def _counts(node: object) -> list[Any]:
    """Parts per group, or the one number for all."""
    return items(node) or [node]


def _nth(node: object, place: int) -> int | None:
    """The number at a place of a list, or the one number that is there in place of a list."""
    return integer(_item(node, place)) if isinstance(node, list | tuple) else integer(node)


def _item(node: object, place: int) -> Any:  # noqa: ANN401 - a node of a tree
    parts = items(node)
    return parts[place] if place < len(parts) else None
