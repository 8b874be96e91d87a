"""Reads the module's own copy of weights, buffers and frozen parameters, and finds ties."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from shardctl.base.errors import SourceError
from shardctl.libraries.deepspeed.geometry import FlatPartition, list_scattered_runs
from shardctl.libraries.deepspeed.model_states import collect_tensors, read_model_state
from shardctl.libraries.torch_save.reading import open_saved

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.libraries.deepspeed.automatic_experts import AutomaticExperts
    from shardctl.libraries.deepspeed.checkpoint_pieces import CheckpointPieces
    from shardctl.libraries.deepspeed.files import DeepSpeedFiles
    from shardctl.libraries.deepspeed.model_states import ModelState
    from shardctl.libraries.deepspeed.values import FileArray
    from shardctl.storage import Source


def read_models(source: Source, files: DeepSpeedFiles) -> dict[int, ModelState]:
    """Read the module's state of each model-parallel rank; at stage 3 that of its first data-parallel one.

    A Universal Checkpoint may have it twice, for engines of every stage; the one that is of no rank has the tensors.
    Raises SourceError if one is missing.
    """
    chosen: dict[int, str] = {}
    order = sorted(files.model.items(), key=lambda item: (item[0][0], -1 if item[0][1] is None else item[0][1]))
    for (rank, data), path in order:
        whole = files.model.get((rank, None))
        if data is not None and whole is not None and not files.universal:
            raise SourceError(f"{whole} and {path} are of different saves", hint="move one of them away")
        chosen.setdefault(rank, path)
    known = {rank for rank, _ in files.optimizer} | set(chosen)
    models = {rank: read_model_state(source, path) for rank, path in sorted(chosen.items())}
    said = max((state.model_parallel or 0 for state in models.values()), default=0)
    for rank in range(max(max(known, default=0) + 1, said)):
        if rank not in chosen:
            raise SourceError(
                f"{files.folder}mp_rank_{rank:02d}_model_states.pt is missing, which names the parameters",
                hint="a rank's file was not copied, or its save did not finish",
            )
    return models


def read_modules(
    source: Source,
    files: DeepSpeedFiles,
    models: Mapping[int, ModelState],
    found: CheckpointPieces,
    automatic: AutomaticExperts,
) -> None:
    """Note where everything is that the module has itself."""
    for rank, state in models.items():
        shapes = dict(state.frozen_shapes)
        for group in state.groups or ():
            shapes |= group
        for given, array in state.module.items():
            name = automatic.find_router(given, state.module) or given
            if name != given:
                found.ties[given] = name
            real = shapes.get(name, array.shape) == array.shape  # stage 3 leaves empty tensors in place of parameters
            if real and name not in state.shared:
                found.module.add_array(name, rank, array)
        _read_frozen(source, files, rank, state, found)
        _find_ties(state, found)
        found.others += [(key, state.path) for key in state.others]
    for (_, _, rank), path in sorted(files.experts.items()):
        saved = open_saved(source, path)
        held, others = collect_tensors(saved, saved.tree)
        for name, array in held.items():
            if automatic.holds(name):
                found.module.add_array(*automatic.locate_expert(name, array))
            else:
                found.module.add_array(name, rank, array)
        found.others += [(key, path) for key in others]


def _read_frozen(source: Source, files: DeepSpeedFiles, rank: int, state: ModelState, found: CheckpointPieces) -> None:
    """Read parameters that are not trained: whole at stage 2; at stage 3 each rank's file has a part."""
    for name, array in state.frozen.items():
        if state.frozen_shapes.get(name) == array.shape and rank not in found.module.held.get(name, {}):
            found.module.add_array(name, rank, array)
    parted = {n: s for n, s in state.frozen_shapes.items() if rank not in found.module.held.get(n, {})}
    if not parted:
        return
    world = max(found.world, state.data_parallel or 1)
    for data in range(world):
        path = files.model.get((rank, data))
        if path is None:
            raise SourceError(
                f"{files.folder}zero_pp_rank_{data}_mp_rank_{rank:02d}_model_states.pt is missing, "
                f"with a part of {len(parted)} frozen parameters such as {next(iter(parted))!r}",
                hint="a rank's file was not copied, or its save did not finish",
            )
        held = state if path == state.path else read_model_state(source, path)
        for name, shape in parted.items():
            part = held.frozen.get(name)
            if part is None:
                raise SourceError(f"{path} lacks its part of the frozen parameter {name!r}")
            if not prod(shape):
                found.module.empty(name, rank, shape, part.dtype)
            for _, run in list_scattered_runs({name: shape}, FlatPartition(data, world)):
                found.module.add_run(name, rank, shape, part, run)


def _find_ties(state: ModelState, found: CheckpointPieces) -> None:
    """Find names that share one storage, and those that the file says are shared."""
    places: dict[FileArray, str] = {}
    for name in found.parameters:
        if name in state.module and state.module[name].size:
            places[state.module[name]] = name
    for name, array in state.module.items():
        if array.size and name in found.module.held:
            holder = places.setdefault(array, name)
            if holder != name:
                found.ties[name] = holder
    for alias, name in state.shared.items():
        if alias not in found.parameters and alias != name:
            found.ties[alias] = name
