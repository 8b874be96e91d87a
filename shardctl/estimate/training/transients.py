"""Estimates what a training rank holds briefly: gathered weights, gradients being sent, copies for a step.

Each runtime says what there is in which moment of a step; `moments` adds it to what lasts and to activations. All of it
is modelled: buckets and limits are options of the runtimes, whose defaults are taken here, and what is prefetched
depends on timing.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from shardctl.estimate.term import MemoryTerm, sum_terms
from shardctl.estimate.training.scheme import F32
from shardctl.estimate.training.unit_transients import UnitTransients

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardctl.estimate.model.rank_shards import HeldPart, RankShards
    from shardctl.estimate.training.scheme import TrainingScheme
    from shardctl.estimate.training.step_phase import PassingHold, StepPosition
    from shardctl.estimate.workload import TrainingWorkload
    from shardctl.tensors.mesh import Mesh

_REDUCE_BUCKET_ELEMENTS: Final = 500_000_000
"""Elements of a bucket that gradients are reduced in (DeepSpeed, `reduce_bucket_size`); transformers' "auto" sets
the hidden size squared instead."""
_MAX_LIVE_ELEMENTS: Final = 1_000_000_000
"""Elements beyond which nothing is gathered ahead (DeepSpeed, `stage3_max_live_parameters`)."""
_MAX_REUSE_DISTANCE_ELEMENTS: Final = 1_000_000_000
"""What is used again within so many elements stays gathered (DeepSpeed, `stage3_max_reuse_distance`)."""
_PREFETCH_BUCKET_ELEMENTS: Final = 50_000_000
"""Elements that are gathered ahead, into one buffer (DeepSpeed, `stage3_prefetch_bucket_size`)."""
_PERSISTENCE_THRESHOLD_ELEMENTS: Final = 100_000
"""Tensors of at most so many elements are gathered once (DeepSpeed, `stage3_param_persistence_threshold`)."""
_SUB_GROUP: Final = 1_000_000_000
"""Elements that one step of the optimizer takes at once (DeepSpeed, `sub_group_size`)."""
_DEEPSPEED_SOURCE: Final = "DeepSpeed 0.19.8, docs/code-docs/source/memory.rst and runtime/zero"
_FOREACH_OPTIMIZER_SOURCE: Final = (
    "torch 2.13, torch.optim, `foreach`: about the size of the parameters; none with `fused`"
)
_TRAINER_OPTIMIZER_SOURCE: Final = (
    "transformers 5.23, training_args.py: `adamw_torch_fused` from torch 2.8 on, and optimization.Adafactor; about the "
    "size of the parameters with torch's `foreach`"
)
_PARAMETER_SHARDING_STAGE: Final = 3
"""The stage of ZeRO that shares parameters."""


STEP: Final = "copies for the optimizer's step"
"""The name of what is held when activations and gathered weights are gone."""


def build_passing_hold(holding: RankShards, mesh: Mesh, work: TrainingWorkload, plan: TrainingScheme) -> PassingHold:
    """Build what the runtime of `plan` holds for moments of a step on the ranks of `holding`."""
    if plan.runtime == "units":
        piped = mesh.degree("pp") > 1
        waits = (piped or plan.zero == 1) and work.count_passes(mesh.degree("pp")) > 1
        ranks = mesh.degree("fsdp") * (plan.sharers if plan.zero else 1)
        return UnitTransients(holding, plan, ranks=ranks, waits=waits)
    if plan.runtime == "autocast":
        return CastTransients(holding, plan, again=work.recompute == "full")
    return PartitionTransients(holding, plan, bucket=_REDUCE_BUCKET_ELEMENTS if work.profile == "deepspeed" else None)


def list_step_terms(shared: int, largest: int, plan: TrainingScheme) -> Iterator[MemoryTerm]:
    """List what the optimizer's step copies; `shared` are the trained elements whose states this rank updates.

    DeepSpeed makes fp32 copies of gradients, and torch's foreach kernels one temporary as large as the parameters.
    transformers' Trainer takes AdamW with a fused kernel, which makes none, and its own Adafactor, which has two of the
    tensor that it updates; `largest` are the elements of the largest.
    """
    if plan.offloaded or plan.steps_in_backward:
        return
    if plan.runtime == "partitions" and plan.zero and plan.master and plan.gradient != F32:
        some = min(shared, _SUB_GROUP) if plan.zero == _PARAMETER_SHARDING_STAGE else shared
        flat, wide = plan.gradient.unit_bytes, F32.unit_bytes
        yield MemoryTerm(
            STEP,
            "workspace",
            (flat + wide) * some,
            f"{flat + wide} * elements",
            {"elements": some},
            "DeepSpeed 0.19.8, stage3.py, `_prepare_fp32_grad_for_sub_group`, and the same in stage_1_and_2.py",
            interval=(wide * some, (flat + wide) * some),
        )
    elif plan.optimizer.spreads:
        nbytes = 4 * plan.resident.nbytes((shared,))
        yield MemoryTerm(
            STEP,
            "workspace",
            nbytes,
            f"4 * {plan.resident.unit_bytes} * elements",
            {"elements": shared},
            "facebookresearch/optimizers f606606 on a CPU: 2.25 to 3 copies of what a rank updates, 3.9 to 4 in steps "
            "that update preconditioners",
            interval=(nbytes // 2, nbytes),
        )
    elif plan.runtime in {"units", "autocast"} and plan.optimizer.temporary:
        whole = plan.resident.nbytes((shared,))
        about = (round(0.99 * whole), round(1.01 * whole)) if plan.foreach else None
        some = shared if plan.foreach else plan.optimizer.trainer_copies * largest
        yield MemoryTerm(
            STEP,
            "workspace",
            plan.resident.nbytes((some,)),
            f"{plan.resident.unit_bytes} * elements",
            {"elements": some},
            _FOREACH_OPTIMIZER_SOURCE if plan.runtime == "units" else _TRAINER_OPTIMIZER_SOURCE,
            interval=about if plan.said else (0, max(whole, plan.resident.nbytes((some,)))),
        )


class CastTransients:
    """What autocast keeps: each matrix that it has cast, until the backward pass has used it.

    A layer that is computed `again` casts its own again, and keeps none before; but autocast itself forgets what it has
    cast of weights that are trained at the end of the forward pass only. It does not note what it has cast of others.
    """

    def __init__(self, holding: RankShards, plan: TrainingScheme, *, again: bool) -> None:
        self.plan, self.again = plan, again
        self.holds_forward = again and plan.compute != plan.resident
        layers: dict[int, int] = {}
        frozen: dict[int, int] = {}
        trained: dict[int, int] = {}
        self.head = self.rest = self.head_trained = self.tied = 0
        self.largest: dict[int, int] = {}
        for part in holding.parts:
            learns = part.kind.trainable
            if not learns and part.kind.dtype != F32:
                continue
            elements, numbers = part.count * part.gathered, part.kind.layers
            if not numbers:
                head = elements if part.kind.matrix and ("last", 0) in part.kind.spec.where else 0
                self.rest += elements if learns else 0
                self.head_trained += head if learns else 0
                # The gradient of a tied head waits for the embedding's, which is added to it.
                self.tied += head if learns and ("first", 0) in part.kind.spec.where else 0
                self.head += head
                continue
            number = next((n for n in numbers if n in holding.layers), numbers[0])
            trained[number] = trained.get(number, 0) + (elements if learns else 0)
            self.largest[number] = max(self.largest.get(number, 0), part.gathered if learns else 0)
            some = layers if learns else frozen
            some[number] = some.get(number, 0) + (elements if part.kind.matrix else 0)
        self.numbers = sorted(trained)
        every = (layers.get(n, 0) + frozen.get(n, 0) for n in self.numbers)
        self.layers_before = list(accumulate(every, initial=0))
        self.cached = sum(layers.values())
        self.trained_before = list(accumulate((trained[n] for n in self.numbers), initial=0))

    def count_bytes(self, place: StepPosition) -> int:
        """Count bytes of the casts."""
        return self.plan.compute.nbytes((self._count_elements(place),))

    def count_idle(self, place: StepPosition, gradients: int) -> float:  # noqa: ARG002 - as of all runtimes
        """Count nothing: what there is comes from the stream that computes."""
        return 0.0

    def _count_elements(self, place: StepPosition) -> int:
        if self.plan.compute == self.plan.resident or place.phase in {"end", "step"}:
            return 0
        if place.phase in {"forward", "loss", "head"}:
            if self.again:
                return self.head + (self.cached if place.phase == "forward" else 0)
            return self.head + self.layers_before[-1]
        until = self._count_layers(place)
        if self.again:
            before = bisect_left(self.numbers, place.layer)
            return self.layers_before[until] - self.layers_before[before]
        return self.layers_before[until]

    def _count_layers(self, place: StepPosition) -> int:
        """Count the layers whose backward passes have not ended."""
        return bisect_left(self.numbers, place.layer + (place.phase == "layer"))

    def count_gradients(self, place: StepPosition) -> float:
        """Count which part of the gradients is there."""
        whole = self.rest + self.trained_before[-1]
        if not whole:
            return 1.0
        if self.plan.steps_in_backward:
            return self._count_waiting(place) / whole
        if place.later or place.phase in {"end", "step"}:
            return 1.0
        if place.phase in {"forward", "loss", "head"}:
            return 0.0
        return (self.head_trained + self.trained_before[-1] - self.trained_before[self._count_layers(place)]) / whole

    def _count_waiting(self, place: StepPosition) -> int:
        """Count elements of gradients whose parameters are updated in this phase, or whose other gradients wait."""
        if place.phase == "end":
            return max(self.rest - self.head_trained, 2 * self.tied)
        if place.phase in {"forward", "loss", "step"}:
            return 0
        return self.head_trained if place.phase == "head" else self.tied + self.largest[place.layer]

    def list_terms(self, place: StepPosition) -> Iterator[MemoryTerm]:
        """List the casts."""
        nbytes = self.count_bytes(place)
        yield MemoryTerm(
            f"{self.plan.compute} casts of the weights",
            "weights",
            nbytes,
            f"{self.plan.compute.unit_bytes} * matrices",
            {"matrices": self._count_elements(place)},
            "torch 2.13, torch.autocast's cache of weights",
            interval=(0, nbytes),
        )


class PartitionTransients:
    """What DeepSpeed gathers and reduces in, in all passes; and nothing of Megatron and of pipelines without ZeRO."""

    def __init__(self, holding: RankShards, plan: TrainingScheme, *, bucket: int | None) -> None:
        """Count what is held; without a `bucket`, in elements, there are no more than all that is trained."""
        self.plan, self.holds_forward = plan, False
        parts = [part for part in holding.parts if part.kind.trainable]
        self.trained, self.largest = _count_trained_elements(parts), max((p.gathered for p in parts), default=0)
        self.bucket = bucket or min(self.trained, _REDUCE_BUCKET_ELEMENTS)
        # Weights that are not trained are shared and gathered as the others are, in the type in which they are kept.
        sizes = [(part.count, _count_gathered(part, plan)) for part in holding.parts]
        self.whole, self.widest = sum(count * n for count, n in sizes), max((n for _, n in sizes), default=0)
        self.small = sum(count * n for count, n in sizes if n <= _PERSISTENCE_THRESHOLD_ELEMENTS)
        self.loss: tuple[MemoryTerm, ...] = ()
        self.passes: tuple[MemoryTerm, ...] = ()
        if plan.runtime == "partitions" and plan.zero:
            self.loss = tuple(self._list_gathered()) if plan.zero == _PARAMETER_SHARDING_STAGE else ()
            self.passes = (*self.loss, self._build_bucket())
        if plan.zero == _PARAMETER_SHARDING_STAGE:
            self.loss = self.passes  # its bucket is never freed
        self._nbytes = {True: sum_terms(self.loss).nbytes, False: sum_terms(self.passes).nbytes}

    def count_bytes(self, place: StepPosition) -> int:
        """Count bytes of what is gathered, and of the buckets."""
        if place.phase == "step" and self.plan.zero != _PARAMETER_SHARDING_STAGE:
            return 0
        return self._nbytes[place.phase == "loss"]

    def count_idle(self, place: StepPosition, gradients: int) -> float:  # noqa: ARG002 - as of all runtimes
        """Count nothing: what there is comes from the stream that computes."""
        return 0.0

    def count_gradients(self, place: StepPosition) -> float:
        """Count which part of the gradients is there: those of ZeRO-3 have a buffer that stays, and Megatron's too."""
        grows = self.plan.runtime == "partitions" and self.plan.zero < _PARAMETER_SHARDING_STAGE
        return 0.0 if grows and place.phase == "loss" and not place.later else 1.0

    def list_terms(self, place: StepPosition) -> Iterator[MemoryTerm]:
        """List the same."""
        if place.phase != "step" or self.plan.zero == _PARAMETER_SHARDING_STAGE:
            yield from self.loss if place.phase == "loss" else self.passes

    def _list_gathered(self) -> Iterator[MemoryTerm]:
        width = self.plan.compute.unit_bytes
        # Where the forward pass ends, the last half of that distance is used again before its end.
        stay = max(self.widest, min(self.whole, _MAX_REUSE_DISTANCE_ELEMENTS // 2))
        yield MemoryTerm(
            "gathered weights that are used again soon, and gradients of the largest",
            "weights",
            width * (stay + self.largest),
            f"{width} * (gathered + largest)",
            {"gathered": stay, "largest": self.largest},
            _DEEPSPEED_SOURCE,
            interval=(
                width * (self.widest + self.largest),
                width * (self.largest + max(self.widest, min(self.whole, _MAX_LIVE_ELEMENTS))),
            ),
        )
        ahead = min(self.whole, _PREFETCH_BUCKET_ELEMENTS)
        yield MemoryTerm(
            "buffer that weights are gathered into",
            "weights",
            width * ahead,
            f"{width} * elements gathered at once",
            {"elements gathered at once": ahead},
            _DEEPSPEED_SOURCE,
            interval=(0, width * ahead),
        )
        yield MemoryTerm(
            "small tensors, never shared",
            "weights",
            width * self.small,
            f"{width} * elements of tensors of at most {_PERSISTENCE_THRESHOLD_ELEMENTS}",
            {"elements of tensors": self.small},
            _DEEPSPEED_SOURCE,
            interval=(0, width * self.small),
        )

    def _build_bucket(self) -> MemoryTerm:
        """Build the term of the buckets, which DeepSpeed allocates whole, however small the model."""
        width = self.plan.compute.unit_bytes
        buckets = 1 if self.plan.zero == _PARAMETER_SHARDING_STAGE else 2
        return MemoryTerm(
            "buckets that gradients are reduced in",
            "workspace",
            width * self.bucket,
            f"{width} * bucket",
            {"bucket": self.bucket},
            _DEEPSPEED_SOURCE,
            interval=(width * min(self.largest, _REDUCE_BUCKET_ELEMENTS), buckets * width * _REDUCE_BUCKET_ELEMENTS),
        )


def _count_gathered(part: HeldPart, plan: TrainingScheme) -> int:
    """Count the elements of one gathered tensor; of codes, those that the computing type has in as many bytes."""
    if part.kind.trainable:
        return part.gathered
    return -(-part.kind.dtype.nbytes((part.gathered,)) // plan.compute.unit_bytes)


def _count_trained_elements(parts: Iterable[HeldPart]) -> int:
    return sum(part.count * part.gathered for part in parts if part.kind.trainable)
