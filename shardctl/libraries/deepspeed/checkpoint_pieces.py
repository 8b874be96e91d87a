"""Holds what has been found in the files of a checkpoint, before it is put together."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from shardctl.base.value import state_class
from shardctl.libraries.deepspeed.pieces import TensorPieces

if TYPE_CHECKING:
    from shardctl.base.settings import Setting


@state_class
class CheckpointPieces:
    """Pieces of every tensor, by what they are of."""

    module: TensorPieces = field(default_factory=TensorPieces)
    """The module's own copy of weights, and what has no other."""
    master: TensorPieces = field(default_factory=TensorPieces)
    """The optimizer's copy of them."""
    states: dict[str, TensorPieces] = field(default_factory=dict)
    """By state, under the names of parameters."""
    parameters: dict[str, None] = field(default_factory=dict)
    """Those that the optimizer has, in its order."""
    ties: dict[str, str] = field(default_factory=dict)
    """Other names of tied weights, and the one under which each is held."""
    groups: dict[int, tuple[dict[str, None], dict[str, Setting]]] = field(default_factory=dict)
    """The parameters of each group, in order, and its settings."""
    kind: str = "without ZeRO"
    """How the optimizer was parted, as messages say it."""
    world: int = 1
    """Data-parallel ranks."""
    clipping: float | None = None
    """The norm to which gradients were clipped, 0 for none."""
    others: list[tuple[str, str]] = field(default_factory=list)
    """What is left behind: the key, and the file that has it."""
    warnings: list[str] = field(default_factory=list)

    def forget_optimizer(self) -> None:
        """Leave out all that its files said."""
        self.master, self.states, self.parameters, self.groups = TensorPieces(), {}, {}, {}

    def state(self, name: str) -> TensorPieces:
        """Return the pieces of one kind of state."""
        return self.states.setdefault(name, TensorPieces())
