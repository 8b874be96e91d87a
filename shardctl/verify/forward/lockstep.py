"""Runs a part of a model once for each rank at the same time, each with its own weights, as devices would.

Ranks meet only where tensor parallelism has them meet: they add what linears give whose inputs are cut, what embeddings
and heads give whose tokens are cut, and what experts give; and norms across heads see all heads. A table that cuts
elsewhere, or through a head, makes each rank compute something else than the source.
"""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from shardctl.mesh import EXPERT_AXES
from shardctl.verify.device import use_device
from shardctl.verify.forward.inputs import copy_arguments
from shardctl.verify.forward.leaves import find_leaf_kind

if TYPE_CHECKING:
    from shardctl.verify.forward.rank_views import RankViews
    from shardctl.verify.forward.skeleton import ModelUnit, TensorSlot
    from shardctl.verify.forward.weights import ModelWeights

Torch = Any
ReadSlots = Callable[[Iterable["TensorSlot"], "ModelWeights"], dict["TensorSlot", Torch]]
"""Gives what weights put into some slots."""
_ACROSS_HEADS: Final = re.compile(r"(q|k|query|key)_?(layer_?)?norm")
_STACK: Final = 3
_PATIENCE: Final = 600.0
"""Seconds after which a rank that nobody meets gives up."""


@dataclass(slots=True)
class RankMeeting:
    """Where the ranks of one run add what they have."""

    views: RankViews
    barrier: threading.Barrier = field(init=False)
    _shown: list[Torch] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(len(self.views.views), timeout=_PATIENCE)
        self._shown = [None] * len(self.views.views)

    def add(self, rank: int, mine: Torch, group: list[int]) -> Torch:
        """Return the sum of what the ranks of `group` show, the same to the bit for all."""
        return sum(self._gather(rank, mine, group))

    def refuse_equal(self, rank: int, mine: Torch, group: list[int]) -> None:
        """Raise ValueError if all ranks are given the same where each should have its own."""
        first, *others = self._gather(rank, mine, group)
        if others and bool(first.any()) and all(other.equal(first) for other in others):
            raise ValueError("its inputs are cut, and every rank is given all of them")

    def _gather(self, rank: int, mine: Torch, group: list[int]) -> list[Torch]:
        self._shown[rank] = mine
        self.barrier.wait()
        shown = [self._shown[each] for each in group]
        self.barrier.wait()
        return shown


def run_lockstep(
    unit: ModelUnit, views: RankViews, source: ModelWeights, read: ReadSlots, device: str, args: Torch, kwargs: Torch
) -> list[Torch]:
    """Return what each rank computes; raises what a rank raises. The biases of sums are those of the `source`."""
    meeting = RankMeeting(views)
    ranks = [_RankModule(unit, source, read, number, meeting) for number in range(len(views.views))]
    outputs: list[Torch] = [None] * len(ranks)
    errors: list[BaseException] = []

    def compute(number: int) -> None:
        import torch

        try:
            with torch.no_grad(), use_device(device):
                outputs[number] = ranks[number].module(*copy_arguments(args), **copy_arguments(kwargs))
        except threading.BrokenBarrierError:
            pass  # another rank has said why
        except Exception as error:  # noqa: BLE001 - to be raised where all ranks are waited for
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=compute, args=(number,), daemon=True) for number in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return outputs


