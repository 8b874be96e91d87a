"""Finds weights that a trainer saved as safetensors in a folder, with its optimizer in another one beside it.

NeMo Automodel 0.7 (`components/checkpoint/checkpointing.py`, `save_model` and `save_optimizer`): `model/` has the files
of ranks under the names of the Hub, `optim/` a distributed checkpoint, and `model/.hf_metadata/` the model's config.
NeMo-RL saves so, too, and its `weights/model` may be given by itself.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.libraries.files.links import check_link
from shardctl.storage.bounded_text import CONFIG_TEXT, parse_json, read_text
from shardctl.tensors.manifest import OwnConfig

if TYPE_CHECKING:
    from shardctl.storage import Source

FOLDER: Final = "model/"
METADATA: Final = ".hf_metadata/"
_CONFIG_FILE: Final = f"{METADATA}config.json"
_SHARD_FILE_PATTERN: Final = re.compile(rf"{FOLDER}shard-[0-9]{{5}}-model-[0-9]{{5}}-of-[0-9]{{5}}\.safetensors")


def list_saved_apart(source: Source) -> list[str]:
    """List the files of ranks that are in a folder `model`."""
    return [path for path in source.files() if _SHARD_FILE_PATTERN.fullmatch(path)]


def read_config_apart(source: Source, folder: str = FOLDER) -> OwnConfig | None:
    """Read the config that was saved beside them in their `folder`; None if there is none.

    Raises:
        SourceError: it is no JSON object.
        HostileError: it is a link that leaves the directory.
    """
    path = f"{folder}{_CONFIG_FILE}"
    if path not in source.files():
        return None
    check_link(source, path)
    values = parse_json(read_text(source, path, CONFIG_TEXT), path, CONFIG_TEXT)
    if not isinstance(values, dict):
        raise SourceError(f"{path} is not an object of JSON")
    return OwnConfig(values)
