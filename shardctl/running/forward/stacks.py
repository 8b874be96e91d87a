"""Provides arrays of many experts that are too large to hold: they are read one expert at a time."""

from __future__ import annotations

from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.value import state_class

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.running.forward.skeleton import TensorSlot
    from shardctl.running.forward.streamed_modules import ComputePrecision
    from shardctl.running.forward.weights import ModelWeights

Torch = Any
_EXPERT_STACK_NDIM: Final = 3


@state_class
class ExpertStack:
    """Stands where a parameter with one row an expert stands; an index reads that expert."""

    weights: ModelWeights
    slot: TensorSlot
    precision: ComputePrecision

    def __getitem__(self, expert: Torch) -> Torch:
        """Return one expert's weight, ready to compute with."""
        read = self.weights.direct[self.slot][int(expert)]
        return self.weights.cast_floats(self.slot, read, self.precision.dtype).to(self.slot.device)


@contextmanager
def record_chosen_experts(model: Torch) -> Iterator[dict[str, set[int]]]:
    """Record the experts that tokens are sent to while the `with` block runs, by the name of their module."""
    seen: dict[str, set[int]] = {}
    hooks = []
    for name, module in model.named_modules():
        if "Experts" in type(module).__name__ and isinstance(getattr(module, "num_experts", None), int):
            hooks.append(module.register_forward_pre_hook(_IndexHook(seen.setdefault(name, set())), with_kwargs=True))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@state_class
class _IndexHook:
    """Notes the indices that a module is called with."""

    seen: set[int]

    def __call__(self, module: Torch, args: Torch, kwargs: Torch) -> None:
        for given in (*args, *kwargs.values()):
            if hasattr(given, "is_floating_point") and given.dtype.is_signed and not given.is_floating_point():
                self.seen.update(index for index in given.unique().tolist() if 0 <= index < module.num_experts)


def count_idle_experts(model: Torch, seen: dict[str, set[int]]) -> tuple[int, int]:
    """Count how many experts no token was sent to, and how many there are, where tokens are sent to some."""
    counts = [(model.get_submodule(name).num_experts, len(indices)) for name, indices in seen.items() if indices]
    return sum(every - some for every, some in counts), sum(every for every, _ in counts)


def is_stack(slot: TensorSlot, precision: ComputePrecision) -> bool:
    """Return whether the slot holds more experts than may be held at once."""
    large = prod(slot.shape) * precision.dtype.itemsize > precision.limit
    return (
        large
        and len(slot.shape) == _EXPERT_STACK_NDIM
        and "Experts" in type(slot.module).__name__
        and not slot.is_buffer
    )
