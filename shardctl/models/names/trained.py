"""Assigns optimizer states to the tensors of a model, by the canonical name of each parameter."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardctl.models.names.binding import find_canonical_name
from shardctl.tensors.training import format_state_name, split_state_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.models.tables.model import Model
    from shardctl.tensors.manifest import Tensor, TrainingState


def bind_training(model: Model, stored: TrainingState) -> TrainingState:
    """Return `stored` under canonical names, in the order of the model's tensors; states of fused arrays taken apart.

    A state that has not the shape of a fused array, such as a step, is that of the first of its parts alone.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in stored.states.items():
        state, parameter = split_state_name(name) or ("", name)
        for part, held in _split_optimizer_state(model, parameter, tensor):
            new = format_state_name(state, part)
            found.setdefault(part, {})[new] = replace(held, name=new, spelling=(name,) if new != name else ())
    groups = tuple(
        replace(
            group, parameters=tuple(part for name in group.parameters for part in _find_canonical_names(model, name))
        )
        for group in stored.groups
    )
    states = {new: tensor for part in model.tensors for new, tensor in found.get(part, {}).items()}
    return replace(stored, states=states, groups=groups)


def _split_optimizer_state(model: Model, parameter: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    meant = find_canonical_name(model, parameter)
    fusion = model.fusions.get(meant or "")
    if fusion is not None and tensor.shape == fusion.shape:
        for part, held in fusion.taken_apart(tensor):
            yield model.aliases.get(part, part), held
        return
    yield _find_canonical_names(model, parameter)[0], tensor


def _find_canonical_names(model: Model, parameter: str) -> tuple[str, ...]:
    """Find the tensors that a stored parameter is or holds."""
    meant = find_canonical_name(model, parameter)
    if meant is None:
        return (parameter,)
    fusion = model.fusions.get(meant)
    parts = fusion.tensors if fusion is not None else (meant,)
    return tuple(dict.fromkeys(model.aliases.get(part, part) for part in parts))
