"""Recognises what trainers add to a model's names: wrapping modules, and the attribute of the model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.models.binding import find_canonical_name
from shardctl.training import format_state_name, split_state_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from shardctl.manifest import Manifest, TrainingState
    from shardctl.models.model import Model

_WRAPPERS: Final = frozenset(
    {"_checkpoint_wrapped_module", "_forward_module", "_fsdp_wrapped_module", "_orig_mod", "_original_module"}
)
"""Attributes that torch.compile, FSDP1, activation checkpointing and Lightning put into names, wherever they wrap."""


def unwrap_names(model: Model, stored: Manifest) -> Manifest:
    """Return `stored` without the wrappers in its names, if they are what keeps `model` from knowing them all.

    Else as it is.

    First the wrappers of torch go, then as few leading words, common to all names, as do the rest (``module.`` of
    DistributedDataParallel, an attribute of a trainer's own class).
    """
    if all(find_canonical_name(model, name) is not None for name in stored.tensors.keys() - model.tensors.keys()):
        return stored
    bare = {name: _strip_wrappers(name) for name in stored.tensors}
    for count in range(_count_common_words(bare.values()) + 1):
        names = {name: name_without.split(".", count)[-1] for name, name_without in bare.items()}
        if len(set(names.values())) == len(names) and all(
            find_canonical_name(model, n) is not None for n in names.values()
        ):
            return _rename_tensors(stored, names)
    return stored


def _strip_wrappers(name: str) -> str:
    return ".".join(word for word in name.split(".") if word not in _WRAPPERS)


def _count_common_words(names: Iterable[str]) -> int:
    """Count how many leading words all names share, and have others after."""
    first: list[str] | None = None
    for name in names:
        words = name.split(".")[:-1]
        if first is None:
            first = words
        same = next((n for n, (a, b) in enumerate(zip(first, words, strict=False)) if a != b), None)
        first = first[: min(len(words), len(first)) if same is None else same]
    return len(first or ())


def _rename_tensors(stored: Manifest, names: Mapping[str, str]) -> Manifest:
    tensors = {names[name]: replace(tensor, name=names[name]) for name, tensor in stored.tensors.items()}
    training = stored.training and rename_training(stored.training, lambda parameter: names.get(parameter, parameter))
    return replace(stored, tensors=tensors, training=training)


def rename_training(training: TrainingState, name: Callable[[str], str]) -> TrainingState:
    """Return the same with other names of parameters."""
    states = {}
    for full, tensor in training.states.items():
        state, parameter = split_state_name(full) or ("", full)
        new = format_state_name(state, name(parameter))
        states[new] = replace(tensor, name=new)
    groups = tuple(replace(group, parameters=tuple(map(name, group.parameters))) for group in training.groups)
    return replace(training, states=states, groups=groups)
