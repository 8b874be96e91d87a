"""Holds the result of an estimate: what every rank needs, term by term, and whether it fits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardctl.base.value import value_class
from shardctl.estimate.term import sum_terms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardctl.estimate.model.rank_shards import RankShards
    from shardctl.estimate.term import Counter, MemorySum, MemoryTerm, Tier
    from shardctl.estimate.training.timeline import StepTimeline


@value_class
class RankEstimate:
    """What each of a group of equal ranks needs."""

    holding: RankShards
    terms: tuple[MemoryTerm, ...]
    timeline: StepTimeline | None = None
    """In training, the moments of a step; the terms are those of the worst."""

    def total(self, tier: Tier = "device", counter: Counter | None = None) -> MemorySum:
        """Return bytes that one rank needs in one tier, or that `counter` counts, with the interval to be expected."""
        return sum_terms(self.terms, tier, counter=counter)


@value_class
class MeshEstimate:
    """What all ranks need."""

    ranks: tuple[RankEstimate, ...]
    """The first of each group of ranks that hold the same weights."""
    budget: int | None = None
    """Bytes that each device has for it; None if nobody said."""
    partial: bool = False
    """Whether the terms leave something out, so that ranks need at least as much: then nothing is said to fit."""

    @property
    def distinct(self) -> tuple[RankEstimate, ...]:
        """The first of those ranks of a stage that share their terms: of 100,000 ranks there are few."""
        found: dict[tuple[int, int], RankEstimate] = {}
        for rank in self.ranks:
            found.setdefault((rank.holding.stage, id(rank.terms)), rank)
        return tuple(found.values())

    @property
    def binding(self) -> RankEstimate:
        """The rank that needs most, which decides whether it fits."""
        return max(self.distinct, key=lambda rank: rank.total().nbytes)

    @property
    def fits(self) -> bool | None:
        """Whether the heaviest rank fits the budget by the estimate itself; None without a budget.

        None as well where something is left out, and the rest is not too much already.
        """
        if self.budget is None:
            return None
        enough = self.binding.total().nbytes <= self.budget
        return None if enough and self.partial else enough

    @property
    def certain(self) -> bool | None:
        """Whether `fits` holds at both ends of the interval; None without a budget."""
        if self.budget is None:
            return None
        worst = max(rank.total().high for rank in self.distinct)
        least = max(rank.total().low for rank in self.distinct)
        return (worst <= self.budget and not self.partial) or least > self.budget

    def within(self, budget: int | None) -> MeshEstimate:
        """Return the same needs, held against `budget`."""
        return replace(self, budget=budget)


def build_estimate(
    holdings: Sequence[RankShards],
    terms: Sequence[Sequence[MemoryTerm]],
    timelines: Sequence[StepTimeline | None] | None = None,
) -> MeshEstimate:
    """Build an estimate of `terms`, one sequence, and perhaps a timeline, for each of `holdings`."""
    lines = timelines or [None] * len(holdings)
    return MeshEstimate(
        tuple(RankEstimate(h, tuple(t), line) for h, t, line in zip(holdings, terms, lines, strict=True))
    )
