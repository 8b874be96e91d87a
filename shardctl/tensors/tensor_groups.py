"""Groups the tensors of a checkpoint by what a mesh makes of them, in one pass, so that all else is asked of groups."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import field
from typing import TYPE_CHECKING

from shardctl.base.value import state_class
from shardctl.tensors.placement import check_cuts, find_holder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from shardctl.tensors.manifest import Tensor
    from shardctl.tensors.mesh import Mesh
    from shardctl.tensors.placement import PartitionSpec

HeldTensors = list[tuple[int, "Tensor", tuple[str, ...]]]
"""The place of each in the model, the tensor, and its names on the stage that holds it."""


@state_class
class StageGroups:
    """The tensors of a pipeline stage, those together of which a rank holds the same boxes, or none."""

    held_by: dict[tuple[str, int] | None, dict[int, HeldTensors]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    """By which rank of which axis holds them, None for those that no axis divides whole; then by their kind."""

    def find_held(self, at: Mapping[str, int]) -> Iterator[tuple[int, HeldTensors]]:
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


class TensorGroups:
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
        self.stages = [StageGroups() for _ in range(mesh.degree("pp"))]
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


def _share_names(names: tuple[str, ...], place: int, places: int) -> tuple[str, ...]:
    """Return a tie's names, shared out over the stages that hold it: the first name first."""
    if place >= len(names):
        return names[-1:]
    return names[place:] if place == places - 1 else names[place : place + 1]
