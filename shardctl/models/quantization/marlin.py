"""Describes weights of four bits in Marlin's order, as AutoGPTQ and AutoAWQ saved them: blocks of 16 inputs.

Layout: `QuantLinear` of AutoGPTQ (auto_gptq/nn_modules/qlinear/qlinear_marlin.py) and `WQLinear_Marlin` of AutoAWQ
(awq/modules/linear/marlin.py). Both have no zero points, and no groups in another order.
"""

from __future__ import annotations

from typing import Final

from shardctl.models.quantization.storage import (
    FLOAT,
    IN,
    OUT,
    TILE_INPUTS,
    TILE_OUTPUTS,
    AlongDim,
    KernelTiles,
    QuantizedArray,
    WeightStorage,
)

BITS: Final = 4
_WORDS_PER_TILE: Final = TILE_INPUTS * TILE_OUTPUTS * BITS // 32


def build_marlin_storage(codes: str, scales: str, group: int) -> WeightStorage:
    """Build the arrays of a weight of which `group` inputs share a scale, called `codes` and `scales`; -1 for all."""
    block = QuantizedArray(
        codes, ("I32",), ((AlongDim(IN, TILE_INPUTS), AlongDim(OUT, TILE_OUTPUTS, _WORDS_PER_TILE)),)
    )
    rows = AlongDim(IN, group) if group > 0 else 1
    scale = QuantizedArray(scales, FLOAT, ((rows, AlongDim(OUT, TILE_OUTPUTS, TILE_OUTPUTS)),), plain=True)
    bias = QuantizedArray("bias", FLOAT, ((AlongDim(OUT),),), optional=True)
    return WeightStorage((block, scale, bias), decoder=KernelTiles(block, scale, group))
