"""ModelOpt (NVIDIA): fp8 with a scale a tensor, and NVFP4 with blocks of 16 inputs.

Layout: vLLM's readers (vllm/model_executor/layers/quantization/modelopt.py); `config.json` has what
`hf_quant_config.json` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.errors import UnsupportedError
from shardctl.models.quantisation.module_list import wildcards, words
from shardctl.models.quantisation.storage import (
    FLOAT,
    FP8,
    IN,
    OUT,
    PER_ROW,
    PER_TENSOR,
    SCALE,
    Along,
    Array,
    Method,
    Scheme,
    Storage,
)

if TYPE_CHECKING:
    from shardctl.models.config import Config

_INPUT: Final = Array("input_scale", FLOAT, PER_TENSOR, optional=True)


def _read(config: Config) -> Scheme:
    kind = config.text("quant_algo", "").upper()
    if kind == "FP8":
        codes = Array("weight", FP8, ((Along(OUT), Along(IN)),))
        storage = Storage((codes, Array("weight_scale", FLOAT, (*PER_TENSOR, *PER_ROW)), _INPUT))
    elif kind == "NVFP4":
        codes = Array("weight", ("U8",), ((Along(OUT), Along(IN, 2)),))
        block = Array("weight_scale", SCALE[::-1], ((Along(OUT), Along(IN, config.size("group_size", 16))),))
        storage = Storage((codes, block, Array("weight_scale_2", FLOAT, PER_TENSOR[::-1]), _INPUT))
    else:
        raise UnsupportedError(f"ModelOpt's {kind or 'quantisation without quant_algo'} is not known")
    listed = wildcards(words(config, "ignore", "exclude_modules") or ())
    return Scheme(lambda _names: storage, listed)


MODELOPT: Final = Method(("modelopt", "modelopt_fp8", "modelopt_fp4"), _read)
