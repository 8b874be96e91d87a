"""Reads the config of a model: its `config.json`, and what a sidecar says of how its weights are quantized.

NVIDIA's ModelOpt up to 0.33 says that in `hf_quant_config.json` alone. vLLM reads the sidecar where `config.json` has
no `quantization_config` (transformers_utils/config.py), or has one that leaves out which layer has which precision
(model_executor/model_loader/weight_utils.py).
"""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import SourceError
from shardctl.base.value import value_class
from shardctl.models import complete_config
from shardctl.models.quantization.settings import SIDECAR
from shardctl.storage.addresses import is_hub_name, open_source
from shardctl.storage.bounded_text import CONFIG_TEXT, parse_json, read_file, read_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardctl.storage import Source

CONFIG: Final = "config.json"


@value_class
class ConfigReading:
    """What the config of a model says."""

    values: Mapping[str, Any] | None
    """The decoded config, with the sidecar's content where it says nothing itself; None if there is no config."""
    warnings: tuple[str, ...] = ()


def read_config(source: Source, override: Path | None = None, *, given: str = CONFIG) -> ConfigReading:
    """Read the config in the file `given` of a source, or in `override`, with its sidecar.

    `override` is a file, a directory or the name of a model on the Hub. A sidecar is looked for beside it first, then
    in the source, whose weights it is about. Raises SourceError for a file that cannot be read or is no JSON object.
    """
    sidecar: Mapping[str, Any] | None = None
    if override is not None and is_hub_name(override):
        config, sidecar = _read_hub_config(str(override))
    elif override is not None:
        path, *beside = list_override_files(override)
        config = _read_object(path)
        sidecar = _read_object(beside[0]) if beside else None
    else:
        data = _read_beside(source, given)
        if data is None:
            return ConfigReading(None)
        config = _parse_object(data, given)
    name = _name_sidecar(given)
    data = _read_beside(source, name) if sidecar is None and name else None
    if data is not None:
        sidecar = _parse_object(data, name)
    return ConfigReading(*complete_config(config, sidecar)) if sidecar is not None else ConfigReading(config)


def holds_config(source: Source, config: Mapping[str, Any] | None) -> bool:
    """Return whether the `config.json` of a source is this config; False for one that cannot be read."""
    try:
        return read_config(source).values == config
    except SourceError:
        return False


def list_override_files(given: Path) -> tuple[Path, ...]:
    """List the files that `--config` means: a config, or a directory's, and the sidecar beside it if there is one."""
    path = given / CONFIG if os.path.isdir(given) else given  # noqa: PTH112 - is_dir() raises for a name too long
    name = _name_sidecar(path.name)
    beside = path.with_name(name) if name else path
    return (path, beside) if name and os.path.isfile(beside) else (path,)  # noqa: PTH113 - as above


def _read_hub_config(name: str) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """Read the config of a model on the Hub, and the sidecar beside it if there is one."""
    with closing(open_source(name)) as place:
        data = _read_beside(place, CONFIG)
        if data is None:
            raise SourceError(f"{name} on the Hub has no {CONFIG}", hint="give a model that has one, or a file")
        beside = _read_beside(place, SIDECAR)
    return _parse_object(data, f"{name}/{CONFIG}"), None if beside is None else _parse_object(beside, SIDECAR)


def _name_sidecar(config: str) -> str:
    """Return the sidecar of a config, as their writers and collectors name the two; empty for a config of another name.

    >>> _name_sidecar("config.json"), _name_sidecar("org--model_config.json"), _name_sidecar("llama.json")
    ('hf_quant_config.json', 'org--model_hf_quant_config.json', '')
    """
    return f"{config.removesuffix(CONFIG)}{SIDECAR}" if config.endswith(CONFIG) else ""


def _read_beside(source: Source, name: str) -> bytes | None:
    """Read a file of the source, or one beside it where the source is itself one file; None if there is none."""
    return read_text(source, name, CONFIG_TEXT) if name in source.files() else source.beside(name)


def _read_object(path: Path) -> Mapping[str, Any]:
    try:
        return _parse_object(read_file(path, CONFIG_TEXT), str(path))
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from error


def _parse_object(data: bytes, where: str) -> Mapping[str, Any]:
    config = parse_json(data, where, CONFIG_TEXT)
    if not isinstance(config, dict):
        raise SourceError(f"{where} is not a JSON object")
    return config
