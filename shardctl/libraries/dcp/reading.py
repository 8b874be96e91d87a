"""Detects and reads checkpoints of `torch.distributed.checkpoint` (DCP)."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import ChangedError, HostileError, ShardctlError, SourceError
from shardctl.libraries.files.file_names import DCP, DCP_METADATA
from shardctl.libraries.files.sharded_backend import find_fsdp_folder, is_megatron
from shardctl.libraries.reader import Format
from shardctl.tensors.manifest import TrainingState

if TYPE_CHECKING:
    from shardctl.storage import Source
    from shardctl.tensors.manifest import Manifest

_RANK_METADATA_PATTERN: Final = re.compile(r"__([0-9]{1,9})\.metadata")
"""What each rank writes where ranks save without talking to each other (`use_collectives=False`)."""
_MODEL_FOLDER_PATTERN: Final = re.compile(r"pytorch_model_fsdp(_[0-9]+)?|model")
HOW_METADATA_IS_LOST: Final = "the save did not finish, or a copy left out hidden files; the metadata is written last"
"""What to say of files of such a save without its metadata."""
_OPTIMIZER_FOLDER_PATTERN: Final = re.compile(r"optimizer(_[0-9]+)?|optim")
"""Folders of a model and its optimizer, saved apart (accelerate `utils/fsdp_utils.py`, and so Trainer)."""


def detect_dcp(source: Source) -> bool:
    """Detect whether the directory, or that of a model in it, has the metadata or the files of such a save.

    Megatron-LM's are such saves, too, and have a reader of their own.
    """
    return any(_is_mark(path) for path in source.files()) and not (
        is_megatron(source) or find_fsdp_folder(source) is not None
    )


def _is_mark(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    mark = name == DCP_METADATA or _RANK_METADATA_PATTERN.fullmatch(name) is not None or name.endswith(DCP)
    return mark and (
        not folder
        or _MODEL_FOLDER_PATTERN.fullmatch(folder) is not None
        or _OPTIMIZER_FOLDER_PATTERN.fullmatch(folder) is not None
    )


def find_model(source: Source) -> str | None:
    """Find where the items of a model are, which may hold its optimizer, too: a folder, or the root."""
    for path in source.files():
        folder, _, name = path.rpartition("/")
        if name.endswith(DCP) and (not folder or _MODEL_FOLDER_PATTERN.fullmatch(folder)):
            return f"{folder}/" if folder else name
    return None


def scan_dcp(source: Source) -> Manifest:
    """Read the metadata and the head of every item.

    Tensors are named as the model does: without the keys of the dicts that they were saved in.

    Raises:
        SourceError: a file is missing, malformed or not what its name says, or files contradict each other.
        HostileError: a file tries to run code, to leave its directory or to exhaust the reader.
        UnsupportedError: items that were compressed, or written by something else than torch.
    """
    from shardctl.libraries.dcp.checkpoint import DcpCollector
    from shardctl.libraries.dcp.metadata import read_metadata

    folders = _list_saves(source)
    optimizer = [folder for folder in folders if folder and _OPTIMIZER_FOLDER_PATTERN.fullmatch(folder)]
    model = [folder for folder in folders if folder not in optimizer] or optimizer[:1]
    if "" in folders:
        model, optimizer = [""], []
    if len(model) > 1 or len(optimizer) > 1:
        raise SourceError(
            f"{source.name} holds several checkpoints: {', '.join((*model, *optimizer))}", hint="give one of them"
        )
    if not model:
        raise _build_unfinished_error(source)
    read = {folder: [read_metadata(source, path) for path in folders[folder]] for folder in (*model, *optimizer)}
    saves = read[model[0]], read[optimizer[0]] if optimizer and optimizer != model else []
    try:
        return DcpCollector(source, later=True).manifest(FORMAT.name, *saves)
    except ShardctlError:  # items that differ, or what comes of that; looked at one by one, it is told what is wrong
        return DcpCollector(source).manifest(FORMAT.name, *saves)


def scan_optimizer_folder(source: Source, weights: Manifest) -> Manifest:
    """Return `weights` with the optimizer that was saved by itself in a folder beside them, if there is one.

    transformers saves so with `save_optimizer_distributed` (`distributed/checkpoint.py`). Weights do not depend on it:
    one that cannot be read is a warning, and an error for whoever asks for its states.
    Raises HostileError as `scan_dcp`, ChangedError if a file is changed meanwhile, and SourceError for several.
    """
    saves = {
        folder: paths for folder, paths in _list_saves(source).items() if _OPTIMIZER_FOLDER_PATTERN.fullmatch(folder)
    }
    if not saves:
        return weights
    if len(saves) > 1:
        raise SourceError(f"{source.name} holds several optimizers: {', '.join(saves)}", hint="leave one of them there")
    from shardctl.libraries.dcp.checkpoint import DcpCollector
    from shardctl.libraries.dcp.metadata import read_metadata

    ((folder, paths),) = saves.items()
    try:
        return DcpCollector(source).add_optimizer(weights, folder, [read_metadata(source, path) for path in paths])
    except (HostileError, ChangedError):
        raise
    except SourceError as error:
        return note_unreadable(weights, f"{folder}/", error)


def note_unreadable(weights: Manifest, place: str, error: SourceError) -> Manifest:
    """Return `weights` with why the states of the optimizer in a place cannot be read."""
    why = f"the optimizer states in {place} cannot be read: {error}"
    return replace(weights, warnings=(*weights.warnings, why), training=TrainingState(unreadable=why))


def _list_saves(source: Source) -> dict[str, list[str]]:
    """List the metadata files of each folder that holds a save: one of all ranks, else one of each."""
    found: dict[str, list[str]] = {}
    for path in source.files():
        folder, _, name = path.rpartition("/")
        if _is_mark(path) and not name.endswith(DCP):
            found.setdefault(folder, []).append(path)
    for folder, paths in found.items():
        whole = f"{folder}/{DCP_METADATA}" if folder else DCP_METADATA
        found[folder] = [whole] if whole in paths else sorted(paths, key=lambda path: (len(path), path))
    return found


def _build_unfinished_error(source: Source) -> SourceError:
    name = next((path for path in source.files() if _is_mark(path)), None)
    if name is None:
        return SourceError(f"{source.name} holds no {FORMAT.title}")
    return SourceError(
        f"{name} is there, but {DCP_METADATA} is not",
        hint=HOW_METADATA_IS_LOST,
    )


FORMAT: Final = Format("dcp", "torch.distributed.checkpoint files", detect_dcp, scan_dcp)
