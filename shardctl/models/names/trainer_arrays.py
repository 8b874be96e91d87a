"""Takes the arrays of a trainer apart into the tensors of a model, with the optimizer states of each."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardctl.base.errors import SourceError
from shardctl.tensors.training import format_state_name, split_state_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.models.tables.fusion import TensorFusion
    from shardctl.tensors.manifest import Manifest, Tensor, TrainingState


def bind_arrays(stored: Manifest, arrays: Mapping[str, TensorFusion], note: str) -> Manifest:
    """Return `stored` with the tensors that are in `arrays` of it, and their states; whatever else it has stays.

    `note` says in its notes on training how its names were understood.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.tensors.items():
        fusion = arrays.get(name)
        if fusion is None or fusion.declared != tensor.shape:
            tensors[name] = tensor
            continue
        for meant, part in fusion.taken_apart(tensor):
            known = tensors.get(meant)
            chunks = part.chunks if known is None else (*known.chunks, *part.chunks)
            tensors[meant] = replace(part, name=meant, ties=(), chunks=chunks)
    training = stored.training
    return replace(stored, tensors=tensors, training=training and bind_states(arrays, training, note))


def bind_states(arrays: Mapping[str, TensorFusion], stored: TrainingState, note: str) -> TrainingState:
    """Return states that follow their parameters; what is not alike, such as a step, is every part's.

    `note` says in its notes on training how its names were understood. Raises SourceError for a state that has the dims
    of its array in other sizes.
    """
    states: dict[str, Tensor] = {}
    for name, tensor in stored.states.items():
        state, parameter = split_state_name(name) or ("", name)
        fusion = arrays.get(parameter)
        if fusion is None:
            states[name] = tensor
            continue
        alike = tensor.shape == fusion.declared
        if not alike and tensor.shape and len(tensor.shape) == len(fusion.declared):
            raise SourceError(
                f"the state {state} of {parameter} is {list(tensor.shape)}, but should be {list(fusion.declared)}",
                hint="the optimizer may be that of another model; add --optimizer-states drop",
            )
        for meant, part in fusion.taken_apart(tensor) if alike else ((meant, tensor) for meant in fusion.tensors):
            new = format_state_name(state, meant)
            known = states.get(new)
            chunks = part.chunks
            if known is not None and (alike or known.shape == part.shape):
                # Each array that has rows of a tensor has a step of its own: all are copies of the tensor's.
                chunks = (*known.chunks, *(chunk for chunk in part.chunks if chunk not in known.chunks))
            states[new] = replace(part, name=new, chunks=chunks)
    groups = tuple(
        replace(
            group,
            parameters=tuple(
                dict.fromkeys(
                    meant
                    for name in group.parameters
                    for meant in (arrays[name].tensors if name in arrays else (name,))
                )
            ),
        )
        for group in stored.groups
    )
    return replace(stored, states=states, groups=groups, notes=(*stored.notes, note))
