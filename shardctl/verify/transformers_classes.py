"""Finds classes of an installed transformers, and builds the configs of models for them."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import UnsupportedError
from shardctl.base.extras import format_install_command
from shardctl.models.names.hub.conversion_table import find_class_name
from shardctl.storage.hub import check_settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Torch = Any
"""Modules, tensors and classes of torch and transformers, which have no types worth checking here."""
_EXCLUDED_CONFIG_KEYS: Final = {"quantization_config", "dtype", "torch_dtype"}


def list_versions() -> dict[str, str]:
    """List the versions of what computes."""
    import torch
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}


def get_model_class(architecture: str) -> Torch:
    """Return the class of transformers called `architecture`; raises UnsupportedError, saying why, if there is none.

    Raises UsageError for a setting of the environment with which transformers cannot be imported.
    """
    check_settings(os.environ)
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UnsupportedError(
            f"the forward pass needs torch and transformers: {error}", hint=format_install_command("verify")
        ) from error
    found = getattr(transformers, architecture, None) if architecture else None
    if not isinstance(found, type) or not issubclass(found, torch.nn.Module):
        named = f"no class {architecture}" if architecture else "no class, because config.json names no architecture"
        raise UnsupportedError(f"transformers {transformers.__version__} has {named}")
    return found


def get_config_class(kind: Torch, config: Mapping[str, Any]) -> Torch:
    """Return the class of a config of `kind`: that of its model type, if that shares the class of another family."""
    from transformers import CONFIG_MAPPING

    model_type = str(config.get("model_type") or "")
    shared = model_type in CONFIG_MAPPING and find_class_name("", {"model_type": model_type}) == kind.__name__
    return CONFIG_MAPPING[model_type] if shared else kind.config_class


def build_config(kind: Torch, config: Mapping[str, Any], dtype: Torch) -> Torch:
    """Build the configuration of class `kind` that a decoded config.json gives, to compute in `dtype`."""
    values = {key: _parse_number(value) for key, value in config.items() if key not in _EXCLUDED_CONFIG_KEYS}
    return get_config_class(kind, config).from_dict({**values, "dtype": str(dtype).removeprefix("torch.")})


def _parse_number(value: object) -> object:
    """Parse a value of a config.json, where transformers writes infinity as `{"__float__": "Infinity"}`."""
    if isinstance(value, dict) and set(value) == {"__float__"}:
        return float(str(value["__float__"]))
    return [_parse_number(each) for each in value] if isinstance(value, list) else value


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Keep transformers from talking and drawing bars; what matters is in the result."""
    from transformers.utils import logging as talk

    logging: Torch = talk
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
