"""Runs parts of a model, or all of it, once for each rank at the same time, each with its own weights."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any

from shardctl.base.value import state_class
from shardctl.running.device import use_device
from shardctl.running.forward.inputs import copy_arguments
from shardctl.running.forward.lockstep import RankModule
from shardctl.running.forward.rendezvous import FAILURES, RankReport
from shardctl.running.forward.stacks import is_stack
from shardctl.running.machine_failure import raise_machine_error
from shardctl.verify.tolerance import has_nan

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardctl.running.forward.lockstep import ReadSlots
    from shardctl.running.forward.rank_views import RankViews
    from shardctl.running.forward.rendezvous import RankMeeting
    from shardctl.running.forward.skeleton import ModelUnit, TensorSlot
    from shardctl.running.forward.streamed_modules import ComputePrecision

Torch = Any


@state_class
class RankRunner:
    """Ranks, and how they run."""

    views: RankViews
    meeting: RankMeeting
    precision: ComputePrecision
    read: ReadSlots
    joined: dict[str, str] = field(default_factory=dict)
    """The parts that ranks do not run by themselves, with the reason."""
    _whole: set[TensorSlot] = field(default_factory=set)
    """Weights that code uses directly, so that a rank's part stands among zeros."""

    def run_unit(self, unit: ModelUnit, args: Torch, kwargs: Torch) -> tuple[dict[int, Torch], BaseException | None]:
        """Return what each rank of this process computes, by number, and why one of all ranks failed, if one did."""

        def compute(number: int) -> tuple[Torch, RankReport]:  # noqa: ARG001 - the meeting knows it
            return self._compute(unit, copy_arguments(args), copy_arguments(kwargs))

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

    def _load(self, unit: ModelUnit) -> RankModule:
        return RankModule(unit, self.views, self.meeting, self.precision, self.read, self._whole)

    def _compute(self, unit: ModelUnit, args: Torch, kwargs: Torch) -> tuple[Torch, RankReport]:
        import torch

        part: RankModule | None = None
        try:
            with torch.no_grad(), use_device(self.precision.device):
                part = self._load(unit)
                output = part.module(*args, **kwargs)
        except FAILURES as error:
            raise_machine_error(error, self.precision.device)
            return None, RankReport(error, part.list_idle() if part is not None else ())
        return output, RankReport(None, part.list_idle(), has_nan(output))
