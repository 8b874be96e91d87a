"""What a training checkpoint holds beside the weights: optimizer states by parameter, settings, how it was written."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.manifest import Manifest, Tensor

Setting = None | bool | int | float | str | tuple["Setting", ...]
"""A value that every optimizer can be told, and JSON and every pickle can hold."""

ROOT: Final = "optimizer"
"""The first word of the canonical name of every optimizer state."""
_WORDS: Final = 3


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
    words = name.split(".", _WORDS - 1)
    return (words[1], words[2]) if len(words) == _WORDS and words[0] == ROOT else None


def with_states(manifest: Manifest) -> Manifest:
    """The manifest with its optimizer states among its tensors, after the weights."""
    if manifest.training is None or not manifest.training.states:
        return manifest
    return replace(manifest, tensors={**manifest.tensors, **manifest.training.states})
