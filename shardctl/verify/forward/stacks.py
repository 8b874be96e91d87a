"""Arrays of many experts that are too large to hold: code that takes one expert at a time reads one at a time."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from shardctl.verify.forward.leaves import Precision
    from shardctl.verify.forward.skeleton import Slot
    from shardctl.verify.forward.weights import Weights

Torch = Any
_NDIM: Final = 3


@dataclass(slots=True)
class Stack:
    """Stands where a parameter with one row an expert stands; an index reads that expert."""

    weights: Weights
    slot: Slot
    precision: Precision

    def __getitem__(self, expert: Torch) -> Torch:
        """One expert's weight, ready to compute with."""
        read = self.weights.direct[self.slot][int(expert)]
        return self.weights.typed(self.slot, read, self.precision.dtype).to(self.precision.device)


def is_stack(slot: Slot, precision: Precision) -> bool:
    """Whether the slot holds more experts than may be held at once."""
    large = prod(slot.shape) * precision.dtype.itemsize > precision.limit
    return large and len(slot.shape) == _NDIM and "Experts" in type(slot.module).__name__ and not slot.is_buffer
