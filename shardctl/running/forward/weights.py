"""Finds which tensor of a checkpoint fills which place of a model, for the source and for shards."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any

from shardctl.base.value import state_class

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardctl.running.forward.adapter import WeightConversion
    from shardctl.running.forward.lazy_state_dict import LazyTensor
    from shardctl.running.forward.shards import CheckpointShards
    from shardctl.running.forward.skeleton import ModelSkeleton, TensorSlot

Torch = Any


@state_class
class ModelWeights:
    """A checkpoint as the executor sees it."""

    title: str
    """`source` or `shards`."""
    direct: dict[TensorSlot, LazyTensor] = field(default_factory=dict)
    """What is put as it is read."""
    converted: dict[TensorSlot, str] = field(default_factory=dict)
    """What transformers makes of several tensors: the name of the group."""
    groups: dict[str, dict[str, LazyTensor]] = field(default_factory=dict)
    """The tensors of each group."""
    unused: list[str] = field(default_factory=list)
    """Tensors that the model has no place for."""
    shards: CheckpointShards | None = None
    """Set where ranks compute with their own parts."""
    rounded: Callable[[TensorSlot], Torch] | None = None
    """A type to which each tensor is rounded first, as a cast did."""

    def has_weights_for(self, slot: TensorSlot) -> bool:
        """Return whether the checkpoint has something for it."""
        return slot in self.direct or slot in self.converted

    def read(self, slot: TensorSlot, dtype: Torch) -> Torch:
        """Return what fills `slot`, of floats in type `dtype`."""
        return self.cast_floats(slot, self.direct[slot][...], dtype)

    def cast_floats(self, slot: TensorSlot, tensor: Torch, dtype: Torch) -> Torch:
        """Return floats in the type in which is computed, rounded first if the shards are."""
        if not tensor.is_floating_point():
            return tensor
        to = self.rounded(slot) if self.rounded is not None else None
        return (tensor if to is None else tensor.to(to)).to(dtype)


def place_weights(
    title: str,
    skeleton: ModelSkeleton,
    entries: Mapping[str, LazyTensor],
    conversion: WeightConversion,
    *,
    shards: CheckpointShards | None = None,
) -> ModelWeights:
    """Find a place for every entry; several that transformers makes one tensor of are taken together."""
    found = ModelWeights(title, shards=shards)
    targets = conversion.targets(entries)
    for name, lazy in entries.items():
        target = targets.get(name)
        if target is None:
            found.unused.append(name)
            continue
        slots = skeleton.slots[target.name]
        if target.converted:
            found.groups.setdefault(target.name, {})[name] = lazy
            for made in (target.name, *target.besides):
                found.converted |= dict.fromkeys(skeleton.slots[made], target.name)
            continue
        for slot in slots:  # a tie is stored under one of its names, or under each
            if target.name in slot.names or slot not in found.direct:
                found.direct[slot] = lazy
    return found


def list_unfilled_slots(skeleton: ModelSkeleton, weights: ModelWeights) -> list[TensorSlot]:
    """List the places for which a checkpoint has nothing, in the model's order: a seed then gives one model."""
    slots = dict.fromkeys(slot for slots in skeleton.slots.values() for slot in slots)
    return [slot for slot in slots if not weights.has_weights_for(slot)]