class _RankModule:
    """A copy of a part of the model that has one rank's weights."""

    def __init__(
        self, unit: ModelUnit, source: ModelWeights, read: ReadSlots, number: int, meeting: RankMeeting
    ) -> None:
        self.source, self.read, self.number, self.meeting = source, read, number, meeting
        self.views = meeting.views
        self.slots = {(id(slot.module), slot.attribute): slot for slot in unit.slots}
        self.copies: dict[int, Torch] = {}
        self.values = read(unit.slots, self.views.views[number].weights)
        self.module = self._copy(unit.module)
        for original, mine in self.copies.values():
            self._meet(original, mine)

    def _copy(self, module: Torch) -> Torch:
        """Return the module and those within it, with the rank's weights; what else they have is shared."""
        if id(module) in self.copies:
            return self.copies[id(module)][1]
        mine = copy.copy(module)
        mine.__dict__ = dict(module.__dict__)
        mine.__dict__.pop("forward", None)
        for slots in ("_parameters", "_buffers", "_modules"):
            mine.__dict__[slots] = dict(module.__dict__[slots])
        self.copies[id(module)] = (module, mine)
        for (owner, attribute), slot in self.slots.items():
            if owner == id(module) and slot in self.values:
                held = mine._buffers if slot.is_buffer else mine._parameters  # noqa: SLF001
                held[attribute] = self.values[slot]
        for name, child in module._modules.items():  # noqa: SLF001
            if child is not None:
                mine._modules[name] = self._copy(child)  # noqa: SLF001
        return mine

    def _cut_dims(self, slot: TensorSlot | None) -> dict[int, bool]:
        """Return the dims of a slot that are cut, each with whether its parts are those of sections, such as heads."""
        spec = self.views.specs.get(slot) if slot is not None else None
        dims = enumerate(spec.cuts) if spec is not None else ()
        return {n: bool(dim[0].sections) for n, dim in dims if dim}

    def _meet(self, original: Torch, mine: Torch) -> None:
        """Have a module meet the others of its kind where it must."""
        weight = self.slots.get((id(original), "weight"))
        kind = find_leaf_kind(original)
        if kind is not None and weight is not None:
            self._meet_leaf(kind, original, mine, weight)
            return
        stacks = [
            slot
            for (owner, _), slot in self.slots.items()
            if owner == id(original) and len(slot.shape) == _STACK and self._is_expert(slot)
        ]
        if len(stacks) > 1 or any(not self._cut_dims(slot).get(1) for slot in stacks):
            group = self.views.list_group(*EXPERT_AXES)
            self._after(mine, lambda output: self.meeting.add(self.number, output, group))
            for child in original._modules.values():  # noqa: SLF001
                if type(child).__name__ == "Identity":  # an expert that gives a token back (LongCat): it is added once
                    self._after(self.copies[id(child)][1], lambda output: output * (self.number == group[0]))
        for name, child in original._modules.items():  # noqa: SLF001
            if child is not None and _ACROSS_HEADS.fullmatch(name):
                self._show_all_heads(original, child, self.copies[id(child)][1])

    def _meet_leaf(self, kind: str, original: Torch, mine: Torch, weight: TensorSlot) -> None:
        """Have the ranks add what a leaf gives whose inputs are cut, or whose tokens are, in parts of no heads."""
        dims = self._cut_dims(weight)
        group = self.views.list_group(*(EXPERT_AXES if self._is_expert(weight) else ("tp",)))
        summed = (0 if kind in {"conv1d", "embedding"} else 1) in dims and not (kind == "embedding" and dims.get(0))
        if not summed and all(dims.values()):
            return
        if summed and kind != "embedding":
            self._before(mine, lambda inputs: self.meeting.refuse_equal(self.number, inputs, group))
        bias = self.slots.get((id(original), "bias")) if kind != "embedding" else None
        if bias is None or bias not in self.values or not (summed or not self._cut_dims(bias)):
            self._after(mine, lambda output: self.meeting.add(self.number, output, group))
            return
        added = self.read([bias], self.source)[bias]
        mine._parameters["bias"] = added * 0  # noqa: SLF001 - it is added once, to the sum
        self._after(mine, lambda output: self.meeting.add(self.number, output, group) + added)

    def _is_expert(self, slot: TensorSlot) -> bool:
        spec = self.views.specs.get(slot)
        return spec is not None and spec.of_expert

    def _show_all_heads(self, parent: Torch, norm: Torch, mine: Torch) -> None:
        """Have a norm across heads see those of all ranks: its weight is as long as a linear beside it is high."""
        weight = self.slots.get((id(norm), "weight"))
        if weight is None or len(weight.shape) != 1:
            return
        beside = [self.slots.get((id(child), "weight")) for child in parent._modules.values() if child is not None]  # noqa: SLF001
        if not any(
            s is not None and len(s.shape) > 1 and s.shape[0] == weight.shape[0] and 0 in self._cut_dims(s)
            for s in beside
        ):
            return
        cut = 0 in self._cut_dims(weight)
        if not cut and not any(self._units(s) > 1 for s in beside if s is not None and s.shape[0] == weight.shape[0]):
            return
        group, forward = self.views.list_group("tp"), type(mine).forward.__get__(mine)
        mine.__dict__["forward"] = lambda states, *rest: forward(self.meeting.add(self.number, states, group), *rest)

    def _units(self, slot: TensorSlot) -> int:
        spec = self.views.specs.get(slot)
        cuts = spec.cuts[0] if spec is not None and spec.cuts else ()
        return sum(section.size // section.unit for cut in cuts for section in cut.sections)

    def _before(self, mine: Torch, look: Callable[[Torch], None]) -> None:
        forward = type(mine).forward.__get__(mine)

        def run(inputs: Torch) -> Torch:
            look(inputs)
            return forward(inputs)

        mine.__dict__["forward"] = run

    def _after(self, mine: Torch, change: Callable[[Torch], Torch]) -> None:
        forward = mine.__dict__.get("forward") or type(mine).forward.__get__(mine)

        def run(*args: Torch, **kwargs: Torch) -> Torch:
            output = forward(*args, **kwargs)
            return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

        mine.__dict__["forward"] = run
