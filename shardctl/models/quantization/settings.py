"""Finds what a config says of how weights are quantized, and by which method."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import SourceError
from shardctl.models.tables.config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SIDECAR: Final = "hf_quant_config.json"
"""Where ModelOpt up to 0.33 says how weights are quantized."""
QUANTIZATION_FILES: Final = frozenset({SIDECAR, "quant_config.json", "quantize_config.json", "quanto_qmap.json"})
"""Files next to a config that say how weights are quantized: ModelOpt's, AutoAWQ's, AutoGPTQ's, optimum-quanto's."""
VALUES_PLACE: Final = "{} (dequantized)"
"""What the place of a decoded weight's values is called in messages, by the name of the weight."""
KEEP_HINT: Final = "leave --dtype out to keep the quantized weights as they are"
_QUANTIZATION_CONFIG_KEYS: Final = ("quantization_config", "compression_config")


def find_quantization_config(config: Mapping[str, object]) -> ModelConfig | None:
    """Find the `quantization_config` of a `config.json` or of its text half; None if the model is not quantized.

    Raises SourceError if it is there and is no table.
    """
    text = config.get("text_config")
    for values in (config, text if isinstance(text, dict) else {}):
        for key in _QUANTIZATION_CONFIG_KEYS:
            settings = values.get(key)
            if isinstance(settings, dict):
                return _open_settings(settings)
            if settings is not None:
                raise SourceError(f"config.json has {key} = {settings!r} where a table is expected")
    return None


def _open_settings(settings: Mapping[str, Any]) -> ModelConfig:
    """Return the settings themselves, which ModelOpt's sidecar has one table deeper than a config."""
    inner = settings.get("quantization")
    if not isinstance(inner, dict):
        return ModelConfig(settings)
    return ModelConfig({"quant_method": "modelopt", **inner}, SIDECAR)


def name_method(settings: ModelConfig) -> str:
    """Return the method in lower case; where none is named, the one that writes such settings; empty if none does.

    ModelOpt 0.31 named none in `config.json`, and compressed-tensors names none in `compression_config`.
    """
    marks = {"quant_algo": "modelopt", "config_groups": "compressed-tensors"}
    usual = next((name for key, name in marks.items() if key in settings.values), "")
    return settings.text("quant_method", usual).lower()


def complete_config(config: Mapping[str, Any], sidecar: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return `config` with what only its `hf_quant_config.json` says, and warnings of what is odd about the two.

    Where `config.json` says how weights are quantized, engines follow it; of the same quantization the sidecar says
    more in some versions: sizes of groups, and which module has which precision.
    Raises SourceError for a sidecar that is none.
    """
    inner = sidecar.get("quantization")
    if not isinstance(inner, dict):
        raise SourceError(
            f"{SIDECAR} has no table 'quantization'", hint=f"remove {SIDECAR} if nothing wrote it for this model"
        )
    own = find_quantization_config(config)
    if own is None:
        return {**config, _QUANTIZATION_CONFIG_KEYS[0]: {"quant_method": "modelopt", **sidecar}}, ()
    said, there = own.values.get("quant_algo"), inner.get("quant_algo")
    if said is not None and said == there:
        missing = {key: value for key, value in inner.items() if key not in own.values}
        if not missing:
            return config, ()
        return {**config, _QUANTIZATION_CONFIG_KEYS[0]: {**own.values, **missing}}, ()
    words = f"config.json says {said or name_method(own)}, and {SIDECAR} {there}"
    return config, ((f"{words}: config.json is followed, as vLLM does",) if there is not None else ())


def replace_quantization_settings(
    config: Mapping[str, Any], change: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Return a config with `change` made of what it says of quantized weights, wherever it says so.

    A config may say it twice, for its text model and for itself, and a file of its own may say it, too.
    """
    found = dict(config)
    text = config.get("text_config")
    if isinstance(text, dict):
        found["text_config"] = replace_quantization_settings(text, change)
    for key in _QUANTIZATION_CONFIG_KEYS:
        if isinstance(config.get(key), dict):
            found[key] = replace_file_settings(config[key], change)
    return found


def replace_file_settings(
    settings: Mapping[str, Any], change: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Return the settings with `change` made of them, or of the inner table that ModelOpt's sidecar has."""
    inner = settings.get("quantization")
    return {**settings, "quantization": change(inner)} if isinstance(inner, dict) else change(settings)


def drop_quantization_config(config: Mapping[str, object]) -> Mapping[str, object]:
    """Leave out of a config that the model is quantized."""
    text = config.get("text_config")
    inner = (
        {"text_config": {k: v for k, v in text.items() if k not in _QUANTIZATION_CONFIG_KEYS}}
        if isinstance(text, dict)
        else {}
    )
    return {key: value for key, value in config.items() if key not in _QUANTIZATION_CONFIG_KEYS} | inner
