"""Describes ModelOpt (NVIDIA): fp8 with a scale a tensor, and NVFP4 with blocks of 16 inputs.

Layout: vLLM's readers (vllm/model_executor/layers/quantization/modelopt.py); `config.json` has what
`hf_quant_config.json` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.errors import UnsupportedError
from shardctl.models.dequantisation.floats import PackedFloats, ScaledFloats
from shardctl.models.quantisation.module_list import find_module_list, match_wildcards
from shardctl.models.quantisation.storage import (
    FLOAT,
    FP8,
    IN,
    OUT,
    PER_ROW,
    PER_TENSOR,
    SCALE,
    AlongDim,
    QuantisationMethod,
    QuantisationScheme,
    QuantisedArray,
    WeightStorage,
)

if TYPE_CHECKING:
    from shardctl.models.config import ModelConfig

_INPUT: Final = QuantisedArray("input_scale", FLOAT, PER_TENSOR, optional=True)


def _parse_scheme(config: ModelConfig) -> QuantisationScheme:
    kind = config.text("quant_algo", "").upper()
    if kind == "FP8":
        codes = QuantisedArray("weight", FP8, ((AlongDim(OUT), AlongDim(IN)),))
        scale = QuantisedArray("weight_scale", FLOAT, (*PER_TENSOR, *PER_ROW))
        storage = WeightStorage((codes, scale, _INPUT), decoder=ScaledFloats(codes, scale))
    elif kind == "NVFP4":
        codes = QuantisedArray("weight", ("U8",), ((AlongDim(OUT), AlongDim(IN, 2)),))
        block = QuantisedArray(
            "weight_scale", SCALE[::-1], ((AlongDim(OUT), AlongDim(IN, config.size("group_size", 16))),)
        )
        whole = QuantisedArray("weight_scale_2", FLOAT, PER_TENSOR[::-1])
        storage = WeightStorage((codes, block, whole, _INPUT), decoder=PackedFloats(codes, block, whole))
    else:
        raise UnsupportedError(f"ModelOpt's {kind or 'quantisation without quant_algo'} is not known")
    listed = match_wildcards(find_module_list(config, "ignore", "exclude_modules") or ())
    return QuantisationScheme(lambda _names: storage, listed)


MODELOPT: Final = QuantisationMethod(("modelopt", "modelopt_fp8", "modelopt_fp4"), _parse_scheme)
