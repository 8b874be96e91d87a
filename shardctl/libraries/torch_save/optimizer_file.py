"""Reads the optimizer that accelerate or Trainer saved in a file of its own, beside the weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardctl.base.errors import UnsupportedError
from shardctl.libraries.torch_save.reading import check_total_size, open_saved
from shardctl.libraries.torch_save.saved_optimizer import SavedOptimizer
from shardctl.libraries.torch_save.state_dict import get_optimizer
from shardctl.tensors.manifest import CheckpointFile

if TYPE_CHECKING:
    from shardctl.storage import Source
    from shardctl.tensors.manifest import Manifest


def add_optimizer_file(source: Source, weights: Manifest, path: str, *, ordered: bool) -> Manifest:
    """Return `weights` with the states in the file of an optimizer beside them; as they are, if there are none.

    What is left behind, and why, is among the warnings. `ordered` as for `SavedOptimizer.collect_training`.
    Raises as `open_saved` and `check_total_size`, and UnsupportedError for a file that holds something else.
    """
    saved = open_saved(source, path)
    if get_optimizer(saved.tree) is None:
        raise UnsupportedError("it does not hold what torch.optim.Optimizer.state_dict returns")
    optimizer = SavedOptimizer(saved, ())
    check_total_size(source, path, optimizer.views.values())
    warnings: list[str] = []
    found = optimizer.collect_training(source, weights.tensors, warnings, ordered=ordered)
    said = (*weights.warnings, *warnings)
    if not found.states:
        return replace(weights, warnings=said)
    return replace(
        weights,
        files={**weights.files, path: CheckpointFile(path, source.files()[path].size)},
        objects=tuple(each for each in weights.objects if each.file != path),
        warnings=said,
        training=replace(found, notes=(*found.notes, f"the optimizer is that of {path}")),
    )
