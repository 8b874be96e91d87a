"""Names the places of a training step at which runtimes hold different things."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.estimate.term import MemoryTerm

StepPhase = Literal["forward", "loss", "head", "layer", "reduce", "end", "step"]
"""The end of the forward pass, in the loss; the backward pass of the loss; of the head and the last norm; of a layer;
the reduction of a layer's gradients; that of what is outside of layers; the optimizer's step."""


@value_class
class StepPosition:
    """A place in a step."""

    phase: StepPhase
    layer: int = 0
    """Whose backward pass or reduction it is; no matter in other phases."""
    later: bool = False
    """Whether another microbatch had its backward pass before."""


class PassingHold(Protocol):
    """What a runtime holds for moments of a step: gathered weights, gradients on their way, copies for the step."""

    holds_forward: bool
    """Whether it holds more at the end of the forward pass than in the loss's backward pass."""

    def count_bytes(self, place: StepPosition) -> int:
        """Count bytes held at a place."""

    def count_gradients(self, place: StepPosition) -> float:
        """Count which part of the gradients, from 0 to 1, is there."""

    def count_idle(self, place: StepPosition, gradients: int) -> float:
        """Count bytes that the allocator keeps for other streams, and that nobody uses at a place.

        `gradients` are bytes of those that the ranks share, once all are there.
        """

    def list_terms(self, place: StepPosition) -> Iterator[MemoryTerm]:
        """List what is held at a place, which together are the bytes counted."""
