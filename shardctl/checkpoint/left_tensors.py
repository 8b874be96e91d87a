"""Takes some tensors of a checkpoint, and says which others are left out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.amounts import format_file_size, format_plural
from shardctl.base.errors import format_first_few
from shardctl.models.submodels.part_models import group_left_tensors

if TYPE_CHECKING:
    from collections.abc import Collection

    from shardctl.tensors.manifest import Manifest, Tensor

_MAX_GROUPS_SHOWN: Final = 6


def keep_tensors(manifest: Manifest, kept: Collection[str]) -> Manifest:
    """Return the manifest with some of its tensors, and a warning of the others; optimizer states are left behind."""
    chosen = set(kept)
    left = [tensor for name, tensor in manifest.tensors.items() if name not in chosen]
    warnings = manifest.warnings
    if left:
        warnings += (f"left out: {format_modules(left, kept)}",)
    if manifest.training is not None and manifest.training.states:
        states = manifest.training.states.values()
        size = format_file_size(sum(state.nbytes for state in states))
        warnings += (f"left out: the optimizer states ({format_plural(len(states), 'tensor')}, {size})",)
    if manifest.extra:
        warnings += (f"left out: {format_modules(manifest.extra.values(), ())}",)
    tensors = {name: tensor for name, tensor in manifest.tensors.items() if name in chosen}
    return replace(manifest, tensors=tensors, warnings=warnings, training=None, extra={})


def format_modules(left: Collection[Tensor], kept: Collection[str]) -> str:
    """Format the modules of tensors beside those that are `kept`, how many each has, and how large they are."""
    groups = [
        f"{pattern} ({format_plural(len(found), 'tensor')}, {format_file_size(sum(t.nbytes for t in found))})"
        for pattern, found in group_left_tensors(left, kept)
    ]
    return format_first_few(groups, _MAX_GROUPS_SHOWN)
