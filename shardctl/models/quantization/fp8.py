"""Describes fp8 with a scale per tensor, per row, or per block of rows and columns.

DeepSeek-V3 and Qwen3 have blocks of 128 x 128 with `weight_scale_inv` (transformers,
integrations/finegrained_fp8.py, `FP8Linear`). In DeepSeek-V4 it is `scale`, an exponent alone, and routed experts are
fp4, two codes in a byte, with such a scale for each 32 of a row (vLLM, models/deepseek_v4/nvidia/model.py).
transformers 5.24 calls it `mxfp8` if blocks are 1 x 32 and scales are exponents in bytes (quantizers/auto.py). vLLM's
own `fp8` has one `weight_scale` a tensor (vllm/model_executor/layers/quantization/fp8.py); FBGEMM has one a row
(integrations/fbgemm_fp8.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.models.quantization.modelopt import build_modelopt_storage
from shardctl.models.quantization.module_list import build_list_extension, find_module_list, match_name_parts
from shardctl.models.quantization.storage import (
    FP8,
    MATRIX,
    PAIRS,
    PER_ROW,
    PER_TENSOR,
    SCALE,
    PackedFloats,
    QuantizationMethod,
    QuantizationScheme,
    QuantizedArray,
    ScaledFloats,
    WeightStorage,
    build_block_form,
)

if TYPE_CHECKING:
    from shardctl.models.quantization.storage import Names
    from shardctl.models.tables.config import ModelConfig

_FP8_WEIGHT_ARRAY: Final = QuantizedArray("weight", FP8, (MATRIX,))
_INPUT_SCALE_ARRAY: Final = QuantizedArray("input_scale activation_scale", SCALE, PER_TENSOR, optional=True)
_SCALE_DTYPES: Final = ("F8_E8M0", *SCALE)
_FP4_CODES: Final = QuantizedArray("weight", ("I8", "U8"), (PAIRS,))
_FP4_SCALE: Final = QuantizedArray("scale weight_scale", _SCALE_DTYPES, (build_block_form(1, 32),))
_FP4_WEIGHT_STORAGE: Final = WeightStorage((_FP4_CODES, _FP4_SCALE), decoder=PackedFloats(_FP4_CODES, _FP4_SCALE))
_MTP_NAME_PREFIX: Final = "mtp."
"""How the names of layers begin that predict further tokens, which ModelOpt leaves as they are."""
_BLOCK_DIMS: Final = 2


def _parse_scheme(config: ModelConfig) -> QuantizationScheme:
    experts = config.text("expert_dtype", "")
    if experts not in ("", "fp8", "fp4"):
        raise UnsupportedError(f"the experts of this fp8 checkpoint are {experts}, which is not known")
    listed = find_module_list(config, "modules_to_not_convert", "ignored_layers")
    block = parse_block_size(config, "weight_block_size")
    if block is None:
        scale = QuantizedArray("weight_scale weight_scale_inv", SCALE, (*PER_TENSOR, *PER_ROW))
    else:
        scale = QuantizedArray(
            "scale weight_scale_inv weight_scale" if experts else "weight_scale_inv weight_scale scale",
            _SCALE_DTYPES if experts else SCALE,
            (build_block_form(*block),),
        )
    storage = WeightStorage(
        (_FP8_WEIGHT_ARRAY, scale, _INPUT_SCALE_ARRAY), decoder=ScaledFloats(_FP8_WEIGHT_ARRAY, scale)
    )
    routed = _FP4_WEIGHT_STORAGE if experts == "fp4" else storage
    again = _build_requantized_storage(config)

    def choose_storage(names: Names) -> WeightStorage:
        if ".experts." not in names[0]:
            return storage
        return routed if again is None or any(name.startswith(_MTP_NAME_PREFIX) for name in names) else again

    return QuantizationScheme(
        choose_storage,
        match_name_parts(listed or ()),
        heads=listed is not None,
    )


def _build_requantized_storage(config: ModelConfig) -> WeightStorage | None:
    """Build the arrays of routed experts that ModelOpt quantized anew, and nothing else with them; None if it did not.

    vLLM reads them so (models/deepseek_v4/quant_config.py, `moe_quant_algo`).
    """
    algorithm = config.text("moe_quant_algo", "")
    return build_modelopt_storage(replace(config, values={"quant_algo": algorithm})) if algorithm else None


def parse_block_size(config: ModelConfig, key: str) -> tuple[int, int] | None:
    """Parse rows and columns of a block; raises SourceError if `key` says anything but two sizes."""
    value = config.values.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != _BLOCK_DIMS or not all(_is_size(size) for size in value):
        raise SourceError(f"config.json has {key} = {value!r} where two positive whole numbers are expected")
    return value[0], value[1]


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _parse_fbgemm_scheme(config: ModelConfig) -> QuantizationScheme:
    listed = find_module_list(config, "modules_to_not_convert")
    bound = QuantizedArray("input_scale_ub", SCALE, PER_TENSOR, optional=True)
    scale = QuantizedArray("weight_scale", SCALE, PER_ROW)
    storage = WeightStorage((_FP8_WEIGHT_ARRAY, scale, bound), decoder=ScaledFloats(_FP8_WEIGHT_ARRAY, scale))
    return QuantizationScheme(lambda _names: storage, match_name_parts(listed or ()), heads=listed is not None)


FINE_GRAINED: Final = QuantizationMethod(
    ("fp8", "mxfp8"), _parse_scheme, build_list_extension("modules_to_not_convert", "ignored_layers")
)
FBGEMM: Final = QuantizationMethod(
    ("fbgemm_fp8",), _parse_fbgemm_scheme, build_list_extension("modules_to_not_convert")
)
