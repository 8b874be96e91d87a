"""Finds weights that a trainer saved as safetensors in a folder, with its optimizer in another one beside it.

NeMo Automodel 0.7 (`components/checkpoint/checkpointing.py`, `save_model` and `save_optimizer`): `model/` has the files
of ranks under the names of the Hub, `optim/` a distributed checkpoint, and `model/.hf_metadata/` the model's config.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.errors import SourceError
from shardctl.libraries.files.links import check_link
from shardctl.manifest import OwnConfig
from shardctl.storage.bounded_text import CONFIG_TEXT, parse_json, read_text

if TYPE_CHECKING:
    from shardctl.storage import Source

FOLDER: Final = "model/"
_CONFIG: Final = f"{FOLDER}.hf_metadata/config.json"
_FILE: Final = re.compile(rf"{FOLDER}shard-[0-9]{{5}}-model-[0-9]{{5}}-of-[0-9]{{5}}\.safetensors")


def list_saved_apart(source: Source) -> list[str]:
    """List the files of ranks that are in a folder `model`."""
    return [path for path in source.files() if _FILE.fullmatch(path)]


def read_config_apart(source: Source) -> OwnConfig | None:
    """Read the config that was saved beside them; None if there is none.

    Raises:
        SourceError: it is no JSON object.
        HostileError: it is a link that leaves the directory.
    """
    if _CONFIG not in source.files():
        return None
    check_link(source, _CONFIG)
    values = parse_json(read_text(source, _CONFIG, CONFIG_TEXT), _CONFIG, CONFIG_TEXT)
    if not isinstance(values, dict):
        raise SourceError(f"{_CONFIG} is not an object of JSON")
    return OwnConfig(values)
