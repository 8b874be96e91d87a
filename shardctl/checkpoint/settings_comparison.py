"""Compares the settings of a model that another library keeps, such as Megatron-LM's args, with those of a source."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import ShardctlError
from shardctl.checkpoint.config_files import CONFIG
from shardctl.verify.config_comparison import ABSENT, ConfigChange, is_same_value

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardctl.checkpoint.opened_checkpoint import OpenedCheckpoint

_OF_THE_RUN: Final = frozenset({"max_position_embeddings", "max_seq_len", "max_batch_size", "seq_length"})
"""Settings that limit a run, and change no number that the model computes."""


def compare_library_settings(
    a: OpenedCheckpoint, b: OpenedCheckpoint
) -> tuple[tuple[ConfigChange, ...], tuple[str, ...]]:
    """Compare the settings that the library of `a` keeps with those of `b`: of the same library, else of its config.

    Returns the changes, and what was not compared.
    """
    ours, theirs = a.stored.settings, b.stored.settings
    if ours is None:
        return (), ()
    expected = expect_library_settings(a, b)
    both = {key: (ours.values[key], value) for key, value in expected.items() if key in ours.values}
    if theirs is not None and theirs.title == ours.title:  # what theirs says itself goes before what follows from it
        keys = expected.keys() if ours.partial else theirs.values.keys()
        both |= {key: (ours.values.get(key), theirs.values[key]) for key in keys if key in theirs.values}
    if not both:
        why = f"shardctl does not know what they are for the model of {b.source.name}"
        return (), (f"the settings in {ours.title} were not compared: {why}",)
    return tuple(_list_changes(ours.title, both)), ()


def list_contradictions(checkpoint: OpenedCheckpoint) -> Iterator[str]:
    """List the settings of its library that contradict the config beside them, as warnings."""
    own = checkpoint.stored.settings
    if own is None or CONFIG not in checkpoint.source.files():  # else the config was made of them
        return
    expected = expect_library_settings(checkpoint, checkpoint)
    both = {key: (own.values[key], value) for key, value in expected.items() if key in own.values}
    for change in _list_changes(own.title, both):
        if not change.harmless:
            said = f"{own.title} has {change.key} {change.a}, but {CONFIG} means {change.b}"
            yield f"{said}: which one counts depends on the loader"


def expect_library_settings(a: OpenedCheckpoint, b: OpenedCheckpoint) -> Mapping[str, object]:
    """Return what the library of `a` would keep of the model that the config of `b` describes; empty if unknown."""
    if a.stored.settings is None or b.config is None or b.model is None:
        return {}
    try:
        return a.stored.settings.expect(b.config, b.model)
    except (ShardctlError, KeyError):  # the library has no such model, or the table has other names
        return {}


def _list_changes(title: str, both: Mapping[str, tuple[object, object]]) -> Iterator[ConfigChange]:
    for key, (mine, other) in sorted(both.items()):
        if is_same_value(mine, other) or {mine is None or mine is False, other is None or other is False} == {True}:
            continue
        ours, theirs = (ABSENT if value is None else json.dumps(value, default=str) for value in (mine, other))
        yield ConfigChange(key, ours, theirs, harmless=key in _OF_THE_RUN, file=title)
