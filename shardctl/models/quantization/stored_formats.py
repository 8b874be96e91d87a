"""Finds quantized weights by what is stored, where no method that `config.json` names explains them.

Names, types and the metadata of files show the formats of MLX, quanto and ComfyUI, whatever a config says about them,
and for which model. Formats that nobody here decodes are named, so that a message need not guess.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UnsupportedError
from shardctl.models.quantization.comfy import find_comfy_weights
from shardctl.models.quantization.mlx import find_mlx_weights
from shardctl.models.quantization.quanto import find_quanto_weights
from shardctl.models.quantization.undecoded import find_undecoded_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardctl.models.quantization.stored_weight import StoredQuantization
    from shardctl.tensors.manifest import Manifest

_FINDERS: Final[tuple[Callable[[Manifest, Mapping[str, object]], StoredQuantization | None], ...]] = (
    find_mlx_weights,
    find_quanto_weights,
    find_comfy_weights,
    find_undecoded_weights,
)
"""To add a format, write its file and name it here."""


def find_stored_quantization(stored: Manifest, config: Mapping[str, object] | None) -> StoredQuantization | None:
    """Find how weights are quantized that lie under their stored names; None if nothing shows it."""
    if stored.dialect is not None:  # arrays of another library, which knows its own
        return None
    found = (find(stored, config or {}) for find in _FINDERS)
    return next((each for each in found if each is not None), None)


def explain_stored_quantization(found: StoredQuantization) -> UnsupportedError:
    """Build the error that says why the model of such weights is not known, and what to do."""
    if found.list_weights is None:
        hint = "on one device they are converted as they are, without --dtype"
    else:
        hint = "add --dtype bf16 to decode them; on one device they are also converted as they are"
    return UnsupportedError(f"the weights are quantized: {found.title}", hint=hint)
