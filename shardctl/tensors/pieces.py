"""Applies rules to a mesh: computes which boxes each rank holds, and which layers each stage has.

>>> balance_stages([1, 1, 1, 1], first=2, last=0, count=2)  # layers per stage
(1, 3)
>>> parse_stages("3,1", layers=4, count=2)
(3, 1)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import field
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import PartitionError, UsageError
from shardctl.base.value import state_class, value_class
from shardctl.tensors.mesh import REPLICATING, build_holding_key
from shardctl.tensors.placement import check_cuts, compute_held_boxes, find_holder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from shardctl.tensors.box import Box
    from shardctl.tensors.manifest import Tensor
    from shardctl.tensors.mesh import Mesh
    from shardctl.tensors.placement import PartitionSpec

_REMAINDER_STAGES_BY_DIVISION: Final = {
    "transformers": "first",
    "transformers@5.24": "first",
    "transformers@5.23": "last",
}
"""Names for the division of layers that versions of transformers make: which stages have those that are left over."""

_HeldTensors = list[tuple[int, "Tensor", tuple[str, ...]]]
"""The place of each in the model, the tensor, and its names on the stage that holds it."""


@state_class
class _StageGroups:
    """The tensors of a pipeline stage, those together of which a rank holds the same boxes, or none."""

    held_by: dict[tuple[str, int] | None, dict[int, _HeldTensors]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    """By which rank of which axis holds them, None for those that no axis divides whole; then by their kind."""

    def find_held(self, at: Mapping[str, int]) -> Iterator[tuple[int, _HeldTensors]]:
        """Yield the groups that the rank at `at` may hold something of, each with its kind."""
        axes = dict.fromkeys(holder[0] for holder in self.held_by if holder is not None)
        for holder in (None, *((axis, at[axis]) for axis in axes)):
            yield from self.held_by.get(holder, {}).items()


@state_class
class _RuleGroup:
    """The tensors of one rule: those of a layer that are cut alike."""

    rule: PartitionSpec
    on: list[int]
    """The stages that hold them."""
    holders: dict[int, tuple[str, int]] = field(default_factory=dict)
    """By the number of an expert, which rank of which axis holds it."""
    kinds: dict[tuple[int, ...], int] = field(default_factory=dict)
    """By shape, the number of the kind."""
    names: int = 0
    """How many names they have together."""


class _TensorGroups:
    """The tensors of a checkpoint by kind, of which a model has few: by shape and cuts, all experts of a kind as one.

    The rows of a table share their cuts, so cuts are told apart by which object they are: to hash them would take
    longer than all else here, and two kinds that are equal do no harm.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor],
        specs: Mapping[str, PartitionSpec],
        mesh: Mesh,
        stages: Sequence[int],
        names: Mapping[str, tuple[str, ...]],
    ) -> None:
        self.kinds: list[tuple[tuple[int, ...], PartitionSpec]] = []
        """The shape of each kind, and the cuts."""
        self._mesh = mesh
        self._examples: list[str] = []
        self._numbers: dict[tuple[object, ...], int] = {}
        self._rules: dict[int, _RuleGroup] = {}
        self._stage_of_layer = [stage for stage, count in enumerate(stages) for _ in range(count)]
        self.stages = [_StageGroups() for _ in range(mesh.degree("pp"))]
        """What each pipeline stage holds."""
        self._add_all(tensors, specs, names)

    def guess_boxes(self) -> int:
        """Guess how many boxes all ranks hold, once for each name, as if each rank that may hold a tensor held one."""
        stage, total = self._mesh.world // self._mesh.degree("pp"), 0
        for group in self._rules.values():
            member = group.rule.member
            held = stage if member is None else stage // self._mesh.degree(member.axis)
            total += held * len(group.rule.where) * group.names
        return total

    def check(self) -> None:
        """Raise PartitionError, naming a tensor, if the mesh cannot cut it."""
        beside = [spec for _, spec in self.kinds]
        for name, (shape, spec) in zip(self._examples, self.kinds, strict=True):
            check_cuts(name, shape, spec, self._mesh, beside=beside)

    def _add_all(
        self, tensors: Iterable[Tensor], specs: Mapping[str, PartitionSpec], names: Mapping[str, tuple[str, ...]]
    ) -> None:
        rules, stages = self._rules, self.stages
        for turn, tensor in enumerate(tensors):
            name = tensor.name
            spec = specs[name]
            group = rules.get(id(spec.rule)) or self._add_rule(spec.rule)
            number = group.kinds.get(tensor.shape)
            if number is None:
                number = group.kinds[tensor.shape] = self._find_kind(tensor, spec)
            holder, member = None, spec.member
            if member is not None:
                holder = group.holders.get(member.index)
                if holder is None:
                    holder = group.holders[member.index] = member.axis, find_holder(member, self._mesh)
            group.names += 1 + len(tensor.ties)
            called = names.get(name) or (name, *tensor.ties)
            on = group.on
            for place, stage in enumerate(on):
                here = called if len(on) == 1 else _share_names(called, place, len(on))
                stages[stage].held_by[holder][number].append((turn, tensor, here))

    def _add_rule(self, rule: PartitionSpec) -> _RuleGroup:
        last = self._mesh.degree("pp") - 1
        on = {self._stage_of_layer[n] if kind == "layer" else 0 if kind == "first" else last for kind, n in rule.where}
        group = self._rules[id(rule)] = _RuleGroup(rule, sorted(on))
        return group

    def _find_kind(self, tensor: Tensor, spec: PartitionSpec) -> int:
        member = spec.member
        key = (tensor.shape, id(spec.cuts), member and (member.axis, member.count))
        number = self._numbers.setdefault(key, len(self.kinds))
        if number == len(self.kinds):
            self.kinds.append((tensor.shape, spec))
            self._examples.append(tensor.name)
        return number


