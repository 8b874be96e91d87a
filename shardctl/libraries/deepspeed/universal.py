"""Reads Universal Checkpoints: a folder for each parameter, with a file for the master and each state.

Written by DeepSpeed `checkpoint/ds_to_universal.py`.
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.libraries.deepspeed.geometry import ElementRun
from shardctl.libraries.deepspeed.optimizer_states import parse_group_settings
from shardctl.libraries.deepspeed.partitions import add_number
from shardctl.libraries.deepspeed.values import as_array, as_dict, as_list, as_number
from shardctl.libraries.torch_save.pickle_tree import as_mapping
from shardctl.libraries.torch_save.reading import open_saved

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.libraries.deepspeed.checkpoint_pieces import CheckpointPieces
    from shardctl.libraries.deepspeed.files import DeepSpeedFiles
    from shardctl.libraries.deepspeed.model_states import ModelState
    from shardctl.storage import Source

_MASTER_WEIGHTS_KEY: Final = "fp32"
_STEP_KEY: Final = "step"
_OPTIMIZER_STATE_FILE: Final = "zero/optimizer_state.pt"
_MAX_SUPPORTED_VERSION: Final = 0.4
"""Of Universal Checkpoints (DeepSpeed 0.19 `checkpoint/constants.py`, `UNIVERSAL_CHECKPOINT_VERSION_VALUE`)."""
_FURTHER_STATE_PATTERN: Final = re.compile(r"zero/([^/]+)/([^/]+)\.pt")
"""A state that DeepSpeed's converter does not write and its loaders do not read, such as Muon's momentum."""
_PARAM_TENSOR_KEY: Final = "param"
"""The key of the tensor, where the file has a dict; a file of stage 3 is a bare flat tensor."""


def read_universal(
    source: Source, files: DeepSpeedFiles, models: Mapping[int, ModelState], found: CheckpointPieces
) -> None:
    """Note where the master and the states of every parameter are.

    What the module has itself and the optimizer has not (buffers, frozen parameters) is left to the module, whose
    copy has its own type; the converter makes floats of integers.

    Raises SourceError for a file that is not what its name says, UnsupportedError for a version that is not known.
    """
    found.kind = "Universal Checkpoint"
    _check_version(models)
    found.world = max((state.data_parallel or 1 for state in models.values()), default=1)
    shapes: dict[str, tuple[int, ...]] = {}
    own: set[str] = set()
    for state in models.values():
        for group in state.groups or ():
            shapes |= group
        own |= {*(state.buffers or ()), *state.frozen_shapes, *(state.module if state.groups is not None else ())}
    order = {name: place for place, name in enumerate(shapes)}
    for name in sorted(files.universal, key=lambda name: (order.get(name, len(order)), name)):
        if name in own and name not in shapes:
            continue
        if _MASTER_WEIGHTS_KEY not in files.universal[name]:
            raise SourceError(
                f"{files.folder}zero/{name}/{_MASTER_WEIGHTS_KEY}.pt is missing",
                hint="its copy is incomplete; fetch it again",
            )
        found.parameters[name] = None
        for kind, path in files.universal[name].items():
            _add_file(source, path, name, kind, shapes.get(name) if len(models) == 1 else None, found)
    found.others += [
        (f"{further[2]} of {further[1]}", path)
        for path in files.others
        if (further := _FURTHER_STATE_PATTERN.fullmatch(path[len(files.folder) :])) is not None
    ]
    _read_settings(source, files, models, found)
    missing = [name for name in shapes if name not in files.universal]
    if missing:
        raise SourceError(
            f"{files.folder}zero/{missing[0]}/ is missing"
            + (f", and {len(missing) - 1} other parameters" if len(missing) > 1 else ""),
            hint="its copy is incomplete; fetch it again",
        )


def _check_version(models: Mapping[int, ModelState]) -> None:
    for state in models.values():
        version = as_number(state.universal.get("universal_checkpoint_version"))
        if version is not None and version > _MAX_SUPPORTED_VERSION:
            raise UnsupportedError(
                f"{state.path} is of a Universal Checkpoint of version {version:g}, and {_MAX_SUPPORTED_VERSION} is "
                "known here",
                hint="convert the training checkpoint itself, or make a Universal Checkpoint of it with DeepSpeed 0.19",
            )


def _read_settings(
    source: Source, files: DeepSpeedFiles, models: Mapping[int, ModelState], found: CheckpointPieces
) -> None:
    """Read hyper-parameters, and at stage 3 the steps, from the file that has the rest of one rank's optimizer."""
    path = f"{files.folder}{_OPTIMIZER_STATE_FILE}"
    state = next(iter(models.values()), None)
    if path not in source.files() or state is None or state.groups is None:
        return
    saved = open_saved(source, path)
    tree = as_mapping(saved.tree) or {}
    found.clipping = as_number(tree.get("clip_grad"))
    for place, (members, values) in enumerate(
        parse_group_settings(as_list(tree.get("param_groups")), len(state.groups))
    ):
        names, _ = found.groups.setdefault(place, ({}, values))
        for member in members:
            names |= dict.fromkeys(state.groups[member])
    inner = as_dict(tree.get("optimizer_state_dict")).get("state")
    for place, group in enumerate(state.groups):
        step = as_dict(as_dict(inner).get(place)).get(_STEP_KEY)
        value = as_array(saved, step, _STEP_KEY) if step is not None else None
        if value is not None:
            for name in group:
                add_number(found.state(_STEP_KEY), name, 0, value)


def _add_file(
    source: Source, path: str, name: str, kind: str, shape: tuple[int, ...] | None, found: CheckpointPieces
) -> None:
    """Note one file of a parameter."""
    saved = open_saved(source, path)
    tree = as_mapping(saved.tree)
    node = saved.tree if tree is None else tree.get(_PARAM_TENSOR_KEY)
    if kind == _STEP_KEY and (said := as_number(node)) is not None:
        add_number(found.state(kind), name, 0, said)
        return
    array = as_array(saved, node, name)
    if array is None:
        raise SourceError(f"{path} is not a tensor, nor a dict with one under {_PARAM_TENSOR_KEY!r}")
    if kind == _STEP_KEY:
        add_number(found.state(kind), name, 0, array)
        return
    pieces = found.master if kind == _MASTER_WEIGHTS_KEY else found.state(kind)
    if tree is not None:
        if shape is not None and array.shape != shape:
            raise SourceError(f"{path} is {list(array.shape)}, but the parameter is {list(shape)}")
        pieces.add_array(name, 0, array)
        return
    if shape is None:
        raise SourceError(f"{path} does not say the shape of {name!r}, and no file beside it does")
    if array.size != prod(shape) or len(array.shape) != 1:
        raise SourceError(f"{path} is {list(array.shape)}, but the parameter is {list(shape)}")
    pieces.add_run(name, 0, shape, array, ElementRun(0, array.size, 0))
