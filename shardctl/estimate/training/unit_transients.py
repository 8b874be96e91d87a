"""Estimates what FSDP2 holds in each moment of a step: gathered units, and gradients that are not yet reduced.

In the order of torch 2.13, `distributed/fsdp/_fully_shard/_fsdp_param_group.py`, for layers that are a unit each, and a
root unit of all else. Forward, the root stays gathered, and a layer is freed behind it. Backward, a layer's weights are
there with the next layer's buffer, which is gathered ahead. Its gradients, whole and in the type that computes, are
copied into a buffer of the type that reduces, which is freed when the next layer's gradients are there. The root's wait
for the end. Pipelines of torch (`distributed/pipelining/stage.py`, `backward_maybe_with_nosync`) neither free weights
nor reduce gradients before the last microbatch.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from shardctl.estimate.term import MemoryTerm

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardctl.base.dtype import DType
    from shardctl.estimate.model.rank_shards import HeldPart, RankShards
    from shardctl.estimate.training.scheme import TrainingScheme
    from shardctl.estimate.training.step_phase import StepPosition

_FSDP_UNITS_SOURCE: Final = (
    "torch 2.13, torch.distributed.fsdp.fully_shard, whose storages were followed through a step"
)


class UnitTransients:
    """What FSDP2 holds; `ranks` share each parameter, and gradients `wait` for the last of several microbatches."""

    def __init__(self, holding: RankShards, plan: TrainingScheme, *, ranks: int, waits: bool) -> None:
        parts_of = dict(holding.units())
        root = tuple(parts_of.pop(None, ()))
        self.width, self.reduced = plan.compute.unit_bytes, plan.gradient.unit_bytes
        self.numbers = sorted(n for n in parts_of if n is not None)
        self.gathered = [_count_gathered_bytes(parts_of[n], plan) for n in self.numbers]
        self.trained = [_count_trained_elements(parts_of[n]) for n in self.numbers]
        self.first = [_find_largest_matrix(parts_of[n]) for n in self.numbers]
        self.gathered_before = list(accumulate(self.gathered, initial=0))
        self.trained_before = list(accumulate(self.trained, initial=0))
        self.root, self.root_trained = _count_gathered_bytes(root, plan), _count_trained_elements(root)
        self.head = _count_trained_elements(
            p for p in root if any(w == "last" for w, _ in p.kind.spec.where) and p.kind.matrix
        )
        self.steps = plan.steps_in_backward
        self.stays = plan.zero in {1, 2} or waits
        self.waits = waits
        self.ahead = ranks > 1
        self.holds_forward = False

    @property
    def whole(self) -> int:
        """Trained elements of all units."""
        return self.root_trained + self.trained_before[-1]

    def count_idle(self, place: StepPosition, gradients: int) -> float:
        """Count bytes of gathered buffers and of reduced gradients, which have streams of their own, that are free."""
        if not self.ahead:
            return 0.0
        layer = max(self.gathered, default=0)
        buffer = self._count_gathered_ahead(place)
        return max(0, layer + max(self.root, layer) - buffer) + gradients * (1 - self.count_gradients(place))

    def _count_gathered_ahead(self, place: StepPosition) -> int:
        """Count bytes of the buffer in which the next layer is gathered."""
        if self.waits or self.stays or place.phase in {"loss", "end", "step"}:
            return 0
        if place.phase == "head":
            return self.gathered[-1] if self.gathered else 0
        at = self._find_unit(place)
        return self.gathered[at - 1] if at else 0

    def _find_unit(self, place: StepPosition) -> int:
        """Find the number of a layer's unit among those of the stage."""
        return bisect_left(self.numbers, place.layer)

    def count_bytes(self, place: StepPosition) -> int:
        """Count bytes of gathered weights and of gradients that are not yet reduced."""
        if place.phase == "step":
            return 0
        return self._count_gathered(place) + self._count_waiting(place)

    def count_gradients(self, place: StepPosition) -> float:
        """Count which part of the gradients is reduced by then."""
        if self.steps and self.whole:  # those of one unit: as soon as they are reduced, they are used and freed
            unit = self.trained[self._find_unit(place)] if place.phase in {"layer", "reduce"} else 0
            return (self.root_trained if place.phase == "end" else unit) / self.whole
        if place.phase == "step" or not self.whole or (place.later and not self.waits):
            return 1.0
        if place.phase in {"loss", "head"} or self.waits:
            return 0.0
        after = self.trained_before[-1]
        if place.phase != "end":
            after -= self.trained_before[min(self._find_unit(place) + 1, len(self.numbers))]
        return after / self.whole

    def _count_gathered(self, place: StepPosition) -> int:
        """Count bytes of weights that are gathered, and of the buffer for the next."""
        if self.waits:
            return self.gathered_before[-1] + (0 if place.phase == "end" else self.root)
        if place.phase == "end":
            return 0 if self.ahead else self.root
        if self.stays:
            layers = place.phase in {"layer", "reduce"}
            return self.root + self.gathered_before[self._find_unit(place) + 1 if layers else -1]
        if place.phase == "loss":
            return self.root
        if place.phase == "head":
            return self.root + (self.gathered[-1] if self.ahead and self.gathered else 0)
        at = self._find_unit(place)
        mine = self.gathered[at] if place.phase == "layer" or at + 1 < len(self.gathered) else 0
        return self.root + (self.gathered[at - 1] if self.ahead and at else 0) + mine

    def _count_waiting(self, place: StepPosition) -> int:
        """Count bytes of gradients that are whole, and of the buffers in which they are reduced."""
        return self._count_whole(place) * self.width + self._count_reducing(place) * self.reduced

    def _count_whole(self, place: StepPosition) -> int:
        """Count elements of gradients that are whole, in the type that computes."""
        if place.phase == "loss":
            return 0
        if place.phase == "end":
            return 0 if self.waits else self.root_trained
        if place.phase == "head":
            return self.head
        return self.head + (self.trained if place.phase == "reduce" else self.first)[self._find_unit(place)]

    def _count_reducing(self, place: StepPosition) -> int:
        """Count elements of gradients in the type that reduces, but those that are reduced."""
        if self.waits:
            return self._count_accumulated(place)
        if place.phase == "end":
            return self.root_trained
        if place.phase in {"loss", "head"}:
            return 0
        # A layer's buffer is made when that of the layer behind is freed: there are as many bytes with either.
        at = self._find_unit(place) + 1
        return self.trained[at] if at < len(self.trained) else self.trained[-1] if place.phase == "reduce" else 0

    def _count_accumulated(self, place: StepPosition) -> int:
        """Count elements of gradients that wait for the last microbatch; the root's are reduced first."""
        if place.phase == "end":
            return self.whole + self.root_trained
        if place.later or place.phase not in {"layer", "reduce"}:
            return self.whole if place.later else 0
        return self.trained_before[-1] - self.trained_before[self._find_unit(place) + 1]

    def list_terms(self, place: StepPosition) -> Iterator[MemoryTerm]:
        """List the same."""
        if place.phase == "step":
            return
        gathered, waiting = self._count_gathered(place), self._count_waiting(place)
        largest, total = max(self.gathered, default=0), self.root + self.gathered_before[-1]
        layers = (gathered - self.root) / self.width
        if self.stays:
            yield MemoryTerm(
                "gathered weights",
                "weights",
                gathered,
                f"{self.width} * gathered",
                {"gathered": gathered / self.width},
                _FSDP_UNITS_SOURCE,
                interval=(gathered, gathered),
            )
        else:
            yield MemoryTerm(
                "gathered units",
                "weights",
                gathered,
                f"{self.width} * (root + layers)",
                {"root": self.root / self.width, "layers": layers},
                _FSDP_UNITS_SOURCE,
                interval=(gathered, min(gathered + largest, max(gathered, total))),
            )
        yield MemoryTerm(
            "gradients before they are shared",
            "gradients",
            waiting,
            f"{self.width} * whole + {self.reduced} * being reduced",
            {"whole": self._count_whole(place), "being reduced": self._count_reducing(place)},
            _FSDP_UNITS_SOURCE,
            interval=(waiting, waiting + max(self.trained, default=0) * self.reduced if waiting else 0),
        )


def _count_gathered_bytes(parts: Iterable[HeldPart], plan: TrainingScheme) -> int:
    return sum(
        part.count * _choose_gathered_type(part, plan).nbytes((part.gathered,))
        if part.kind.trainable
        else part.gathered_bytes
        for part in parts
    )


def _choose_gathered_type(part: HeldPart, plan: TrainingScheme) -> DType:
    """Choose the type in which a part is gathered: torchao casts matrices of layers, and neither norms nor the root."""
    return plan.gathered if part.kind.matrix and part.kind.layers else plan.compute


def _count_trained_elements(parts: Iterable[HeldPart]) -> int:
    return sum(part.count * part.gathered for part in parts if part.kind.trainable)


def _find_largest_matrix(parts: Iterable[HeldPart]) -> int:
    """Find the elements of the largest matrix: the gradient that is there when an MLP's backward pass needs most."""
    return max((part.gathered for part in parts if part.kind.trainable), default=0)
