"""Opens an adapter as PEFT stores it: a directory with `adapter_config.json` and one file of tensors."""

from __future__ import annotations

import re
from contextlib import closing, contextmanager
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UsageError
from shardctl.base.value import value_class
from shardctl.libraries.files.file_names import SAFETENSORS
from shardctl.libraries.files.impostors import ADAPTER_CONFIG, ADAPTERS, NEW_EMBEDDINGS
from shardctl.libraries.peft.modules import AdapterTensors, require_elements, sort_tensors
from shardctl.libraries.peft.settings import AdapterSettings, parse_settings
from shardctl.libraries.safetensors.reading import scan_safetensors
from shardctl.libraries.torch_save.reading import scan_torch_save
from shardctl.storage.addresses import open_source
from shardctl.storage.bounded_text import CONFIG_TEXT, parse_json, read_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from shardctl.storage import Source
    from shardctl.tensors.manifest import Manifest, Tensor

_REMOTE_ADDRESS_PATTERN: Final = re.compile(r"(hf|s3|gs|az|https?):/")


INPUT_ROWS: Final = "input_embeddings"
OUTPUT_ROWS: Final = "output_embeddings"
"""What vLLM up to 0.10 calls rows of the embedding and of the head (`lora/lora_model.py`)."""


@value_class
class NewRows:
    """Rows of further tokens, which follow those of the base's vocabulary."""

    tables: Mapping[str, Tensor]
    """By `INPUT_ROWS` and `OUTPUT_ROWS`."""
    source: Source
    """Their file alone."""
    size: int
    """Of the file, in bytes."""


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
    new_rows: NewRows | None = None


def scan_adapter_file(source: Source) -> Manifest:
    """Read what is in the file of an adapter, which alone is the source; raises as the formats do."""
    return scan_safetensors(source) if next(iter(source.files())).endswith(SAFETENSORS) else scan_torch_save(source)


@contextmanager
def open_adapter(folder: Path) -> Iterator[Adapter]:
    """Open an adapter for the length of a `with` block; raises SourceError for a directory that is none."""
    if _REMOTE_ADDRESS_PATTERN.match(str(folder)):
        raise UsageError(f"{folder} is not on this machine", hint="download the adapter, and give its directory")
    file = next((name for name in ADAPTERS if (folder / name).is_file()), None)
    if file is None or not (folder / ADAPTER_CONFIG).is_file():
        raise SourceError(
            f"{folder} is not a PEFT adapter", hint=f"one has {ADAPTER_CONFIG} and {' or '.join(ADAPTERS)}"
        )
    content = read_file(folder / ADAPTER_CONFIG, CONFIG_TEXT)
    values = parse_json(content, ADAPTER_CONFIG, CONFIG_TEXT)
    if not isinstance(values, dict):
        raise SourceError(f"{ADAPTER_CONFIG} is not a JSON object")
    settings = parse_settings(values)
    with closing(open_source(folder / file)) as source, _open_new_rows(folder) as rows:
        stored = scan_adapter_file(source).tensors.values()
        require_elements(stored)
        tensors = sort_tensors(stored)
        size = source.files()[file].size
        yield Adapter(folder, settings, tensors, file, source, size, sha256(content).hexdigest(), rows)


@contextmanager
def _open_new_rows(folder: Path) -> Iterator[NewRows | None]:
    """Open the rows of further tokens for the length of a `with` block; raises SourceError for other tensors."""
    if not (folder / NEW_EMBEDDINGS).is_file():
        yield None
        return
    with closing(open_source(folder / NEW_EMBEDDINGS)) as source:
        tensors = scan_safetensors(source).tensors
        tables = {name: tensors[name] for name in (INPUT_ROWS, OUTPUT_ROWS) if name in tensors}
        if tables.keys() != tensors.keys() or len({tensor.shape for tensor in tables.values()}) != 1:
            held = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
            raise SourceError(
                f"{NEW_EMBEDDINGS} holds {held or 'no tensors'}, and not {INPUT_ROWS} and {OUTPUT_ROWS} of one shape",
                hint="it may belong to another program than vLLM",
            )
        yield NewRows(tables, source, source.files()[NEW_EMBEDDINGS].size)
