"""Runs a model that is never whole in memory: each part is filled, run and emptied, with one checkpoint or with two."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from dataclasses import field
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import CoverageError, UnsupportedError
from shardctl.base.value import state_class
from shardctl.base.workers import NullWatcher
from shardctl.running.device import use_device
from shardctl.running.forward.inputs import copy_arguments, move_arguments
from shardctl.running.forward.numerics import record_unstable_kernels, use_plain_float32
from shardctl.running.forward.rendezvous import FAILURES, PartitionConflictError
from shardctl.running.forward.stacks import ExpertStack, is_stack
from shardctl.running.forward.streamed_modules import ComputePrecision, StreamedLinear, find_leaf
from shardctl.running.forward.team import RankTeam
from shardctl.running.forward.verdict import measure_block
from shardctl.running.machine_failure import raise_machine_error
from shardctl.verify.finding import CheckFinding
from shardctl.verify.forward_result import BlockDistance
from shardctl.verify.tolerance import has_nan, measure_distance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from shardctl.base.workers import ProgressWatcher
    from shardctl.running.forward.adapter import WeightConversion
    from shardctl.running.forward.rank_runner import RankRunner
    from shardctl.running.forward.skeleton import ModelSkeleton, ModelUnit, TensorSlot
    from shardctl.running.forward.weights import ModelWeights

Torch = Any


_INCOMPARABLE: Final = BlockDistance(inf, -1.0, inf)


class PartError(Exception):
    """A part of the model could not be run."""

    def __init__(self, unit: str, title: str, cause: BaseException) -> None:
        super().__init__(f"{unit} with the weights of the {title}: {type(cause).__name__}: {cause}")


@state_class
class ModelExecutor:
    """A skeleton and the way in which it is run."""

    skeleton: ModelSkeleton
    conversion: WeightConversion
    precision: ComputePrecision
    team: RankTeam = field(default_factory=RankTeam)
    source: ModelWeights | None = None
    """The weights that are right: where there are several processes, the first alone computes with them."""
    ranks: RankRunner | None = None
    """The ranks, if they compute with parts."""
    alike: RankRunner | None = None
    """Ranks with the source's weights, whose bits those of the shards should be, for types in which much is rounded."""
    order: dict[str, float] = field(default_factory=dict)
    """By part, how far the source's own weights are from the source's output if they are summed as ranks sum them."""
    drift: dict[str, tuple[float, int]] = field(default_factory=dict)
    """By part, how far the farthest rank is from one with the source's weights, and which."""
    known: bool = True
    """Whether the table of cuts is known to be right, so that a part that ranks cannot run says nothing of it."""
    suspect: float = inf
    """The distance beyond which a part is run with joined weights too, to tell wrong weights from a wrong cut."""
    errors: dict[str, BlockDistance] = field(default_factory=dict)
    """Of each part that ran with both weights on the same inputs, by name; of several ranks, the farthest."""
    farthest: dict[str, int] = field(default_factory=dict)
    """The rank that is meant, by the name of the part."""
    miscut: set[str] = field(default_factory=set)
    """Parts whose weights are right once joined, though ranks compute something else with theirs."""
    notes: dict[str, None] = field(default_factory=dict)
    """What was done otherwise than planned, each once."""
    findings: list[CheckFinding] = field(default_factory=list)
    reached: set[str] = field(default_factory=set)
    """The parts that ran."""
    unstable: dict[str, None] = field(default_factory=dict)
    """The kernels that ran and do not give the same bits each time."""
    watcher: ProgressWatcher = field(default_factory=NullWatcher)
    """Is told which part runs."""
    _assembled: set[TensorSlot] = field(default_factory=set)
    """Weights that must be whole because code reaches for them."""
    _resident: bool = False
    """Whether what is outside of blocks stays filled for a whole pass."""

    def run(
        self,
        inputs: Mapping[str, Torch],
        weights: ModelWeights,
        beside: ModelWeights | None = None,
        *,
        model: Torch = None,
    ) -> Torch:
        """Return the model's output with `weights`.

        With others `beside`, each part runs with those too and is compared.

        `model` is a model within the model, to which the inputs are given instead.

        Raises PartError if a part cannot run with the shards, UnsupportedError if one cannot with the source, and
        CoverageError if a rank lacks what it should hold; MachineError if memory or a device fails.
        """
        if not self._resident and (self.source is None or weights is self.source):  # which tells of the code alone
            before = {**self.errors}, {**self.farthest}, {**self.order}, {**self.drift}, {*self.miscut}
            try:
                output = self._pass(model or self.skeleton.model, inputs, weights, beside)
            except FAILURES as error:
                raise_machine_error(error, self.precision.device)
                why = _format_first_line(error)
            else:
                if not has_nan(output):
                    return output
                why = "the result was not a number"
            self._resident = True
            for unit in self.skeleton.units:
                if not unit.block and unit.device != self.precision.device:
                    self.skeleton.move_unit(unit, self.precision.device)
            # Its parts computed with weights that were not there.
            self.errors, self.farthest, self.order, self.drift, self.miscut = before
            self._note(f"weights outside of blocks stay in memory, because code may use them: {why}")
        try:
            return self._pass(model or self.skeleton.model, inputs, weights, beside)
        except FAILURES as error:
            raise_machine_error(error, self.precision.device)
            raise UnsupportedError(f"{type(self.skeleton.model).__name__} cannot be run in parts: {error}") from error

    def _pass(
        self, model: Torch, inputs: Mapping[str, Torch], weights: ModelWeights, beside: ModelWeights | None
    ) -> Torch:
        import torch

        kept = [unit for unit in self.skeleton.units if self._resident and not unit.block]
        unstable = record_unstable_kernels(self.precision.device, self.unstable)
        with torch.no_grad(), self._wrap_units(weights, beside), use_plain_float32(), unstable:
            try:
                for slot in [*self.skeleton.loose, *(slot for unit in kept for slot in unit.slots)]:
                    if weights.has_weights_for(slot):
                        self._put(slot, weights)
                options = _choose_call_options(model)
                if self.ranks is not None and weights is not self.source:
                    return self._run_on_ranks(self.ranks, lambda: model(**copy_arguments(dict(inputs)), **options))
                return model(**copy_arguments(dict(inputs)), **options)
            finally:
                for slot in [*self.skeleton.loose, *(slot for unit in kept for slot in unit.slots)]:
                    slot.clear()

    def _run_on_ranks(self, ranks: RankRunner, compute: Callable[[], Torch]) -> Torch:
        try:
            return ranks.run_model(compute)
        except FAILURES as error:
            raise_machine_error(error, self.precision.device)
            raise PartError(type(self.skeleton.model).__name__, "ranks", error) from error

    @contextmanager
    def _wrap_units(self, weights: ModelWeights, beside: ModelWeights | None) -> Iterator[None]:
        """Make every part fill itself, run, and empty itself."""
        before: list[tuple[Torch, object]] = []
        for unit in self.skeleton.units:
            usual = unit.module.forward
            before.append((unit.module, unit.module.__dict__.get("forward")))
            unit.module.forward = self._build_runner(unit, usual, weights, beside)
        try:
            yield
        finally:
            for module, forward in before:
                module.__dict__.pop("forward", None)
                if forward is not None:
                    module.forward = forward

    def _build_runner(
        self, unit: ModelUnit, usual: Callable[..., Torch], weights: ModelWeights, beside: ModelWeights | None
    ) -> Callable[..., Torch]:
        def run(*args: Torch, **kwargs: Torch) -> Torch:
            self.reached.add(unit.name)
            self.watcher.work_on(unit.name)
            if weights is not self.source:
                if self.ranks is not None and unit.name not in self.ranks.joined:
                    return self.ranks.run_here(unit, args, kwargs)
                return self._run(unit, usual, weights, args, kwargs)
            mine = (copy_arguments(args), copy_arguments(kwargs)) if beside is not None else ()
            output = self.team.broadcast_from_first(partial(self._compute_reference, unit, usual, args, kwargs))
            if beside is not None:
                rank, found = self._compare_shards(unit, usual, output, beside, mine)
                if found >= self.errors.get(unit.name, found):
                    self.errors[unit.name], self.farthest[unit.name] = found, rank
            return output

        return run

    def _compare_shards(
        self, unit: ModelUnit, usual: Callable[..., Torch], output: Torch, beside: ModelWeights, given: Torch
    ) -> tuple[int, BlockDistance]:
        """Run a part as the shards do: return the farthest rank, if ranks ran it, and how far it is from `output`."""
        if self.ranks is None or unit.name in self.ranks.joined:
            return -1, self._measure_joined(unit, usual, output, beside, given)
        before = copy_arguments(given) if self.suspect < inf else given
        outputs, failure = self.ranks.run_unit(unit, *given)
        if failure is not None:
            raise_machine_error(failure, self.precision.device)
            if self.known and not isinstance(failure, PartitionConflictError):
                self.ranks.joined[unit.name] = f"ranks cannot run it by themselves: {_format_first_line(failure)}"
                return -1, self._measure_joined(unit, usual, output, beside, before)
            self.findings.append(CheckFinding("error", "forward", str(PartError(unit.name, "ranks", failure))))
            return -1, _INCOMPARABLE
        states = _select_states(output)
        if self.alike is not None:
            self._compare_order(self.alike, unit, states, outputs, copy_arguments(before))
        apart = [((*measure_block(states, _select_states(each)),), number) for number, each in outputs.items()]
        farthest, rank = max(each for some in self.team.collect(apart) for each in some)
        found = BlockDistance(*farthest)
        if self.suspect < found.error:
            joined = self._measure_joined(unit, usual, output, beside, before)
            if joined.error <= self.suspect:
                self.miscut.add(unit.name)
        return rank, found

    def _compare_order(
        self, alike: RankRunner, unit: ModelUnit, states: Torch, outputs: dict[int, Torch], given: Torch
    ) -> None:
        """Run a part with the source's weights on ranks, and note how far both are from one another."""
        right, failure = alike.run_unit(unit, *given)
        if failure is not None:
            return  # what fails with the source's weights as well is judged by the other distances
        found = [
            (
                measure_distance(states, _select_states(right[number])),
                measure_distance(_select_states(right[number]), _select_states(each)),
                number,
            )
            for number, each in outputs.items()
        ]
        every = [each for some in self.team.collect(found) for each in some]
        self.order[unit.name] = max(self.order.get(unit.name, 0.0), *(order for order, _, _ in every))
        drift = max((drift, number) for _, drift, number in every)
        self.drift[unit.name] = max(self.drift.get(unit.name, drift), drift)

    def _measure_joined(
        self, unit: ModelUnit, usual: Callable[..., Torch], output: Torch, beside: ModelWeights, given: Torch
    ) -> BlockDistance:
        """Return how far a part is from `output` if weights are put together before it computes."""
        try:
            return measure_block(output, self._run(unit, usual, beside, *given))
        except CoverageError as error:
            self.findings.append(CheckFinding("error", "forward", error.message))
        except PartError as error:
            self.findings.append(CheckFinding("error", "forward", str(error)))
        return _INCOMPARABLE

    def values(self, slots: Iterable[TensorSlot], weights: ModelWeights) -> dict[TensorSlot, Torch]:
        """Return what `weights` put into slots, which keep what they have."""
        wanted = [slot for slot in slots if weights.has_weights_for(slot)]
        before = {slot: getattr(slot.module, slot.attribute) for slot in wanted}
        made: dict[TensorSlot, Torch] = {}
        try:
            for slot in wanted:
                self._put(slot, weights)
                made[slot] = getattr(slot.module, slot.attribute)
        finally:
            for slot, tensor in before.items():
                slot.put(tensor)
        return made

    def _compute_reference(self, unit: ModelUnit, usual: Callable[..., Torch], args: Torch, kwargs: Torch) -> Torch:
        """Return what the source's part computes; if it cannot, nothing can be compared."""
        assert self.source is not None  # noqa: S101 - asked for it alone
        try:
            return self._run(unit, usual, self.source, args, kwargs)
        except PartError as error:
            raise UnsupportedError(f"{type(self.skeleton.model).__name__} cannot be run in parts: {error}") from error

    def _run(
        self, unit: ModelUnit, usual: Callable[..., Torch], weights: ModelWeights, args: Torch, kwargs: Torch
    ) -> Torch:
        """Return a part's output with whole weights."""
        resident, part = self._resident and not unit.block, type(unit.module).__name__
        while True:
            leaves: list[StreamedLinear] = []
            output, failure = None, None
            try:
                leaves, own = self._fill(unit, weights)
                output = self._run_on_device(unit, own or usual, args, kwargs)
            except FAILURES as error:
                raise_machine_error(error, self.precision.device)
                failure = error
            finally:
                self._clear_unit(unit, leaves)
                if resident:
                    for slot in unit.slots:
                        if weights.has_weights_for(slot):
                            self._put(slot, weights)
            idle = [leaf for leaf in leaves if not leaf.calls]
            if idle and (failure is not None or has_nan(output)):
                reached = [slot for leaf in idle for slot in unit.slots if slot.module is leaf.module]
                self._assembled.update(reached)
                names = sorted({slot.names[0].removeprefix(f"{unit.name}.") for slot in reached})
                self._note(f"{', '.join(names)} of {part} are held whole, because code uses them directly")
                continue
            if failure is not None and self._keep_stacks_whole(unit):
                continue
            if failure is not None:
                raise PartError(unit.name, weights.title, failure) from failure
            return output

    def _run_on_device(self, unit: ModelUnit, forward: Callable[..., Torch], args: Torch, kwargs: Torch) -> Torch:
        """Run a part on its device; what it gives is on the main device, where code between parts expects it."""
        main = self.precision.device
        if not self.skeleton.spread:
            return forward(*args, **kwargs)
        args, kwargs = move_arguments(args, unit.device), move_arguments(kwargs, unit.device)
        with use_device(unit.device):
            return move_arguments(forward(*args, **kwargs), main)

    def _keep_stacks_whole(self, unit: ModelUnit) -> bool:
        """Have stacks of experts whole from now on; whether there was one."""
        stacks = [s for s in unit.slots if is_stack(s, self.precision) and s not in self._assembled]
        self._assembled.update(stacks)
        if stacks:
            part = type(unit.module).__name__
            self._note(f"stacks of experts of {part} are read whole, because code does not take them one by one")
        return bool(stacks)

    def _fill(self, unit: ModelUnit, weights: ModelWeights) -> tuple[list[StreamedLinear], Callable[..., Torch] | None]:
        """Fill a part; the leaves in it, and what the part itself is to run if it is one."""
        leaves, own, groups = list[StreamedLinear](), None, dict[str, None]()
        for slot in unit.slots:
            if not weights.has_weights_for(slot):
                continue
            if slot in weights.converted:
                groups[weights.converted[slot]] = None
                continue
            leaf = None if slot in self._assembled else find_leaf(slot, weights, self.precision)
            if leaf is not None:
                leaves.append(leaf)
                if slot.module is unit.module:
                    own = leaf.forward
                else:
                    slot.module.forward = leaf.forward
            elif is_stack(slot, self.precision) and slot not in self._assembled:
                slot.stand_in(ExpertStack(weights, slot, self.precision))
            else:
                self._put(slot, weights)
        for group in groups:
            self._convert_weights(group, unit, weights)
        return leaves, own

    def _put(self, slot: TensorSlot, weights: ModelWeights) -> None:
        if slot in weights.converted:
            self._convert_weights(weights.converted[slot], None, weights)
        else:
            slot.put(weights.read(slot, self.precision.dtype).to(slot.device))

    def _convert_weights(self, group: str, unit: ModelUnit | None, weights: ModelWeights) -> None:
        """Have transformers make what it makes of several stored tensors."""
        device = next(slot.device for slot, name in weights.converted.items() if name == group)
        self.conversion.fill(weights.groups[group], device, self.precision.dtype)
        for slot, name in weights.converted.items():
            if name == group and (unit is None or slot in unit.slots):
                made = getattr(slot.module, slot.attribute)
                if made is not slot.empty:
                    slot.put(weights.cast_floats(slot, made.data, self.precision.dtype))

    def _clear_unit(self, unit: ModelUnit, leaves: list[StreamedLinear]) -> None:
        for leaf in leaves:
            if leaf.module is not unit.module:
                leaf.module.__dict__.pop("forward", None)
        for slot in unit.slots:
            slot.clear()

    def _note(self, text: str) -> None:
        self.notes[text] = None


def _choose_call_options(model: Torch) -> dict[str, bool]:
    """Choose named outputs, and no cache, which blocks that run twice would fill twice."""
    known = inspect.signature(model.forward).parameters
    wanted = {"use_cache": False, "return_dict": True}
    return {name: value for name, value in wanted.items() if name in known or name == "return_dict"}


def _select_states(output: Torch) -> Torch:
    """Return the first of several outputs: the others, such as attention weights, are those of a rank's own heads."""
    return output[0] if isinstance(output, tuple | list) and output else output


def _format_first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__
