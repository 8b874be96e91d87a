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
from shardctl.models.quantization.settings import find_quantization_config, name_method
from shardctl.models.quantization.stored_weight import StoredQuantization

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardctl.tensors.manifest import Manifest

_UNDECODED_METHODS: Final = {
    "aqlm": "AQLM",
    "bitblas": "BitBLAS",
    "eetq": "EETQ",
    "exl2": "EXL2 (ExLlamaV2)",
    "exl3": "EXL3 (ExLlamaV3)",
    "fouroversix": "Four Over Six",
    "fp_quant": "FP-Quant",
    "gguf": "GGUF",
    "higgs": "HIGGS",
    "qqq": "QQQ",
    "quip": "QuIP#",
    "sinq": "SINQ",
    "spqr": "SpQR",
    "squeezellm": "SqueezeLLM",
    "svdquant": "SVDQuant (nunchaku)",
    "vptq": "VPTQ",
}
"""By `quant_method` in small letters: what people call it."""
_ARRAY_NAMES_BY_FORMAT: Final = {
    "AQLM": ("codes", "codebooks", "scales"),
    "EXL2 (ExLlamaV2)": ("q_weight", "q_scale", "q_groups"),
    "EXL3 (ExLlamaV3)": ("trellis", "svh"),
    "VPTQ": ("centroids.weight", "indices"),
    "SpQR": ("dense_weights", "row_offsets", "col_vals"),
    "EETQ": ("weight", "weight_scales"),
    "SVDQuant (nunchaku)": ("qweight", "wscales", "smooth_factor"),
}
"""By format: names that follow a module's, all of which its quantized modules have."""


def _find_undecoded_weights(stored: Manifest, config: Mapping[str, object]) -> StoredQuantization | None:
    """Find weights in a format that is only named here; None if there are none."""
    tensors, settings = stored.tensors, find_quantization_config(config)
    method = name_method(settings) if settings is not None else ""
    if method in _UNDECODED_METHODS:
        return StoredQuantization(_UNDECODED_METHODS[method], None)
    for title, owns in _ARRAY_NAMES_BY_FORMAT.items():
        ending = f".{owns[-1]}"
        modules = [name.removesuffix(ending) for name in tensors if name.endswith(ending)]
        if any(all(f"{module}.{own}" in tensors for own in owns) for module in modules):
            return StoredQuantization(title, None)
    return None


_FORMAT_FINDERS: Final[tuple[Callable[[Manifest, Mapping[str, object]], StoredQuantization | None], ...]] = (
    find_mlx_weights,
    find_quanto_weights,
    find_comfy_weights,
    _find_undecoded_weights,
)
"""To add a format, write its file and name it here."""


def find_stored_quantization(stored: Manifest, config: Mapping[str, object] | None) -> StoredQuantization | None:
    """Find how weights are quantized that lie under their stored names; None if nothing shows it."""
    if stored.dialect is not None:  # arrays of another library, which knows its own
        return None
    found = (find(stored, config or {}) for find in _FORMAT_FINDERS)
    return next((each for each in found if each is not None), None)


def explain_stored_quantization(found: StoredQuantization) -> UnsupportedError:
    """Build the error that says why the model of such weights is not known, and what to do."""
    if found.list_weights is None:
        hint = "on one device they are converted as they are, without --dtype"
    else:
        hint = "add --dtype bf16 to decode them; on one device they are also converted as they are"
    return UnsupportedError(f"the weights are quantized: {found.title}", hint=hint)
