"""fp8 with a scale per tensor, per row, or per block of rows and columns.

DeepSeek-V3 and Qwen3 have blocks of 128 x 128 with `weight_scale_inv` (transformers,
integrations/finegrained_fp8.py, `FP8Linear`); vLLM's own `fp8` has one `weight_scale` a tensor
(vllm/model_executor/layers/quantization/fp8.py); FBGEMM has one a row (integrations/fbgemm_fp8.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.errors import SourceError, UnsupportedError
from shardctl.models.quantisation.module_list import parts, words
from shardctl.models.quantisation.storage import (
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

_CODES: Final = Array("weight", FP8, ((Along(OUT), Along(IN)),))
_INPUT: Final = Array("input_scale activation_scale", SCALE, PER_TENSOR, optional=True)
_BLOCK_DIMS: Final = 2


def _read(config: Config) -> Scheme:
    if config.text("expert_dtype", "fp8") != "fp8":
        raise UnsupportedError("the experts of this fp8 checkpoint are packed as fp4, which is not known yet")
    listed = words(config, "modules_to_not_convert", "ignored_layers")
    block = block_size(config, "weight_block_size")
    if block is None:
        scale = Array("weight_scale weight_scale_inv", SCALE, (*PER_TENSOR, *PER_ROW))
    else:
        scale = Array("weight_scale_inv weight_scale", SCALE, ((Along(OUT, block[0]), Along(IN, block[1])),))
    storage = Storage((_CODES, scale, _INPUT))
    return Scheme(lambda _names: storage, parts(listed or ()), heads=listed is not None)


def block_size(config: Config, key: str) -> tuple[int, int] | None:
    """Rows and columns of a block; raises SourceError if `key` says anything but two sizes."""
    value = config.values.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != _BLOCK_DIMS or not all(_is_size(size) for size in value):
        raise SourceError(f"config.json has {key} = {value!r} where two positive whole numbers are expected")
    return value[0], value[1]


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _read_fbgemm(config: Config) -> Scheme:
    listed = words(config, "modules_to_not_convert")
    bound = Array("input_scale_ub", SCALE, PER_TENSOR, optional=True)
    storage = Storage((_CODES, Array("weight_scale", SCALE, PER_ROW), bound))
    return Scheme(lambda _names: storage, parts(listed or ()), heads=listed is not None)


FINE_GRAINED: Final = Method(("fp8",), _read)
FBGEMM: Final = Method(("fbgemm_fp8",), _read_fbgemm)
