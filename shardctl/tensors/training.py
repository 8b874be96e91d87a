"""Names, finds and writes what a training checkpoint holds beside the weights: optimizer states and their settings."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import SourceError
from shardctl.base.settings import Setting, as_setting, as_steps, is_text
from shardctl.storage.bounded_text import RECORD_TEXT, parse_json
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Chunk, ConstantFill, ParameterGroup, Tensor, TrainingState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.tensors.manifest import Manifest

ROOT: Final = "optimizer"
"""The first word of the canonical name of every optimizer state."""
SETTINGS: Final = "optimizer.json"
"""The file beside tensors that says what `TrainingState` has besides them, where the layout has no place of its own."""
STEP: Final = "step"
"""The state that counts an optimizer's steps, of trainers that count them for each parameter."""
COUNTED: Final = "exp_avg"
"""A state of optimizers that count steps."""
MOMENTUM: Final = "momentum_buffer"
"""The state of Muon, and of no Adam."""
MASTER: Final = "master_param"
"""The state that is an optimizer's fp32 copy of a weight (Transformer Engine `pytorch/optimizers/fused_adam.py`)."""
_OF_MOMENTUM: Final = "momentum"
"""The setting that Muon's groups have, and no group of Adam's."""
_STATE_NAME_WORD_COUNT: Final = 3


def format_state_name(state: str, parameter: str) -> str:
    """Format the canonical name of an optimizer state; dots in the state's own name become slashes.

    >>> format_state_name("exp_avg", "lm_head.weight")
    'optimizer.exp_avg.lm_head.weight'
    """
    return f"{ROOT}.{state.replace('.', '/')}.{parameter}"


def split_state_name(name: str) -> tuple[str, str] | None:
    """Return the state and the parameter of a canonical name; None if it is not one of a state.

    >>> split_state_name("optimizer.exp_avg.lm_head.weight")
    ('exp_avg', 'lm_head.weight')
    >>> split_state_name("lm_head.weight")
    """
    if not name.startswith(f"{ROOT}."):
        return None
    words = name.split(".", _STATE_NAME_WORD_COUNT - 1)
    return (words[1], words[2]) if len(words) == _STATE_NAME_WORD_COUNT else None


def has_momentum(group: Mapping[str, Setting]) -> bool:
    """Return whether a group of parameters with these settings is Muon's.

    >>> has_momentum({"lr": 0.02, "momentum": 0.95}), has_momentum({"lr": 0.001, "betas": (0.9, 0.95)})
    (True, False)
    """
    return _OF_MOMENTUM in group


def add_states(manifest: Manifest) -> Manifest:
    """Return the manifest with its optimizer states among its tensors, after the weights."""
    if manifest.training is None or not manifest.training.states:
        return manifest
    return replace(manifest, tensors={**manifest.tensors, **manifest.training.states})


def find_master_weights(manifest: Manifest) -> dict[str, Tensor]:
    """Find the states that are an optimizer's fp32 copies of weights, by the weight's name."""
    states = manifest.training.states if manifest.training is not None else {}
    return {
        name: state for name in manifest.tensors if (state := states.get(format_state_name(MASTER, name))) is not None
    }


def note_master_weights(manifest: Manifest) -> Manifest:
    """Return the manifest with a note that its optimizer has fp32 copies of weights, if it has some."""
    masters = find_master_weights(manifest)
    if manifest.training is None or not masters:
        return manifest
    note = f"the optimizer has fp32 copies of {len(masters)} weights, which --weights master reads in their place"
    return replace(manifest, training=replace(manifest.training, notes=(*manifest.training.notes, note)))


def take_master_weights(manifest: Manifest, masters: Mapping[str, Tensor]) -> Manifest:
    """Return the manifest with an optimizer's copies in place of the weights that have one, and no longer as states.

    Raises SourceError for a copy of another shape.
    """
    tensors = dict(manifest.tensors)
    for name, master in masters.items():
        weight = tensors[name]
        if master.shape != weight.shape:
            raise SourceError(
                f"the optimizer's copy of {name} is {list(master.shape)}, but the weight is {list(weight.shape)}",
                hint="--weights module reads the weights that the model computes with",
            )
        tensors[name] = replace(master, name=name, ties=weight.ties)
    training = manifest.training or TrainingState()
    taken = {master.name for master in masters.values()}
    states = {name: state for name, state in training.states.items() if name not in taken}
    note = f"{len(masters)} weights are the optimizer's fp32 copies of them"
    return replace(manifest, tensors=tensors, training=replace(training, states=states, notes=(*training.notes, note)))


def add_steps(have: Manifest) -> Manifest:
    """Return the manifest with the number of steps as a state of every parameter of Adam's, if it is known for all."""
    training = have.training
    if training is None or training.step is None:
        return have
    kinds = {state for state, _ in map(_split_state, training.states)}
    if STEP in kinds or COUNTED not in kinds:
        return have
    dtype = BY_NAME["F32"]
    chunk = Chunk(Box((), ()), dtype, ConstantFill(struct.pack("<f", training.step)))
    counted = dict.fromkeys(
        p for state, p in map(_split_state, training.states) if state == COUNTED
    )  # Muon counts none
    names = [format_state_name(STEP, p) for p in counted]
    steps = {name: Tensor(name, dtype, (), (chunk,)) for name in names}
    return replace(have, training=replace(training, states={**training.states, **steps}))


def _split_state(name: str) -> tuple[str, str]:
    return split_state_name(name) or ("", name)


def separate_states(manifest: Manifest, settings: bytes | None) -> Manifest:
    """Return the manifest with those tensors that are states of others by their names as its training.

    `settings` is what `SETTINGS` holds. Raises SourceError if it is malformed.
    """
    states = {}
    for name, tensor in manifest.tensors.items():
        parts = split_state_name(name)
        if parts is not None and parts[1] in manifest.tensors:
            states[name] = tensor
    if not states:
        return manifest
    step, groups = parse_settings(settings) if settings is not None else (None, ())
    tensors = {name: tensor for name, tensor in manifest.tensors.items() if name not in states}
    return replace(manifest, tensors=tensors, training=TrainingState(step=step, states=states, groups=groups))


def encode_settings(training: TrainingState) -> bytes:
    """Step and groups as JSON."""
    groups = [{"parameters": list(g.parameters), "settings": dict(g.settings)} for g in training.groups]
    return (json.dumps({"step": training.step, "groups": groups}, indent=1, ensure_ascii=False) + "\n").encode()


def parse_settings(data: bytes) -> tuple[int | None, tuple[ParameterGroup, ...]]:
    """Parse what `encode_settings` wrote; raises SourceError if it did not."""
    try:
        said = parse_json(data, SETTINGS, RECORD_TEXT)
        step = as_steps(_parse_setting(said["step"]))
        groups = tuple(
            ParameterGroup(
                tuple(map(_parse_name, g["parameters"])),
                {_parse_name(k): _parse_setting(v) for k, v in g["settings"].items()},
            )
            for g in said["groups"]
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SourceError(f"{SETTINGS} is malformed: {error}") from error
    return step, groups


def _parse_name(node: object) -> str:
    if not is_text(node):
        raise TypeError(f"{ascii(node)[:100]} is not a name")
    return node


def _parse_setting(node: object) -> Setting:
    found = as_setting(node)
    if found is None:
        raise TypeError(f"{ascii(node)[:100]} is not a setting of an optimizer")
    return found[0]
