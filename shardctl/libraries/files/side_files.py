"""Decides which side files are copied and which are left out: all files without tensors of the checkpoint."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.base.amounts import format_plural
from shardctl.base.errors import format_first_few
from shardctl.libraries.files.file_names import DCP_METADATA, LOADED_SUFFIXES, WEIGHT_SUFFIXES
from shardctl.libraries.files.impostors import ADAPTERS, TRAINER_FILES, list_adapter_files
from shardctl.libraries.files.links import check_link
from shardctl.tensors.manifest import OpaqueObject
from shardctl.tensors.record import ATTESTATION, RECORD, SUMS

if TYPE_CHECKING:
    from shardctl.storage import Source
    from shardctl.tensors.manifest import Manifest, Policy

_REGENERATED_FILES: Final = frozenset({RECORD, SUMS, *ATTESTATION})
"""Files of the root that describe the files beside them, so that the ones of the source would be wrong."""
_WEIGHT_INDEX_PATTERN: Final = re.compile(r".+\.(safetensors|bin|h5|msgpack|pt|pth)\.index(\.[^.]+)?\.json")
"""Indexes of weights, also those of variants (`model.safetensors.index.fp16.json`); also remade."""
_MAX_FILES_SHOWN: Final = 8
"""Files that one warning names."""
_INTERNAL_FOLDER_NAMES: Final = frozenset({".git", ".cache", ".shardctl", ".weight_sync", "__pycache__"})
"""Folders that programs keep for themselves."""
_EXPORTED_WEIGHTS_PATTERN: Final = re.compile(
    r".+(\.onnx|[._]onnx[._]data(_[0-9]+)?|\.h5|\.keras|\.msgpack|\.ot|\.tflite|\.gguf|\.ggml|\.pdparams|\.mlmodel"
    r"|\.ckpt[-.][-.a-z0-9]+|\.llamafile|\.engine)|openvino_.+\.(bin|xml)"
)
"""The same weights for other programs, wherever they lie."""
_EXPORT_FOLDERS: Final = frozenset({"onnx", "openvino", "coreml", "flax", "tf", "tflite", "saved_model", "gguf"})
"""Folders of the root with nothing but such exports and what they need."""
_DUPLICATE_WEIGHT_FOLDERS: Final = frozenset({"original", "metal", "sharded"})
"""Folders of the root whose weights are the model's again: Meta's layout, gpt-oss's, and what torch consolidates."""
_TRAINER_FOLDERS: Final = re.compile(r"checkpoint-[0-9]+|global_step[0-9]+|optimizer_[0-9]+|pytorch_model_fsdp_[0-9]+")
_TRAINER_CHECKPOINT_PATTERN: Final = re.compile(
    r".*/(\.metadata|__\d+_\d+\.distcp|common\.pt|model_optim_rng\.pt|mp_rank_\d+(_\w+)?_model_states\.pt"
    r"|layer_\d+-model_\d+-model_states\.pt|(\w+_)?zero_pp_rank_\w+_states\.pt|zero/[^/]+/(fp32|exp_avg|exp_avg_sq)\.pt)"
)
"""Files by which the folder of a trainer's checkpoint is known: torch's DCP, Megatron's, DeepSpeed's."""
_TRACKER_FILES: Final = frozenset({"latest", "latest_universal", "latest_checkpointed_iteration.txt"})
"""Files of the root that name such a folder."""
_WEIGHT_FILE_PATTERN: Final = re.compile(
    f".+({'|'.join(map(re.escape, (*WEIGHT_SUFFIXES, '.ckpt')))})|{re.escape(DCP_METADATA)}"
)


def list_side_files(source: Source, weights: set[str]) -> tuple[tuple[OpaqueObject, ...], tuple[str, ...]]:
    """List every file of the source that is not one of `weights`, with its policy; and what deserves a warning.

    Configs, tokenizers, chat templates, code, `.gitattributes` and whole sub-folders are carried. The weights in a
    sub-folder are carried too, because they are a module of their own (`2_Dense/model.safetensors` of
    sentence-transformers), except in folders known to repeat the model. Left behind are exports for other programs,
    the state of a trainer, folders with another checkpoint and what names them, and weights of the root that the
    checkpoint does not use. Indexes, `SHA256SUMS`, `shardctl.json`
    and a signature with its statement describe the source's own files; they are not even listed.

    Raises:
        HostileError: a file that would be carried is a link that leaves the directory.
    """
    objects = []
    unused = []
    folders: dict[str, int] = {}
    own = set(map(_get_folder, weights))
    adapters = list_adapter_files(source)
    trained = {_get_folder(path) for path in source.files() if _TRAINER_CHECKPOINT_PATTERN.fullmatch(path)} - own
    for path, stat in source.files().items():
        if path in weights or _is_remade(path):
            continue
        of_another = _get_folder(path) in trained or (bool(trained) and path in _TRACKER_FILES)
        policy, warn = _choose_policy(path)
        if path in adapters:
            policy, warn = "carry", False
        elif of_another:
            policy, warn = "drop", True
        if policy == "carry":
            check_link(source, path)
        folder = _get_folder(path)
        if warn and folder:
            folders[folder] = folders.get(folder, 0) + 1
        elif warn and path not in _TRACKER_FILES:
            unused.append(path)
        objects.append(OpaqueObject(path, policy, file=path, size=stat.size))
    warnings = [_describe_unused(unused)] if unused else []
    for folder, number in folders.items():
        warnings.append(f"{folder}/ is left behind: {format_plural(number, 'file')} of another checkpoint")
    return tuple(objects), tuple(warnings)


def list_unused_weights(manifest: Manifest) -> tuple[str, ...]:
    """List the weights files of the root that a checkpoint does not use, and a loader may take; states are none."""
    return tuple(
        side.file
        for side in manifest.objects
        if side.file and "/" not in side.file and side.file.endswith(LOADED_SUFFIXES)
        if _choose_policy(side.file) == ("drop", True)
    )


def _get_folder(path: str) -> str:
    """Return the folder of the root that a file is in; empty for one of the root."""
    return path.split("/", 1)[0] if "/" in path else ""


def _describe_unused(paths: list[str]) -> str:
    if len(paths) == 1:
        return f"{paths[0]} holds weights that are not part of this checkpoint; it is left behind"
    return (
        f"{format_first_few(paths, _MAX_FILES_SHOWN)} hold weights that are not part of this checkpoint; they are left"
        " behind"
    )


def _is_remade(path: str) -> bool:
    *folders, name = path.split("/")
    if not _INTERNAL_FOLDER_NAMES.isdisjoint(folders):
        return True
    return not folders and (name in _REGENERATED_FILES or _WEIGHT_INDEX_PATTERN.fullmatch(name) is not None)


def _choose_policy(path: str) -> tuple[Policy, bool]:
    """Return whether to carry the file, and whether leaving it behind may surprise."""
    *folders, name = path.split("/")
    top = folders[0] if folders else ""
    if _TRAINER_FOLDERS.fullmatch(top):
        return "drop", True
    if _EXPORTED_WEIGHTS_PATTERN.fullmatch(name) or TRAINER_FILES.fullmatch(name) or top in _EXPORT_FOLDERS:
        return "drop", False
    if top in _DUPLICATE_WEIGHT_FOLDERS and _WEIGHT_FILE_PATTERN.fullmatch(name):
        return "drop", False
    if not folders and _WEIGHT_FILE_PATTERN.fullmatch(name) and name not in ADAPTERS:
        return "drop", True
    return "carry", False
