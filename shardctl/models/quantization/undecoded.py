"""Names formats of quantized weights that nobody here decodes, by a config's method or by their arrays.

Methods: transformers 5.24 (quantizers/auto.py, `AUTO_QUANTIZER_MAPPING`) and vLLM 0.32
(model_executor/layers/quantization/__init__.py); arrays: AQLM (inference_lib/src/aqlm/inference.py), exllamav2
(linear.py) and exllamav3 (modules/quant/exl3.py), VPTQ, SpQR, EETQ, and nunchaku (models/linear.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.quantization.settings import find_quantization_config, name_method
from shardctl.models.quantization.stored_weight import StoredQuantization

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.tensors.manifest import Manifest

UNDECODED_METHODS: Final = {
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
_ARRAYS: Final = {
    "AQLM": ("codes", "codebooks", "scales"),
    "EXL2 (ExLlamaV2)": ("q_weight", "q_scale", "q_groups"),
    "EXL3 (ExLlamaV3)": ("trellis", "svh"),
    "VPTQ": ("centroids.weight", "indices"),
    "SpQR": ("dense_weights", "row_offsets", "col_vals"),
    "EETQ": ("weight", "weight_scales"),
    "SVDQuant (nunchaku)": ("qweight", "wscales", "smooth_factor"),
}
"""By format: names that follow a module's, all of which its quantized modules have."""


def find_undecoded_weights(stored: Manifest, config: Mapping[str, object]) -> StoredQuantization | None:
    """Find weights in a format that is only named here; None if there are none."""
    tensors, settings = stored.tensors, find_quantization_config(config)
    method = name_method(settings) if settings is not None else ""
    if method in UNDECODED_METHODS:
        return StoredQuantization(UNDECODED_METHODS[method], None)
    for title, owns in _ARRAYS.items():
        ending = f".{owns[-1]}"
        modules = [name.removesuffix(ending) for name in tensors if name.endswith(ending)]
        if any(all(f"{module}.{own}" in tensors for own in owns) for module in modules):
            return StoredQuantization(title, None)
    return None