@value_class
class TensorShard:
    """What one rank holds of one tensor."""

    tensor: Tensor
    names: tuple[str, ...]
    """The names under which it is held here; several for a tie."""
    boxes: tuple[Box, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the boxes, ties counted once."""
        return sum(self.tensor.dtype.nbytes(box.shape) for box in self.boxes)


@value_class
class PlacedCheckpoint:
    """A checkpoint cut for a mesh."""

    tensors: tuple[Tensor, ...]
    specs: Mapping[str, PartitionSpec]
    """By tensor name."""
    mesh: Mesh
    stages: tuple[int, ...]
    """Layers per pipeline stage."""
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The names, by tensor name, under which tensors are held, if not the canonical ones."""

    _groups: _TensorGroups | None = field(default=None, init=False, repr=False, compare=False)

    def ranks(self, *, replicas: bool = False) -> Iterator[tuple[int, list[TensorShard]]]:
        """Yield every rank with what it holds that no earlier rank is a replica of, in model order.

        With `replicas`, everything it holds. Ranks of dp and cp replicate what is not an expert's; of an expert, the
        ranks that ep, etp and fsdp leave over are replicas.

        Raises PartitionError, naming a tensor, if the mesh cannot cut it.
        """
        alike: dict[int, list[TensorShard]] = {}
        for rank, groups in self.list_groups(replicas=replicas):
            held = alike.get(id(groups))
            if held is None:
                rows = [(*row, boxes) for some, boxes in groups for row in some]
                rows.sort(key=itemgetter(0))
                held = alike[id(groups)] = [TensorShard(tensor, names, boxes) for _, tensor, names, boxes in rows]
            yield rank, held

    def list_groups(
        self, *, replicas: bool = False
    ) -> Iterator[tuple[int, list[tuple[_HeldTensors, tuple[Box, ...]]]]]:
        """Yield what `ranks` does as groups of tensors of which a rank holds the same boxes.

        Ranks that hold the same have one list, which is kept while this goes on.
        """
        groups = self._group()
        groups.check()
        cutter = _KindPartitioner(self.mesh, groups.kinds)
        alike: dict[tuple[object, ...], list[tuple[_HeldTensors, tuple[Box, ...]]]] = {}
        for rank in range(self.mesh.world):
            at = self.mesh.coordinate(rank)
            flags = (True, True) if replicas else _flag_first_holder(at)
            key = (*flags, *build_holding_key(at))
            if key not in alike:
                boxes = cutter.cut_at(at, *flags)
                found = groups.stages[at["pp"]].find_held(at)
                alike[key] = [(some, boxes[kind]) for kind, some in found if boxes[kind]]
            yield rank, alike[key]

    def guess_box_count(self) -> int:
        """Guess what `count_boxes` counts, as if each rank of a stage that may hold a tensor held one box of it."""
        return self._group().guess_boxes()

    def count_boxes(self) -> int:
        """Count the boxes that `ranks` yields of all ranks, once for each name, without making a list of them."""
        counts: dict[int, int] = {}
        named: dict[int, int] = {}
        total = 0
        for _, groups in self.list_groups():
            if id(groups) not in counts:
                named |= {id(some): sum([len(row[2]) for row in some]) for some, _ in groups if id(some) not in named}
                counts[id(groups)] = sum([len(boxes) * named[id(some)] for some, boxes in groups])
            total += counts[id(groups)]
        return total

    def _group(self) -> _TensorGroups:
        if self._groups is None:
            groups = _TensorGroups(self.tensors, self.specs, self.mesh, self.stages, self.names)
            object.__setattr__(self, "_groups", groups)
            return groups
        return self._groups


class _KindPartitioner:
    """Computes the boxes of each kind of tensor on a rank, once for all ranks that hold the same of it."""

    def __init__(self, mesh: Mesh, kinds: Sequence[tuple[tuple[int, ...], PartitionSpec]]) -> None:
        self._mesh = mesh
        self._kinds = [(shape, spec, spec.axes, spec.of_expert) for shape, spec in kinds]
        self._known: dict[tuple[int, ...], tuple[Box, ...]] = {}

    def cut_at(self, at: Mapping[str, int], dense: bool, expert: bool) -> list[tuple[Box, ...]]:  # noqa: FBT001
        """Return the boxes of each kind at `at`; none of experts or of all else where another rank has the same."""
        found: list[tuple[Box, ...]] = []
        for number, (shape, spec, axes, of_expert) in enumerate(self._kinds):
            if not (expert if of_expert else dense):
                found.append(())
                continue
            place = (number, *[at[axis] for axis in axes])
            if place not in self._known:
                self._known[place] = tuple(compute_held_boxes(shape, spec.cuts, self._mesh, at))
            found.append(self._known[place])
        return found


def _flag_first_holder(at: Mapping[str, int]) -> tuple[bool, bool]:
    """Return whether no earlier rank holds the same dense weights, and whether none holds the same experts."""
    return all(at[axis] == 0 for axis in REPLICATING), at["replica"] == 0


def compute_layer_costs(
    tensors: Iterable[Tensor], specs: Mapping[str, PartitionSpec], layers: int
) -> tuple[list[int], int, int]:
    """Compute bytes of each layer, of what only the first stage holds, and of what only the last stage holds."""
    counts = Counter([(specs[tensor.name].where, tensor.shape, tensor.dtype) for tensor in tensors])
    costs, first, last = [0] * layers, 0, 0
    for (where, shape, dtype), count in counts.items():
        nbytes = count * dtype.nbytes(shape)
        for kind, layer in where:
            if kind == "layer":
                costs[layer] += nbytes
            elif kind == "first":
                first += nbytes
            else:
                last += nbytes
    return costs, first, last


def balance_stages(costs: Sequence[int], first: int, last: int, count: int) -> tuple[int, ...]:
    """Return layers per stage, contiguous, so that the heaviest stage is as light as it can be.

    `first` and `last` are what the first and the last stage hold besides layers. Ties are broken towards even counts.

    >>> balance_stages([10] * 8, 20, 0, 4)
    (1, 3, 2, 2)
    """
    if count > max(len(costs), 1):
        raise UsageError(
            f"pp={count} needs at least {count} layers, but the model has {len(costs)}",
            hint=f"use --pp {len(costs)} or fewer" if costs else "leave --pp out",
        )
    if count == 1:
        return (len(costs),)
    low, high = max([*costs, first, last], default=0), sum(costs) + first + last
    while low < high:
        middle = (low + high) // 2
        if _fill_stages(costs, first, last, count, middle):
            high = middle
        else:
            low = middle + 1
    found = _fill_stages(costs, first, last, count, low)
    assert found is not None  # noqa: S101 - the sum of everything always fits
    return found


def _fill_stages(costs: Sequence[int], first: int, last: int, count: int, limit: int) -> tuple[int, ...] | None:
    """Return stages under `limit`, each as even as the limit allows, or None; every stage gets at least one layer."""
    needed = _count_stages_needed(costs, last, limit)
    stages: list[int] = []
    position = 0
    for stage in range(count):
        left = count - stage - 1
        load = (first if stage == 0 else 0) + (last if left == 0 else 0)
        fair = -(-(len(costs) - position) // (left + 1))
        taken = 0
        while position < len(costs) - left and load + costs[position] <= limit:
            if left and taken >= max(fair, 1) and needed[position] <= left:
                break
            load += costs[position]
            position += 1
            taken += 1
        if not taken:
            return None
        stages.append(taken)
    return tuple(stages) if position == len(costs) else None


def _count_stages_needed(costs: Sequence[int], last: int, limit: int) -> list[int]:
    """Count how few stages under `limit` hold the layers from each one on, the final stage also `last`."""
    needed, stages, load = [0] * len(costs), 1, last
    for position in reversed(range(len(costs))):
        if load + costs[position] > limit:
            stages, load = stages + 1, 0
        load += costs[position]
        needed[position] = stages if max(load, last) <= limit else len(costs) + 1
    return needed


def split_layers_evenly(layers: int, count: int) -> tuple[int, ...]:
    """Return layers per stage, as even as can be: the first stages have the layers that are left over.

    Raises PartitionError if there are more stages than layers.

    >>> split_layers_evenly(4, 3)
    (2, 1, 1)
    """
    if count > layers:
        raise PartitionError(
            f"pp={count} needs at least {count} layers, but the model has {layers}", hint=f"use --pp {layers} or fewer"
        )
    return tuple(layers // count + (stage < layers % count) for stage in range(count))


def parse_stages(text: str, layers: int, count: int) -> tuple[int, ...]:
    """Parse layers per stage from text such as ``20,20,22,18``; raises UsageError unless they add up.

    ``transformers`` stands for what its `DistributedConfig` does with `pp_size` (`distributed/pipeline_parallel.py`,
    `layer_range_for_rank`): from 5.24 on, the first stages have one more of the layers that are left over; in 5.23,
    ``transformers@5.23`` here, the last stage has them all.

    >>> parse_stages("transformers", layers=32, count=3), parse_stages("transformers@5.23", layers=32, count=3)
    ((11, 11, 10), (10, 10, 12))
    """
    if text in _REMAINDER_STAGES_BY_DIVISION:
        even, fewest = split_layers_evenly(layers, count), layers // count
        return (
            even
            if _REMAINDER_STAGES_BY_DIVISION[text] == "first"
            else (*[fewest] * (count - 1), layers - fewest * (count - 1))
        )
    try:
        stages = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(
            f"cannot read --stages {text!r}",
            hint="write layers per stage, such as 20,20,22,18, or transformers, or transformers@5.23 for older ones",
        ) from error
    if min(stages) < 1:
        raise UsageError(f"--stages {text} leaves a stage without layers", hint="every stage has at least one layer")
    if len(stages) != count or sum(stages) != layers:
        raise UsageError(
            f"--stages {text} has {len(stages)} stages with {sum(stages)} layers, "
            f"but the mesh has pp={count} and the model {layers} layers",
            hint=f"write {count} numbers that add up to {layers}" if count > 1 else f"add --pp {len(stages)}",
        )
    return stages


def _share_names(names: tuple[str, ...], place: int, places: int) -> tuple[str, ...]:
    """Return a tie's names, shared out over the stages that hold it: the first name first."""
    if place >= len(names):
        return names[-1:]
    return names[place:] if place == places - 1 else names[place : place + 1]
