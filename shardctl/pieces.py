"""Rules and a mesh made concrete: which boxes of which tensors each rank holds, and which layers each stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardctl.box import Box
from shardctl.errors import UsageError
from shardctl.placement import boxes, check

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from shardctl.manifest import Tensor
    from shardctl.mesh import Mesh
    from shardctl.placement import Cut, Spec


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank holds of one tensor."""

    tensor: Tensor
    names: tuple[str, ...]
    """The names under which it is held here; several for a tie."""
    boxes: tuple[Box, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the boxes, ties counted once."""
        return sum(self.tensor.dtype.nbytes(box.shape) for box in self.boxes)


@dataclass(frozen=True, slots=True)
class Placed:
    """A checkpoint cut for a mesh."""

    tensors: tuple[Tensor, ...]
    specs: Mapping[str, Spec]
    """By tensor name."""
    mesh: Mesh
    stages: tuple[int, ...]
    """Layers per pipeline stage."""
    keep_names: bool = False
    """Hold tensors under the names of the original checkpoint rather than the canonical ones."""

    def __post_init__(self) -> None:
        checked: set[tuple[tuple[int, ...], Spec]] = set()
        for tensor in self.tensors:
            key = (tensor.shape, self.specs[tensor.name])
            if key not in checked:
                check(tensor.name, *key, self.mesh)
                checked.add(key)

    def ranks(self) -> Iterator[tuple[int, list[Held]]]:
        """Every rank that holds weights no earlier replica holds (dp, cp), with what it holds, in model order."""
        stage_of = self._stages_of()
        memory: dict[tuple[object, ...], tuple[Box, ...]] = {}
        for rank, at in self.mesh.writers():
            held = []
            for tensor in self.tensors:
                on = stage_of[tensor.name]
                if at["pp"] not in on:
                    continue
                cuts = self.specs[tensor.name].cuts
                key = (tensor.shape, cuts, *(at[axis] for axis in _axes(cuts)))
                if key not in memory:
                    memory[key] = self._boxes(tensor, at)
                if memory[key]:
                    held.append(Held(tensor, self._names(tensor, on.index(at["pp"]), len(on)), memory[key]))
            yield rank, held

    def _names(self, tensor: Tensor, place: int, places: int) -> tuple[str, ...]:
        """A tie's names, shared out over the stages that hold it: all on one stage, or the first name first."""
        names = (self.keep_names and tensor.spelling) or (tensor.name, *tensor.ties)
        if place >= len(names):
            return names[-1:]
        return names[place:] if place == places - 1 else names[place : place + 1]

    def _boxes(self, tensor: Tensor, at: Mapping[str, int]) -> tuple[Box, ...]:
        if not all(tensor.shape):
            return (Box.whole(tensor.shape),)
        return tuple(boxes(tensor.shape, self.specs[tensor.name], self.mesh, at))

    def _stages_of(self) -> dict[str, tuple[int, ...]]:
        stage_of_layer = [stage for stage, count in enumerate(self.stages) for _ in range(count)]
        last = self.mesh.degree("pp") - 1
        found = {}
        for tensor in self.tensors:
            on = set()
            for kind, layer in self.specs[tensor.name].where:
                on.add({"first": 0, "last": last}.get(kind, -1) if kind != "layer" else stage_of_layer[layer])
            found[tensor.name] = tuple(sorted(on))
        return found


def _axes(cuts: Sequence[Sequence[Cut]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(cut.axis for dim in cuts for cut in dim))


def layer_costs(tensors: Iterable[Tensor], specs: Mapping[str, Spec], layers: int) -> tuple[list[int], int, int]:
    """Bytes of each layer, of what only the first stage holds, and of what only the last stage holds."""
    costs, first, last = [0] * layers, 0, 0
    for tensor in tensors:
        for kind, layer in specs[tensor.name].where:
            if kind == "layer":
                costs[layer] += tensor.nbytes
            elif kind == "first":
                first += tensor.nbytes
            else:
                last += tensor.nbytes
    return costs, first, last


def balance(costs: Sequence[int], first: int, last: int, count: int) -> tuple[int, ...]:
    """Layers per stage, contiguous, so that the heaviest stage is as light as it can be.

    `first` and `last` are what the first and the last stage hold besides layers. Ties are broken towards even counts.

    >>> balance([10] * 8, 20, 0, 4)
    (1, 3, 2, 2)
    """
    if count > max(len(costs), 1):
        raise UsageError(f"pp={count} needs at least {count} layers, but the model has {len(costs)}")
    if count == 1:
        return (len(costs),)
    low, high = max([*costs, first, last], default=0), sum(costs) + first + last
    while low < high:
        middle = (low + high) // 2
        if _fill(costs, first, last, count, middle):
            high = middle
        else:
            low = middle + 1
    found = _fill(costs, first, last, count, low)
    assert found is not None  # noqa: S101 - the sum of everything always fits
    return found


def _fill(costs: Sequence[int], first: int, last: int, count: int, limit: int) -> tuple[int, ...] | None:
    """Stages under `limit`, each as even as the limit allows, or None; every stage gets at least one layer."""
    stages: list[int] = []
    position = 0
    for stage in range(count):
        left = count - stage - 1
        load = (first if stage == 0 else 0) + (last if left == 0 else 0)
        fair = -(-(len(costs) - position) // (left + 1))
        taken = 0
        while position < len(costs) - left and load + costs[position] <= limit:
            rest = sum(costs[position:]) + last
            if taken >= max(fair, 1) and left and rest <= left * limit and _fits(costs[position:], last, left, limit):
                break
            load += costs[position]
            position += 1
            taken += 1
        if not taken:
            return None
        stages.append(taken)
    return tuple(stages) if position == len(costs) else None


def _fits(costs: Sequence[int], last: int, count: int, limit: int) -> bool:
    """Whether `count` greedy stages under `limit` hold `costs`, the final one also `last`."""
    stages, load = 1, last
    for cost in reversed(costs):
        if load + cost > limit:
            stages, load = stages + 1, 0
        load += cost
    return stages <= count and load <= limit


def parse_stages(text: str, layers: int, count: int) -> tuple[int, ...]:
    """Layers per stage from text such as ``20,20,22,18``; raises UsageError unless they add up."""
    try:
        stages = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(
            f"cannot read --stages {text!r}", hint="write layers per stage, such as 20,20,22,18"
        ) from error
    if len(stages) != count or sum(stages) != layers or min(stages) < 1:
        raise UsageError(
            f"--stages {text} has {len(stages)} stages with {sum(stages)} layers, "
            f"but the mesh has pp={count} and the model {layers} layers",
        )
    return stages
