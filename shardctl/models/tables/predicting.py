"""Tells the layers that predict further tokens (MTP) from the others, by a config's keys and by names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from shardctl.models.tables.text_config import merge_text_config

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PREDICTING_KEYS: Final = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "mtp_num_layers")
"""How configs call the number of layers that predict further tokens."""
LAYER_KEYS: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
"""How configs call the number of other layers."""
_MTP_NAME_PATTERN: Final = re.compile(r"(^|\.)(mtp|nextn|mtp_layers|mtp_block)\.")
_LAYER_INDEX_PATTERN: Final = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)\.")
_ENCODER_NAME_PATTERN: Final = re.compile(r"(?:^|\.)[^.]*(?:vision|visual|audio|image|encoder)")
"""Names of modules beside the text model, whose layers are numbered by themselves."""


def get_count(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    """Return the number under the first of `keys` that a config has; None if there is none, or it is no number."""
    found = next((config[key] for key in keys if config.get(key) is not None), None)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def list_predicting_names(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """List the names of tensors of layers that predict further tokens: called so, or numbered after the last layer.

    >>> list_predicting_names({"num_hidden_layers": 2}, ["mtp.fc.weight", "layers.1.up.weight", "layers.2.up.weight"])
    ['mtp.fc.weight', 'layers.2.up.weight']
    """
    layers = get_count(merge_text_config(config), LAYER_KEYS)
    found = []
    for name in names:
        layer = _LAYER_INDEX_PATTERN.search(name) if _ENCODER_NAME_PATTERN.search(name) is None else None
        if _MTP_NAME_PATTERN.search(name) or (layers is not None and layer is not None and int(layer[1]) >= layers):
            found.append(name)
    return found
