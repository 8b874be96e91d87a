"""Opens an adapter as PEFT stores it: a directory with `adapter_config.json` and one file of tensors."""

from __future__ import annotations

import re
from contextlib import contextmanager
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from shardctl.errors import SourceError, UnsupportedError, UsageError
from shardctl.libraries.files.file_names import SAFETENSORS
from shardctl.libraries.files.impostors import ADAPTER_CONFIG, ADAPTERS, NEW_EMBEDDINGS
from shardctl.libraries.peft.modules import AdapterTensors, require_elements, sort_tensors
from shardctl.libraries.peft.settings import AdapterSettings, parse_settings
from shardctl.libraries.safetensors.reading import scan_safetensors
from shardctl.libraries.torch_save.reading import scan_torch_save
from shardctl.storage.addresses import open_source
from shardctl.storage.bounded_text import CONFIG_TEXT, parse_json, read_file
from shardctl.value import value_class

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardctl.manifest import Manifest
    from shardctl.storage import Source

_ADDRESS: Final = re.compile(r"(hf|s3|gs|az|https?):/")


@value_class
class Adapter:
    """An opened adapter."""

    folder: Path
    settings: AdapterSettings
    tensors: AdapterTensors
    file: str
    """The name of the file of tensors."""
    source: Source
    """That file alone."""
    size: int
    """Of the file, in bytes."""
    config_hash: str
    """A hash of what `adapter_config.json` says."""


def scan_adapter_file(source: Source) -> Manifest:
    """Read what is in the file of an adapter, which alone is the source; raises as the formats do."""
    return scan_safetensors(source) if next(iter(source.files())).endswith(SAFETENSORS) else scan_torch_save(source)


@contextmanager
def open_adapter(folder: Path) -> Iterator[Adapter]:
    """Open an adapter for the length of a `with` block; raises SourceError for a directory that is none."""
    if _ADDRESS.match(str(folder)):
        raise UsageError(f"{folder} is not on this machine", hint="download the adapter, and give its directory")
    file = next((name for name in ADAPTERS if (folder / name).is_file()), None)
    if file is None or not (folder / ADAPTER_CONFIG).is_file():
        raise SourceError(
            f"{folder} is not a PEFT adapter", hint=f"one has {ADAPTER_CONFIG} and {' or '.join(ADAPTERS)}"
        )
    if (folder / NEW_EMBEDDINGS).is_file():
        raise UnsupportedError(
            f"{folder} has rows of a larger vocabulary in {NEW_EMBEDDINGS}, which shardctl does not merge",
            hint="add them to the base's embedding and head first, and give that base with the adapter alone",
        )
    content = read_file(folder / ADAPTER_CONFIG, CONFIG_TEXT)
    values = parse_json(content, ADAPTER_CONFIG, CONFIG_TEXT)
    if not isinstance(values, dict):
        raise SourceError(f"{ADAPTER_CONFIG} is not a JSON object")
    settings = parse_settings(values)
    source = open_source(folder / file)
    try:
        stored = scan_adapter_file(source).tensors.values()
        require_elements(stored)
        tensors = sort_tensors(stored)
        size = source.files()[file].size
        yield Adapter(folder, settings, tensors, file, source, size, sha256(content).hexdigest())
    finally:
        source.close()
