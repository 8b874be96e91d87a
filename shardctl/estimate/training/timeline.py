"""Adds up what a training rank needs in each moment of a step, because not everything is there at the same time.

The moments are the backward passes of the loss, of the head and of each layer, the reduction of each layer's gradients
and of those outside of layers, and the optimizer's step. A forward pass needs less than the backward pass of the same
layer: its gathered weights are as many, what it makes is kept or freed, and there are no gradients. Its end is a moment
only where layers are computed again under autocast, which has cast all weights by then. Of several microbatches, one is
counted whose backward pass runs while as many as can be are in flight.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.value import value_class
from shardctl.estimate.byte_amount import ByteAmount
from shardctl.estimate.term import MemoryTerm, sum_terms
from shardctl.estimate.training.activations import BackwardEvent
from shardctl.estimate.training.step_phase import StepPosition

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardctl.estimate.term import Category
    from shardctl.estimate.training.activations import RankActivations
    from shardctl.estimate.training.step_phase import PassingHold

_GRADIENT_SHARE_TOLERANCE: Final = 0.03
"""How far the share of gradients that are there by then may be off: it is counted by elements before padding."""


_FSDP_STREAMS_SOURCE: Final = (
    "torch 2.13, fully_shard/_fsdp_collectives.py: gathered buffers and reduced gradients are made in streams of their "
    "own, and the caching allocator has a pool for each, which it gives back only when memory runs out"
)
_LATER_MICROBATCH_SUFFIX: Final = ", of a later microbatch"


@value_class
class StepEvent:
    """What a rank needs in one moment of a training step, without the runtime."""

    name: str
    """In words, such as ``backward pass of layer 3``."""
    parts: Mapping[Category, int]
    """Bytes on the device, by what they are used for."""

    @property
    def nbytes(self) -> int:
        """All bytes on the device."""
        return sum(self.parts.values())


@value_class
class _EventCount:
    """A moment, counted but not yet described."""

    place: StepPosition
    passes: BackwardEvent
    share: float
    """Which part of the gradients is there."""
    nbytes: float
    """Bytes on the device, besides what is there in every moment."""


class StepTimeline:
    """The moments of a step on the ranks that hold the same."""

    def __init__(
        self,
        states: Sequence[MemoryTerm],
        copies: Sequence[MemoryTerm],
        hold: PassingHold,
        activations: RankActivations | None,
        *,
        layers: range,
        microbatches: int,
    ) -> None:
        """Count all moments; `states` are what lasts, gradients whole, and `copies` what the optimizer's step adds."""
        self._states, self._copies, self._hold, self._activations = states, copies, hold, activations
        self._layers = layers
        self._gradients = sum(t.nbytes for t in states if _grows(t))
        self._added = sum_terms(copies).nbytes
        self._counts = tuple(self._list_counts(microbatches))

    def _list_counts(self, microbatches: int) -> Iterator[_EventCount]:
        flights = self._activations.flights if self._activations is not None else 1.0
        if flights > microbatches - 1:  # interleaved schedules hold parts of microbatches
            yield from self._count_pass(flights, later=False)
        if microbatches > 1:
            yield from self._count_pass(min(flights, microbatches - 1), later=True)
        none = BackwardEvent("", None, self._layers.start, ByteAmount(), with_head=False, flights=1)
        yield self._count(StepPosition("end", later=microbatches > 1), none)
        yield self._count(StepPosition("step", later=microbatches > 1), none)

    def _count_pass(self, flights: float, *, later: bool) -> Iterator[_EventCount]:
        """Count the moments of one microbatch's backward pass; `later` if others had theirs before."""
        if self._hold.holds_forward and self._activations is not None:
            yield self._count(StepPosition("forward", later=later), self._activations.build_forward_end(flights))
        for moment in self._list_backward(flights):
            if moment.layer is None:
                yield self._count(StepPosition("loss" if moment.with_head else "head", later=later), moment)
                continue
            yield self._count(StepPosition("layer", moment.layer, later), moment)
            gone = replace(moment, alive=moment.layer, besides=ByteAmount())
            yield self._count(StepPosition("reduce", moment.layer, later), gone)

    def _list_backward(self, flights: float) -> Iterator[BackwardEvent]:
        if self._activations is not None:
            yield from self._activations.list_moments(flights)
            return
        for number in reversed(self._layers):
            yield BackwardEvent("", number, number + 1, ByteAmount(), with_head=False, flights=1)

    def _count(self, place: StepPosition, passes: BackwardEvent) -> _EventCount:
        share = self._hold.count_gradients(place)
        nbytes = self._hold.count_bytes(place) + self._gradients * share
        if self._activations is not None:
            nbytes += self._activations.count_bytes(passes)
        if place.phase == "step":
            nbytes += self._added
        return _EventCount(place, passes, share, nbytes)

    def list_worst_terms(self) -> tuple[MemoryTerm, ...]:
        """List the terms of the moment in which the device needs most; those on other tiers are always there.

        With them is what the allocator keeps for other moments, and cannot use in this one.
        """
        worst = max(self._counts, key=lambda count: count.nbytes)
        return (*self._list_terms(worst), *self._list_idle(worst))

    def _list_idle(self, count: _EventCount) -> Iterator[MemoryTerm]:
        idle = round(self._hold.count_idle(count.place, self._gradients))
        if idle:
            yield MemoryTerm(
                "free memory of other streams",
                "runtime",
                idle,
                "free",
                {"free": idle},
                _FSDP_STREAMS_SOURCE,
                interval=(0, idle),
                counter="reserved",
                spared=True,
            )
        if self._activations is not None:
            yield from self._activations.list_holes(count.passes)

    def list_moments(self) -> tuple[StepEvent, ...]:
        """List the moments in the order of time."""
        both = len({count.place.later for count in self._counts if count.place.phase == "layer"}) > 1
        return tuple(
            StepEvent(
                f"{_name_moment(count.place)}{_LATER_MICROBATCH_SUFFIX if both and _is_in_pass(count.place) else ''}",
                _sum_by_category(self._list_terms(count)),
            )
            for count in self._counts
        )

    def name_worst(self) -> str:
        """Return the name of the moment in which the device needs most."""
        return _name_moment(max(self._counts, key=lambda count: count.nbytes).place)

    def _list_terms(self, count: _EventCount) -> Iterator[MemoryTerm]:
        for term in self._states:
            yield _take_share(term, count.share) if _grows(term) else term
        yield from self._hold.list_terms(count.place)
        if count.place.phase == "step":
            yield from self._copies
        if self._activations is not None:
            yield from self._activations.list_terms(count.passes)


