"""What a training checkpoint holds beside the weights: optimizer states by parameter, settings, how it was written."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from shardctl.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.manifest import Manifest, Tensor

Setting = None | bool | int | float | str | tuple["Setting", ...]
"""A value that every optimizer can be told, and JSON and every pickle can hold."""

ROOT: Final = "optimizer"
"""The first word of the canonical name of every optimizer state."""
SETTINGS: Final = "optimizer.json"
"""The file beside tensors that says what `Training` has besides them, where the layout has no place of its own."""
_WORDS: Final = 3
_DEPTH: Final = 4
"""Lists in one another that a setting may be."""
_LONGEST: Final = 1 << 20
"""Values in them: the longest setting is the names of all parameters of a group."""
_FAR: Final = 1 << 63
"""No number that anything counts is as large."""


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that an optimizer treats alike."""

    parameters: tuple[str, ...]
    """Their names: stored ones in a stored manifest, canonical ones in a bound one."""
    settings: Mapping[str, Setting]
    """Hyper-parameters, such as `lr` and `betas`."""


@dataclass(frozen=True, slots=True)
class Training:
    """The part of a checkpoint that only a trainer needs."""

    writer: str = ""
    """The library that wrote it, with its version where the files tell."""
    ranks: int | None = None
    """How many processes wrote it."""
    step: int | None = None
    """Optimizer steps done."""
    states: Mapping[str, Tensor] = field(default_factory=dict)
    """Optimizer states by canonical name (`state_name`), which is that of the tensor too."""
    groups: tuple[Group, ...] = ()
    notes: tuple[str, ...] = ()
    """What `inspect` tells of how the files were understood."""


def as_setting(node: object) -> tuple[Setting] | None:
    """The number, text, None or list of those that a node of a pickle or of JSON is, alone in a tuple.

    None for anything else; for what would take long to look at: lists too deep in one another, or of too many values in
    all (a list may hold the same list often, so that a short pickle can describe an endless one); and for what could
    not be written again: whole numbers beyond 64 bits, and text with halves of surrogate pairs.

    >>> as_setting([0.9, 0.95]), as_setting(None), as_setting({"lr": 0.1})
    (((0.9, 0.95),), (None,), None)
    """
    return (_frozen(node),) if _count(node, _DEPTH, _LONGEST) <= _LONGEST else None


def _count(node: object, depth: int, most: int) -> int:
    """Values in a setting, one for an empty list; more than `most` for what has more, or is no setting."""
    if not isinstance(node, list | tuple):
        return 1 if _is_plain(node) else most + 1
    found = 0
    for part in node if depth else ():
        found += _count(part, depth - 1, most - found)
        if found > most:
            return found
    return max(found, 1) if depth else most + 1


def _is_plain(node: object) -> bool:
    if isinstance(node, int):
        return -_FAR <= node < _FAR
    return node is None or isinstance(node, float) or is_text(node)


def is_text(node: object) -> TypeGuard[str]:
    """Whether this is a text that can be written."""
    return isinstance(node, str) and (node.isascii() or not any("\ud800" <= c <= "\udfff" for c in node))


def as_steps(setting: Setting) -> int | None:
    """The number of steps that a setting is, also if it is a float without a fraction; None for anything else.

    >>> as_steps(3.0), as_steps(0.5), as_steps(float("inf")), as_steps(True)
    (3, None, None, None)
    """
    if isinstance(setting, bool) or not isinstance(setting, int | float) or not 0 <= setting < _FAR:
        return None
    return int(setting) if setting == int(setting) else None


def _frozen(node: Any) -> Setting:  # noqa: ANN401 - a node that was found to be a setting
    return tuple(map(_frozen, node)) if isinstance(node, list | tuple) else node


def state_name(state: str, parameter: str) -> str:
    """The canonical name of an optimizer state; dots in the state's own name become slashes.

    >>> state_name("exp_avg", "lm_head.weight")
    'optimizer.exp_avg.lm_head.weight'
    """
    return f"{ROOT}.{state.replace('.', '/')}.{parameter}"


def split_state(name: str) -> tuple[str, str] | None:
    """The state and the parameter of a canonical name; None if it is not one of a state.

    >>> split_state("optimizer.exp_avg.lm_head.weight")
    ('exp_avg', 'lm_head.weight')
    >>> split_state("lm_head.weight")
    """
    if not name.startswith(f"{ROOT}."):
        return None
    words = name.split(".", _WORDS - 1)
    return (words[1], words[2]) if len(words) == _WORDS else None


def with_states(manifest: Manifest) -> Manifest:
    """The manifest with its optimizer states among its tensors, after the weights."""
    if manifest.training is None or not manifest.training.states:
        return manifest
    return replace(manifest, tensors={**manifest.tensors, **manifest.training.states})


def found_states(manifest: Manifest, settings: bytes | None) -> Manifest:
    """The manifest with those tensors that are states of others by their names as its training.

    `settings` is what `SETTINGS` holds. Raises SourceError if it is malformed.
    """
    states = {}
    for name, tensor in manifest.tensors.items():
        parts = split_state(name)
        if parts is not None and parts[1] in manifest.tensors:
            states[name] = tensor
    if not states:
        return manifest
    step, groups = load_settings(settings) if settings is not None else (None, ())
    tensors = {name: tensor for name, tensor in manifest.tensors.items() if name not in states}
    return replace(manifest, tensors=tensors, training=Training(step=step, states=states, groups=groups))


def dump_settings(training: Training) -> bytes:
    """Step and groups as JSON."""
    groups = [{"parameters": list(g.parameters), "settings": dict(g.settings)} for g in training.groups]
    return (json.dumps({"step": training.step, "groups": groups}, indent=1, ensure_ascii=False) + "\n").encode()


def load_settings(data: bytes) -> tuple[int | None, tuple[Group, ...]]:
    """What `dump_settings` wrote; raises SourceError if it did not."""
    try:
        said = json.loads(data)
        step = as_steps(_setting(said["step"]))
        groups = tuple(
            Group(tuple(map(_name, g["parameters"])), {_name(k): _setting(v) for k, v in g["settings"].items()})
            for g in said["groups"]
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SourceError(f"{SETTINGS} is malformed: {error}") from error
    return step, groups


def _name(node: object) -> str:
    if not is_text(node):
        raise TypeError(f"{ascii(node)[:100]} is no name")
    return node


def _setting(node: object) -> Setting:
    found = as_setting(node)
    if found is None:
        raise TypeError(f"{ascii(node)[:100]} is no setting of an optimizer")
    return found[0]
