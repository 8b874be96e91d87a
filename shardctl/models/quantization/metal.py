"""Describes transformers' Metal weights: MLX's words of 32 bits, with scales and biases, which it calls `qbiases`.

Layout: transformers 5.24 (integrations/metal_quantization.py, `MetalLinear` and `_affine_dequantize_tensor`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.models.quantization.module_list import build_list_extension, find_module_list, match_name_parts
from shardctl.models.quantization.storage import (
    FLOAT,
    IN,
    OUT,
    AffineWords,
    AlongDim,
    QuantizationMethod,
    QuantizationScheme,
    QuantizedArray,
    WeightStorage,
    build_block_form,
    build_packed_dim,
)

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig

_BITS: Final = (2, 4, 8)
_LIST: Final = "modules_to_not_convert"


def _parse_scheme(config: ModelConfig) -> QuantizationScheme:
    bits, group = config.size("bits", 4), config.size("group_size", 64)
    if bits not in _BITS:
        raise SourceError(f"{config.file} has bits = {bits} where one of {', '.join(map(str, _BITS))} is expected")
    codes = QuantizedArray("weight", ("U32",), ((AlongDim(OUT), build_packed_dim(IN, bits)),))
    by_group = (build_block_form(1, group),)
    scales, biases = (QuantizedArray(name, FLOAT, by_group) for name in ("scales", "qbiases"))
    bias = QuantizedArray("bias", FLOAT, ((AlongDim(OUT),),), optional=True)
    storage = WeightStorage((codes, scales, biases, bias), decoder=AffineWords(codes, scales, biases, bits))
    listed = find_module_list(config, _LIST)
    return QuantizationScheme(lambda _names: storage, match_name_parts(listed or ()), heads=listed is not None)


METAL: Final = QuantizationMethod(("metal",), _parse_scheme, build_list_extension(_LIST))
