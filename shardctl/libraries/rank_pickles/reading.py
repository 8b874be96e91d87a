"""Detects and reads checkpoints whose ranks each pickled DTensors or ShardedTensors.

So do accelerate (`use_dcp=False`), verl (`model_world_size_8_rank_0.pt`) and scripts that save `model.state_dict()` on
each rank. What a rank has of a tensor is said in its pickle, by placements on a mesh or by offsets.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.libraries.files.file_names import INDEX_SUFFIX, WEIGHT_SUFFIXES, WHOLE_TORCH
from shardctl.libraries.files.rank_files import list_rank_files
from shardctl.libraries.files.side_files import list_side_files
from shardctl.libraries.reader import Format, find_given_file
from shardctl.storage.bounded_text import CONFIG_TEXT, read_json
from shardctl.tensors.manifest import CheckpointFile, Manifest, OpaqueObject, OwnConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardctl.libraries.files.rank_files import RankFileName
    from shardctl.storage import Source

_TORCH_WEIGHT_FILES: Final = (WHOLE_TORCH, WHOLE_TORCH + INDEX_SUFFIX)
"""Beside these, the files of ranks are something else."""
_HUGGINGFACE_FOLDER: Final = "huggingface/"
"""Where verl keeps config and tokenizer, and on request the model again, beside the files of its ranks (verl 0.9.1,
`utils/checkpoint/fsdp_checkpoint_manager.py`)."""
_MODEL_CONFIG_FILE: Final = f"{_HUGGINGFACE_FOLDER}config.json"
_FSDP_CONFIG_FILE: Final = "fsdp_config.json"
"""What it says of its ranks, which are not those of the result."""


def detect_pickled_ranks(source: Source) -> bool:
    """Detect whether the directory holds files with the numbers of ranks in their names, and no whole model."""
    files = source.files()
    if find_given_file(source) is not None or any(path in files for path in _TORCH_WEIGHT_FILES):
        return False
    return any(file.kind == "model" for file in list_rank_files(files))


def scan_pickled_ranks(source: Source) -> Manifest:
    """Read every pickle without running it, and put together what the ranks have.

    Tensors are named as the model does: without the keys of the dicts that they were saved in.

    Raises:
        SourceError: a file is missing, malformed or not what its name says, or files contradict each other.
        HostileError: a file tries to run code, to leave its directory or to exhaust the reader.
        UnsupportedError: sums that are pending, tensors of a kind that is not converted.
    """
    from shardctl.libraries.dcp.keys import sort_keys
    from shardctl.libraries.rank_pickles.checkpoint import RankCollector
    from shardctl.libraries.rank_pickles.training_state import collect_training

    files = list_rank_files(source.files())
    model = _select_one_save(source, [file for file in files if file.kind == "model"], "models")
    optimizer = _select_one_save(source, [file for file in files if file.kind == "optimizer"], "optimizers")
    if not model:
        raise SourceError(f"{source.name} holds no files of a model's ranks", hint="give the directory that does")
    collector = RankCollector(source)
    for file in model:
        collector.read(file)
    for file in optimizer:
        collector.read(file, ("optimizer",))
    found = sort_keys(collector.held, collector.objects, collector.ways)
    if not found.weights:
        raise SourceError(f"{source.name} holds no weights, only {len(collector.held)} tensors of an optimizer")
    if len(model) > 1 and not any(collector.held[key].divided for key in found.weights):
        raise SourceError(
            f"{model[0].path} and the {len(model) - 1} files like it hold plain tensors, which do not say whose part",
            hint=f"if each holds the whole model, give one of them: {source.name}/{model[0].path}",
        )
    weights = {name: collector.tensor(key, name, model) for key, name in found.weights.items()}
    trained = collect_training(collector, found, weights, optimizer or model, len(model))
    for each in (model, optimizer):
        collector.heed_missing(each)
    return Manifest(
        format=FORMAT.name,
        tensors=weights,
        files={file.path: CheckpointFile(file.path, source.files()[file.path].size) for file in (*model, *optimizer)},
        objects=(*_list_side_objects(source, files), *(OpaqueObject(key, "drop") for key in found.others)),
        warnings=tuple(collector.warnings),
        training=trained,
        own_config=_read_own_config(source),
    )


def _select_one_save(source: Source, files: Sequence[RankFileName], what: str) -> list[RankFileName]:
    """Select the files in the order of ranks; raises SourceError if they are those of several saves."""
    families = {file.family: file for file in sorted(files, key=lambda file: file.path, reverse=True)}
    if len(families) > 1:
        shown = " and ".join(file.path for file in [*families.values()][-2:])
        raise SourceError(
            f"{source.name} holds files of several {what}' ranks, such as {shown}",
            hint="leave only the files that you mean to convert",
        )
    ordered = sorted(files, key=lambda file: file.rank)
    for one, two in pairwise(ordered):
        if one.rank == two.rank:
            raise SourceError(f"{one.path} and {two.path} are both of rank {one.rank}")
    return ordered


def _list_side_objects(source: Source, files: Sequence[RankFileName]) -> list[OpaqueObject]:
    side, _ = list_side_files(source, {file.path for file in files if file.kind != "other"})
    others = {file.path for file in files if file.kind == "other"}
    if _MODEL_CONFIG_FILE in source.files():
        others |= {_MODEL_CONFIG_FILE, _FSDP_CONFIG_FILE} | {each.name for each in side if _is_repeated(each.name)}
        side = tuple(_lift_file(source, each) if each.name not in others else each for each in side)
    return [replace(each, policy="drop") if each.name in others else each for each in side]


def _is_repeated(path: str) -> bool:
    """Return whether a file is part of the model that is there again."""
    return path.startswith(_HUGGINGFACE_FOLDER) and path.endswith((*WEIGHT_SUFFIXES, INDEX_SUFFIX))


def _lift_file(source: Source, side: OpaqueObject) -> OpaqueObject:
    """Return a file of the folder as one of the result's root, where engines look for it, if there is no such."""
    name = side.name.removeprefix(_HUGGINGFACE_FOLDER)
    return side if name in source.files() else replace(side, name=name)


def _read_own_config(source: Source) -> OwnConfig | None:
    if _MODEL_CONFIG_FILE not in source.files():
        return None
    config = read_json(source, _MODEL_CONFIG_FILE, CONFIG_TEXT)
    return OwnConfig(config) if isinstance(config, dict) else None


FORMAT: Final = Format(
    "pickled-ranks", "files of torch.save by ranks", detect_pickled_ranks, scan_pickled_ranks, saved=True
)