def _grows(term: MemoryTerm) -> bool:
    """Return whether it is the gradients on the device, which a backward pass adds one by one."""
    return term.category == "gradients" and term.tier == "device" and term.name.endswith(" gradients")


def _take_share(term: MemoryTerm, share: float) -> MemoryTerm:
    """Return the gradients of which only a share is there."""
    if share >= 1:
        return term
    nbytes = round(term.nbytes * share)
    return replace(
        term,
        nbytes=nbytes,
        formula=f"share * {term.formula}",
        inputs={**term.inputs, "share": round(share, 6)},
        interval=(
            round(nbytes * (1 - _GRADIENT_SHARE_TOLERANCE)),
            min(term.high, round(nbytes * (1 + _GRADIENT_SHARE_TOLERANCE))),
        ),
    )


def _is_in_pass(place: StepPosition) -> bool:
    """Return whether it is in the backward pass of a microbatch that is not the first."""
    return place.later and place.phase not in {"end", "step"}


def _name_moment(place: StepPosition) -> str:
    return {
        "forward": "end of the forward pass",
        "loss": "backward pass of the loss",
        "head": "backward pass of the head",
        "layer": f"backward pass of layer {place.layer}",
        "reduce": f"reduction of layer {place.layer}",
        "end": "reduction of the rest",
        "step": "optimizer's step",
    }[place.phase]


def _sum_by_category(terms: Iterator[MemoryTerm]) -> dict[Category, int]:
    found: dict[Category, int] = {}
    for term in terms:
        if term.tier == "device" and term.nbytes:
            found[term.category] = found.get(term.category, 0) + term.nbytes
    return found
