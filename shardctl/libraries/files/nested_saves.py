"""Finds the checkpoints in the folders of a run, and says which one to give: never that of an optimizer alone."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.libraries.files.file_names import DCP, DCP_METADATA, SAFETENSORS

if TYPE_CHECKING:
    from collections.abc import Iterable

_OPTIMIZER_FOLDER_PATTERN: Final = re.compile(r"optim(izer)?s?([_-].*)?|.*[_-]optim(izer)?s?")
"""Names of folders with states of an optimizer, and of those that hold such folders."""
_MODEL_FOLDER_PATTERN: Final = re.compile(r"(pytorch_)?model(_fsdp)?([_-][0-9]+)?")
"""Names of folders that are read together with that of an optimizer beside them."""
_AUXILIARY_FOLDER_NAMES: Final = frozenset(
    {"dcp", "fsdp", "lr_scheduler", "scheduler", "extra_state", "dataloader", "ema"}
)
"""Folders beside a model's that hold something else."""
_TORCH_WEIGHTS: Final = re.compile(r"pytorch_model(-[0-9]{5}-of-[0-9]{5})?\.bin")
_NUMBER_PATTERN: Final = re.compile(r"([0-9]+)")


def list_nested_saves(paths: Iterable[str]) -> list[str]:
    """List the folders with distributed checkpoints, the newest last, as numbers in their names say.

    >>> list_nested_saves(["iter_10/model/.metadata", "iter_9/model/.metadata"])
    ['iter_9/model', 'iter_10/model']
    """
    saves = {path.removesuffix(f"/{DCP_METADATA}") for path in paths if path.endswith(f"/{DCP_METADATA}")}
    return sorted(saves, key=_split_numbers)


def list_unfinished_saves(paths: Iterable[str]) -> list[str]:
    """List the folders with files of distributed checkpoints and without metadata, the newest last.

    >>> list_unfinished_saves(["step_2/model/__0_0.distcp", "step_1/__0_0.distcp", "step_1/.metadata"])
    ['step_2/model']
    """
    paths = set(paths)
    folders = {path.rpartition("/")[0] for path in paths if path.endswith(DCP) and "/" in path}
    return sorted((each for each in folders if f"{each}/{DCP_METADATA}" not in paths), key=_split_numbers)


def list_weight_folders(paths: Iterable[str]) -> list[str]:
    """List the folders of a run that hold weights, the newest last, as numbers in their names say.

    >>> list_weight_folders(["b/model.safetensors", "a/model.safetensors", "optimizer/.metadata", "c/notes.txt"])
    ['a', 'b']
    """
    weights = sorted((each for each in _list_save_folders(paths) if not _is_optimizer(each)), key=_split_numbers)
    return [folder for folder in weights if folder.rpartition("/")[2] not in _AUXILIARY_FOLDER_NAMES] or weights


def _list_save_folders(paths: Iterable[str]) -> set[str]:
    """List the folders with a distributed checkpoint, safetensors files or torch's files of weights."""
    paths = list(paths)
    plain = {
        folder
        for folder, _, name in (path.rpartition("/") for path in paths)
        if folder and (name.endswith(SAFETENSORS) or _TORCH_WEIGHTS.fullmatch(name))
    }
    return plain | {*list_nested_saves(paths)}


def choose_nested_save(paths: Iterable[str]) -> str:
    """Choose the folder of a run to give: of weights, and above them if an optimizer is beside; empty for none.

    >>> choose_nested_save(["iter_3/model/.metadata", "iter_3/optimizer/.metadata"])
    'iter_3'
    >>> choose_nested_save(["policy/optimizer/optim/.metadata", "policy/weights/model/model.safetensors"])
    'policy/weights/model'
    >>> choose_nested_save(["optimizer/.metadata"])
    ''
    """
    paths = list(paths)
    folders, plain = _list_save_folders(paths), list_weight_folders(paths)
    if not plain:
        return ""
    above, _, name = plain[-1].rpartition("/")
    beside = {folder.rpartition("/")[2] for folder in folders if folder.rpartition("/")[0] == above}
    return (
        above
        if above and _MODEL_FOLDER_PATTERN.fullmatch(name) and any(map(_OPTIMIZER_FOLDER_PATTERN.fullmatch, beside))
        else plain[-1]
    )


def _is_optimizer(folder: str) -> bool:
    """Return whether a word of a path says so; `model_and_optim` has both."""
    return any(_OPTIMIZER_FOLDER_PATTERN.fullmatch(word) and not word.startswith("model") for word in folder.split("/"))


def _split_numbers(text: str) -> list[tuple[int, str]]:
    """Return a key by which numbers in a name are compared as numbers."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBER_PATTERN.split(text)]
