"""Recognises the files of a DeepSpeed checkpoint by their names, and finds the latest one.

Names: DeepSpeed `runtime/engine.py` (`_get_ckpt_name`, `_get_zero_ckpt_name`, `_get_expert_ckpt_name`,
`_get_optimizer_ckpt_name`), `runtime/pipe/module.py` (`ckpt_layer_path`) and `checkpoint/ds_to_universal.py`.
"""

from __future__ import annotations

import re
from dataclasses import field
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import HostileError, SourceError
from shardctl.base.value import state_class
from shardctl.libraries.files.links import check_link
from shardctl.storage import read_bytes

if TYPE_CHECKING:
    from shardctl.storage import Source

_MODEL_FILE_PATTERN: Final = re.compile(r"(?:zero_pp_rank_([0-9]{1,9})_)?mp_rank_([0-9]{1,9})_model_states\.pt")
_OPTIMIZER_FILE_PATTERN: Final = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]{1,9})_mp_rank_([0-9]{1,9})_?optim_states\.pt"
)
_EXPERT_FILE_PATTERN: Final = re.compile(
    r"(?:layer_([0-9]{1,9})_)?expert_([0-9]{1,9})_mp_rank_([0-9]{1,9})_model_states\.pt"
)
_LAYER_FILE_PATTERN: Final = re.compile(r"layer_([0-9]{1,9})(?:-model_([0-9]{1,9}))?-model_states\.pt")
_EXPERTS_OPTIMIZER: Final = re.compile(r"expp_rank_[0-9]{1,9}_mp_rank_[0-9]{1,9}_optim_states\.pt")
_UNIVERSAL_STATE_PATTERN: Final = re.compile(r"zero/([^/]+)/(fp32|exp_avg|exp_avg_sq|step)\.pt")
_OTHER_FILE_PATTERN: Final = re.compile(
    r"zero/(optimizer_state|[^/]+/[^/]+)\.pt|zero_to_(fp32|torch)\.py|mp_rank_.*\.pt"
)
_LATEST_TAG_FILES: Final = ("latest", "latest_universal")
_MAX_TAG_FILE_BYTES: Final = 1_024
"""Bytes of a file that names a folder."""


@state_class
class DeepSpeedFiles:
    """The files of one checkpoint, by what they are."""

    folder: str
    """The folder that holds them, with a slash at its end; empty for the root."""
    model: dict[tuple[int, int | None], str] = field(default_factory=dict)
    """By model-parallel rank and, at stage 3, data-parallel rank: the module's state."""
    optimizer: dict[tuple[int, int], str] = field(default_factory=dict)
    """By model-parallel and data-parallel rank: flat partitions of master weights and optimizer states."""
    experts: dict[tuple[int, int, int], str] = field(default_factory=dict)
    """By MoE layer, global expert and model-parallel rank: the module's state of one expert."""
    layers: dict[tuple[int, int], str] = field(default_factory=dict)
    """By layer and tensor-parallel rank: the module's state of a layer of a pipeline."""
    universal: dict[str, dict[str, str]] = field(default_factory=dict)
    """By parameter and state: what a Universal Checkpoint has of it."""
    others: list[str] = field(default_factory=list)
    """Files of DeepSpeed that nothing is read from."""

    def list_paths(self) -> set[str]:
        """Return all of them."""
        own = (self.model, self.optimizer, self.experts, self.layers)
        states = {path for held in self.universal.values() for path in held.values()}
        return {*(path for held in own for path in held.values()), *states, *self.others}

    def __bool__(self) -> bool:
        return bool(self.model or self.optimizer or self.layers or self.universal)


def sort_files(source: Source) -> dict[str, DeepSpeedFiles]:
    """Return the files of DeepSpeed in each folder that has any: the root, and those directly below it."""
    found: dict[str, DeepSpeedFiles] = {}
    for path in source.files():
        for folder in _list_folders(path):
            files = found[folder] if folder in found else DeepSpeedFiles(folder)
            if _sort_file(files, path, path[len(folder) :]):
                found[folder] = files
                break
    return {folder: files for folder, files in found.items() if files}


def is_deepspeed_file(path: str) -> bool:
    """Return whether the name alone says that DeepSpeed wrote this."""
    name = path.rpartition("/")[2]
    if any(_UNIVERSAL_STATE_PATTERN.fullmatch(path[len(folder) :]) for folder in _list_folders(path)):
        return True
    return path.count("/") <= 1 and any(
        p.fullmatch(name) for p in (_MODEL_FILE_PATTERN, _OPTIMIZER_FILE_PATTERN, _LAYER_FILE_PATTERN)
    )


def _list_folders(path: str) -> list[str]:
    top, slash, _ = path.partition("/")
    return ["", f"{top}/"] if slash else [""]


def _sort_file(files: DeepSpeedFiles, path: str, name: str) -> bool:
    """Note what the file is, if it is one of DeepSpeed."""
    if m := _MODEL_FILE_PATTERN.fullmatch(name):
        files.model[int(m[2]), int(m[1]) if m[1] is not None else None] = path
    elif m := _OPTIMIZER_FILE_PATTERN.fullmatch(name):
        key = int(m[2]), int(m[1])
        if key in files.optimizer:
            raise SourceError(
                f"{files.optimizer[key]} and {path} are both of data-parallel rank {key[1]}",
                hint="the folder contains two saves; move one away",
            )
        files.optimizer[key] = path
    elif m := _EXPERT_FILE_PATTERN.fullmatch(name):
        files.experts[int(m[1]) if m[1] is not None else -1, int(m[2]), int(m[3])] = path
    elif m := _LAYER_FILE_PATTERN.fullmatch(name):
        files.layers[int(m[1]), int(m[2] or 0)] = path
    elif m := _UNIVERSAL_STATE_PATTERN.fullmatch(name):
        files.universal.setdefault(m[1], {})[m[2]] = path
    elif _OTHER_FILE_PATTERN.fullmatch(name) or _EXPERTS_OPTIMIZER.fullmatch(name):
        files.others.append(path)
    else:
        return False
    return True


def choose_checkpoint(source: Source, found: dict[str, DeepSpeedFiles]) -> DeepSpeedFiles:
    """Choose the checkpoint that is meant: the folder that `latest` names, else the only one.

    Raises:
        SourceError: the named folder is not there, or nothing says which of several is meant.
        HostileError: `latest` is a link that leaves the directory, or names something else than a folder beside it.
    """
    if "" in found:
        return found[""]
    for name in _LATEST_TAG_FILES:
        if name not in source.files():
            continue
        check_link(source, name)
        tag = (
            read_bytes(source, name, 0, min(source.files()[name].size, _MAX_TAG_FILE_BYTES))
            .decode(errors="replace")
            .strip()
        )
        if not tag or tag in {".", ".."} or any(c in tag for c in "/\\\0:"):
            raise HostileError(
                f"{name} says {ascii(tag)[:100]}, which is not the name of a folder beside it",
                hint="DeepSpeed never writes such a name; do not load this checkpoint",
            )
        if f"{tag}/" in found:
            return found[f"{tag}/"]
        others = ", ".join(folder.rstrip("/") for folder in found)
        raise SourceError(
            f"{name} says that the latest checkpoint is {tag}, which is not here",
            hint=f"give one of those that are: {others}" if found else "its copy is incomplete; fetch it again",
        )
    if len(found) == 1:
        return next(iter(found.values()))
    tags = ", ".join(folder.rstrip("/") for folder in found)
    raise SourceError(f"{source.name} holds several checkpoints: {tags}", hint="give one of them")
