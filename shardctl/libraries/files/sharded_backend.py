"""Reads Megatron-LM's `metadata.json`, which says how a distributed checkpoint is stored.

Written last, by `dist_checkpointing/core.py` of Megatron-LM core: what has it is complete.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

from shardctl.base.value import value_class
from shardctl.libraries.files.file_names import DCP_METADATA
from shardctl.libraries.files.links import check_link
from shardctl.storage import read_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.storage import Source

MARK: Final = "metadata.json"
INTEGRITY: Final = "integrity.json"
"""The SHA-256s of the files beside it."""
COMMON: Final = "common.pt"
"""What all ranks have alike, a file of torch.save."""
TRACKER: Final = "latest_checkpointed_iteration.txt"
"""Beside the folders of iterations: the number of the last one, or `release`."""
_WEIGHT_FOLDER_NAMES: Final = ("weights", "model_weights")
"""Where NeMo 2 and NeMo 1 have one, beside the model's description."""
_MAX_TEXT_FILE_BYTES: Final = 1 << 16
_SHARDED_BACKEND_KEY: Final = "sharded_backend"
_METADATA_HEAD_BYTES: Final = 1 << 20
_FSDP_KEY_PATTERN: Final = re.compile(
    rb"model[0-9]*\.(?:module\.)*decoder\.layers\.[0-9]+\.(?:self_attention|mlp)\.linear_"
)
_ITERATION_NUMBER_PATTERN: Final = re.compile(r"[0-9]{1,18}")


def encode_integrity(files: Mapping[str, str]) -> bytes:
    """Encode `integrity.json` as Megatron-LM core 0.19 does; `files` are the SHA-256s of the files beside it.

    >>> print(encode_integrity({"common.pt": "ab"}).decode())
    {
      "algorithm": "sha256",
      "files": {
        "common.pt": "ab"
      }
    }
    """
    return json.dumps({"algorithm": "sha256", "files": dict(sorted(files.items()))}, indent=2).encode()


@value_class
class ShardedBackend:
    """What the file says."""

    folder: str
    """That holds it: empty, or a path that ends in a slash."""
    name: str
    """Of the container of tensors, such as `torch_dist` or `zarr`."""
    version: object
    common: object
    """The name of the container of everything that all ranks have alike."""


def read_sharded_backend(source: Source) -> ShardedBackend | None:
    """Read what the source's `metadata.json` says, or that of the iteration that is the last; None if there is none."""
    for folder in _list_folders(source):
        said = _read_metadata(source, folder + MARK)
        if said is not None:
            name = said.get(_SHARDED_BACKEND_KEY)
            return ShardedBackend(
                folder, str(name), said.get(f"{_SHARDED_BACKEND_KEY}_version"), said.get("common_backend")
            )
    return None


def is_megatron(source: Source) -> bool:
    """Return whether there is such a file, or all else of such a checkpoint, which must not pass for one of torch."""
    files = source.files()
    return read_sharded_backend(source) is not None or any(
        f"{folder}{COMMON}" in files and f"{folder}{DCP_METADATA}" in files for folder in _list_folders(source)
    )


def find_fsdp_folder(source: Source) -> str | None:
    """Find the folder with what Megatron-FSDP saved: torch's metadata, with Megatron-LM's names.

    None if there is none. Only the beginning of the metadata is looked at, where the names of weights are.
    """
    files = source.files()
    for folder in _list_folders(source):
        path = f"{folder}{DCP_METADATA}"
        if path in files and not {f"{folder}{MARK}", f"{folder}{COMMON}"} & set(files):
            check_link(source, path)
            if _FSDP_KEY_PATTERN.search(read_bytes(source, path, 0, min(files[path].size, _METADATA_HEAD_BYTES))):
                return folder
    return None


def _list_folders(source: Source) -> tuple[str, ...]:
    return ("", *filter(None, (read_tracker(source),)), *(f"{name}/" for name in _WEIGHT_FOLDER_NAMES))


def read_tracker(source: Source) -> str | None:
    """Read the folder that the tracker names, with a slash; None if there is no tracker, or it names none.

    See `get_checkpoint_name` in `megatron/training/checkpointing.py`.
    """
    text = _read_text(source, TRACKER) or ""
    if text == "release":
        return "release/"
    return f"iter_{int(text):07d}/" if _ITERATION_NUMBER_PATTERN.fullmatch(text) else None


def _read_text(source: Source, path: str) -> str | None:
    stat = source.files().get(path)
    if stat is None or stat.size > _MAX_TEXT_FILE_BYTES:
        return None
    check_link(source, path)
    return read_bytes(source, path).decode("ascii", "replace").strip()


def _read_metadata(source: Source, path: str) -> dict[str, object] | None:
    text = _read_text(source, path)
    if text is None:
        return None
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) and _SHARDED_BACKEND_KEY in said else None
