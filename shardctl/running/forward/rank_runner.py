"""Runs parts of a model, or all of it, once for each rank at the same time, each with its own weights."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from dataclasses import field
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.value import state_class
from shardctl.running.device import use_device
from shardctl.running.forward.inputs import copy_arguments
from shardctl.running.forward.rendezvous import FAILURES, PartitionConflictError, RankReport
from shardctl.running.forward.stacks import ExpertStack, is_stack
from shardctl.running.forward.streamed_modules import StreamedLinear, find_leaf, find_leaf_kind
from shardctl.running.machine_failure import raise_machine_error
from shardctl.tensors.mesh import EXPERT_AXES
from shardctl.verify.tolerance import has_nan

if TYPE_CHECKING:
    from collections.abc import Container

    from shardctl.running.forward.rank_views import RankViews
    from shardctl.running.forward.rendezvous import RankMeeting
    from shardctl.running.forward.skeleton import ModelUnit, TensorSlot
    from shardctl.running.forward.streamed_modules import ComputePrecision
    from shardctl.running.forward.weights import ModelWeights

Torch = Any
_ReadSlots = Callable[[Iterable["TensorSlot"], "ModelWeights"], dict["TensorSlot", Torch]]
"""Gives what weights put into some slots."""
_ACROSS_HEADS: Final = re.compile(r"(q|k|query|key)_?(layer_?)?norm")
_SUB_NORM_PATTERN: Final = re.compile(r"(attn|ffn)_sub_norm")
"""Norms of what attention and an MLP hand to their last matrix (BitNet)."""
_GAUSSIAN_TOPK_METHOD: Final = "_gaussian_topk"
"""What transformers calls the method of an MLP that sets all but the largest results of its gate to zero."""
_STACKED_MATRIX_NDIM: Final = 3
_ROW_PARALLEL_CLASSES: Final = {"DbrxExpertGLU"}
"""Classes that multiply by matrices of their own, of which tp cuts what the last product sums over."""


class _RankModule:
    """A copy of a part of the model that has one rank's weights; those `whole` are held as the code may use them."""

    def __init__(
        self,
        unit: ModelUnit,
        views: RankViews,
        meeting: RankMeeting,
        precision: ComputePrecision,
        read: _ReadSlots,
        whole: Container[TensorSlot],
    ) -> None:
        self.unit, self.views, self.meeting, self.number = unit, views, meeting, meeting.number
        weights = views.views[self.number].weights
        self.slots = {(id(slot.module), slot.attribute): slot for slot in unit.slots}
        self.copies: dict[int, Torch] = {}
        leaves: dict[TensorSlot, StreamedLinear] = {}
        stacks: dict[TensorSlot, ExpertStack] = {}
        for slot in unit.slots:
            if slot in whole or not weights.has_weights_for(slot):
                continue
            leaf = find_leaf(slot, weights, precision)
            if leaf is not None:
                leaves[slot] = leaf
            elif is_stack(slot, precision):
                stacks[slot] = ExpertStack(weights, slot, precision)
        self.values = read([s for s in unit.slots if s not in leaves and s not in stacks], weights)
        self.module = self._copy(unit.module)
        self.leaves = leaves
        for slot, leaf in leaves.items():
            leaf.module = self.copies[id(slot.module)][1]
            leaf.module.__dict__["forward"] = leaf.forward
        for slot, stack in stacks.items():
            self.copies[id(slot.module)][1].__dict__[slot.attribute] = stack
        for original, mine in self.copies.values():
            self._hook_collectives(original, mine)

    def list_idle(self) -> tuple[str, ...]:
        """List the names of weights that no module asked for."""
        return tuple(slot.names[0] for slot, leaf in self.leaves.items() if not leaf.calls)

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

    def _hook_collectives(self, original: Torch, mine: Torch) -> None:
        """Have a module meet the others of its kind where it must."""
        weight = self.slots.get((id(original), "weight"))
        kind = find_leaf_kind(original)
        if kind is not None and weight is not None:
            self._meet_leaf(kind, original, mine, weight)
            return
        own = [slot for (owner, _), slot in self.slots.items() if owner == id(original)]
        arrays = [slot for slot in own if len(slot.shape) == _STACKED_MATRIX_NDIM]
        stacks = [slot for slot in arrays if self._is_expert(slot)]
        if not stacks and any(
            _STACKED_MATRIX_NDIM - 1 in self._cut_dims(slot) for slot in arrays
        ):  # experts of attention sum over heads
            self._hook_output(mine, self._build_all_reduce("tp"))
        if type(original).__name__ in _ROW_PARALLEL_CLASSES and any(map(self._cut_dims, own)):
            self._hook_output(mine, self._build_all_reduce("tp"))
        if len(stacks) > 1 or any(not self._cut_dims(slot).get(1) for slot in stacks):
            self._add_biases_once(original, mine, stacks)
            self._hook_output(mine, self._build_all_reduce(*EXPERT_AXES))
            first = self.number == self.views.list_group(self.number, *EXPERT_AXES)[0]
            for child in original._modules.values():  # noqa: SLF001
                if type(child).__name__ == "Identity":  # an expert that gives a token back (LongCat): it is added once
                    self._hook_output(self.copies[id(child)][1], lambda output: output * first)
        self._show_all_columns(original, mine)
        self._meet_norms(original)

    def _meet_norms(self, original: Torch) -> None:
        """Have the norms in a module see what they are taken over, where several ranks have parts of it."""
        for name, child in original._modules.items():  # noqa: SLF001
            if child is not None and _ACROSS_HEADS.fullmatch(name):
                self._show_all_heads(original, child, self.copies[id(child)][1])
            elif child is not None and _SUB_NORM_PATTERN.fullmatch(name):
                self._show_whole_products(original, child, self.copies[id(child)][1])
            elif child is not None and name == "norm":
                self._show_whole_groups(child, self.copies[id(child)][1])

    def _show_all_columns(self, original: Torch, mine: Torch) -> None:
        """Have an MLP that keeps the largest results of its gate compare those of all ranks."""
        keep = getattr(original, _GAUSSIAN_TOPK_METHOD, None)
        gate = self.slots.get((id(getattr(original, "gate_proj", None)), "weight"))
        if keep is not None and 0 in self._cut_dims(gate):
            adding = self._build_all_reduce("tp")
            mine.__dict__[_GAUSSIAN_TOPK_METHOD] = lambda results: keep(adding(results))

    def _show_whole_groups(self, norm: Torch, mine: Torch) -> None:
        """Have a norm over groups of channels see whole groups, where there are more ranks than groups."""
        weight = self.slots.get((id(norm), "weight"))
        groups = _count_groups(norm)
        if weight is None or not groups or 0 not in self._cut_dims(weight):
            return
        if groups % len(self.views.list_group(self.number, "tp")) == 0:
            return  # each rank has some, whole
        adding, forward = self._build_all_reduce("tp"), _get_forward(mine)
        mine.__dict__["forward"] = lambda states, gate=None: forward(
            adding(states), adding(gate) if gate is not None else None
        )

    def _add_biases_once(self, original: Torch, mine: Torch, stacks: list[TensorSlot]) -> None:
        """Leave the biases of experts that are cut inside to the first of the ranks that share an expert."""
        inside = any(cut.axis == "etp" for s in stacks for dim in self.views.specs[s].cuts for cut in dim)
        if not inside or not self.views.views[self.number].at["etp"]:
            return
        for (owner, attribute), slot in self.slots.items():
            spec = self.views.specs.get(slot)
            if (
                owner != id(original)
                or spec is None
                or slot not in self.values
                or len(slot.shape) == _STACKED_MATRIX_NDIM
            ):
                continue
            if not any(cut.axis == "etp" for dim in spec.cuts for cut in dim):
                mine._parameters[attribute] = self.values[slot] * 0  # noqa: SLF001

    def _meet_leaf(self, kind: str, original: Torch, mine: Torch, weight: TensorSlot) -> None:
        """Have the ranks add what a leaf gives whose inputs are cut, or whose tokens are, in parts of no heads."""
        dims, spec = self._cut_dims(weight), self.views.specs.get(weight)
        axes = EXPERT_AXES if self._is_expert(weight) else ("tp",)
        summed = (0 if kind in {"conv1d", "embedding"} else 1) in dims and not (kind == "embedding" and dims.get(0))
        alone = spec is not None and spec.member is not None
        if not summed and not alone and all(dims.values()):
            return
        if summed and kind != "embedding" and not alone:
            self._hook_inputs(mine, lambda inputs: self._refuse_equal(inputs, axes))
        bias = self.slots.get((id(original), "bias")) if kind != "embedding" else None
        if bias is None or bias not in self.values or not (summed or not self._cut_dims(bias)) or alone:
            self._hook_output(mine, self._build_all_reduce(*axes))
            return
        added = self.values[bias]
        mine._parameters["bias"] = added * 0  # noqa: SLF001 - it is added once, to the sum
        adding = self._build_all_reduce(*axes)
        self._hook_output(mine, lambda output: adding(output) + added)

    def _build_all_reduce(self, *axes: str) -> Callable[[Torch], Torch]:
        """Return what gives the sum of what the ranks along `axes` show, the same to the bit for all."""
        group = self.views.list_group(self.number, *axes)

        def add(mine: Torch) -> Torch:
            shown = self.meeting.exchange(mine)
            return sum(shown[each] for each in group)

        return add

    def _refuse_equal(self, mine: Torch, axes: tuple[str, ...]) -> None:
        """Raise PartitionConflictError if all ranks are given the same where each should have its own."""
        shown = self.meeting.exchange(mine)
        first, *others = [shown[each] for each in self.views.list_group(self.number, *axes)]
        if others and bool(first.any()) and all(other.equal(first) for other in others):
            raise PartitionConflictError("its inputs are cut, and every rank is given all of them")

    def _is_expert(self, slot: TensorSlot) -> bool:
        spec = self.views.specs.get(slot)
        return spec is not None and spec.of_expert

    def _show_all_heads(self, parent: Torch, norm: Torch, mine: Torch) -> None:
        """Have a norm across heads see those of all ranks: its weight is as long as a linear beside it is high."""
        weight = self.slots.get((id(norm), "weight"))
        beside = self._list_as_high(parent, weight)
        if not any(len(slot.shape) > 1 and 0 in self._cut_dims(slot) for slot in beside):
            return
        cut = 0 in self._cut_dims(weight)
        heads = max(map(self._count_units, beside))
        if not cut and heads <= 1:
            return
        adding, forward = self._build_all_reduce("tp"), type(mine).forward.__get__(mine)
        copies = max(
            len(self.views.list_group(self.number, "tp")) // max(heads, 1), 1
        )  # of each head, on so many ranks
        mine.__dict__["forward"] = lambda states, *rest: forward(adding(states) / copies, *rest)

    def _show_whole_products(self, parent: Torch, norm: Torch, mine: Torch) -> None:
        """Have a norm inside of attention or an MLP see what all ranks give it, and each rank go on with its own."""
        weight = self.slots.get((id(norm), "weight"))
        if not any(0 in self._cut_dims(slot) for slot in self._list_as_high(parent, weight)):
            return
        adding, forward = self._build_all_reduce("tp"), _get_forward(mine)
        mine.__dict__["forward"] = lambda states: forward(adding(states)) * (states != 0)

    def _list_as_high(self, parent: Torch, weight: TensorSlot | None) -> list[TensorSlot]:
        """List the weights in a module that have as many rows as the norm beside them has elements."""
        if weight is None or len(weight.shape) != 1:
            return []
        found = (self.slots.get((id(child), "weight")) for child in parent._modules.values() if child is not None)  # noqa: SLF001
        return [slot for slot in found if slot is not None and slot.shape[0] == weight.shape[0]]

    def _count_units(self, slot: TensorSlot) -> int:
        spec = self.views.specs.get(slot)
        cuts = spec.cuts[0] if spec is not None and spec.cuts else ()
        return sum(section.size // section.unit for cut in cuts for section in cut.sections)

    def _hook_inputs(self, mine: Torch, look: Callable[[Torch], None]) -> None:
        forward = _get_forward(mine)

        def run(inputs: Torch) -> Torch:
            look(inputs)
            return forward(inputs)

        mine.__dict__["forward"] = run

    def _hook_output(self, mine: Torch, change: Callable[[Torch], Torch]) -> None:
        forward = _get_forward(mine)

        def run(*args: Torch, **kwargs: Torch) -> Torch:
            output = forward(*args, **kwargs)
            return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

        mine.__dict__["forward"] = run


@state_class
class RankRunner:
    """Ranks, and how they run."""

    views: RankViews
    meeting: RankMeeting
    precision: ComputePrecision
    read: _ReadSlots
    joined: dict[str, str] = field(default_factory=dict)
    """The parts that ranks do not run by themselves, with the reason."""
    _whole: set[TensorSlot] = field(default_factory=set)
    """Weights that code uses directly, so that a rank's part stands among zeros."""

    def run_unit(self, unit: ModelUnit, args: Torch, kwargs: Torch) -> tuple[dict[int, Torch], BaseException | None]:
        """Return what each rank of this process computes, by number, and why one of all ranks failed, if one did."""

        def compute(number: int) -> tuple[Torch, RankReport]:  # noqa: ARG001 - the meeting knows it
            return self._run_unit(unit, copy_arguments(args), copy_arguments(kwargs))

        while True:
            outputs, reports = self.meeting.run(compute)
            failure = next((report.failure for report in reports if report.failure is not None), None)
            if len(reports) < self.meeting.count and failure is None:
                failure = RuntimeError("the ranks do not take the same steps")
            wrong = failure is not None or any(report.unreal for report in reports)
            idle = {name for report in reports for name in report.idle}
            slots = [slot for slot in unit.slots if slot.names[0] in idle and slot not in self._whole]
            if failure is not None and not slots:
                slots = [s for s in unit.slots if is_stack(s, self.precision) and s not in self._whole]
            if not wrong or not slots:
                return outputs, failure
            self._whole.update(slots)

    def run_here(self, unit: ModelUnit, args: Torch, kwargs: Torch) -> Torch:
        """Return what the rank that asks computes with a part, while all run the model."""
        return self._load(unit).module(*args, **kwargs)

    def run_model(self, model: Callable[[], Torch]) -> Torch:
        """Return what the first rank of this process computes with all of a model; raises what a rank raised."""
        import torch

        def compute(number: int) -> tuple[Torch, RankReport]:  # noqa: ARG001
            with torch.no_grad(), use_device(self.precision.device):
                return model(), RankReport()

        outputs, reports = self.meeting.run(compute)
        for report in reports:
            if report.failure is not None:
                raise report.failure
        return outputs[self.meeting.here[0]]

    def _load(self, unit: ModelUnit) -> _RankModule:
        return _RankModule(unit, self.views, self.meeting, self.precision, self.read, self._whole)

    def _run_unit(self, unit: ModelUnit, args: Torch, kwargs: Torch) -> tuple[Torch, RankReport]:
        import torch

        part: _RankModule | None = None
        try:
            with torch.no_grad(), use_device(self.precision.device):
                part = self._load(unit)
                output = part.module(*args, **kwargs)
        except FAILURES as error:
            raise_machine_error(error, self.precision.device)
            return None, RankReport(error, part.list_idle() if part is not None else ())
        return output, RankReport(None, part.list_idle(), has_nan(output))


def _count_groups(norm: Torch) -> int:
    """Count the groups of channels over each of which a norm is taken; 0 if it knows of none."""
    size = getattr(norm, "group_size", None)
    return norm.weight.shape[0] // size if size else int(getattr(norm, "n_groups", 0))


def _get_forward(module: Torch) -> Callable[..., Torch]:
    forward: Callable[..., Torch] = module.__dict__.get("forward") or type(module).forward.__get__(module)
    return forward
