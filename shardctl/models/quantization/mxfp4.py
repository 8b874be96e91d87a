"""Describes gpt-oss's experts in MXFP4: stacks of blocks of 32 inputs, which the family's own table lists.

Layout: transformers, integrations/mxfp4.py. A stack of values is `[expert, in, out]`, and its blocks are
`[expert, out, in / 32, 16]`, two codes a byte, with an exponent for each block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.quantization.encoding import WeightArray, WeightEncoding
from shardctl.models.quantization.storage import IN, OUT, AlongDim, PackedFloats, QuantizationMethod, QuantizedArray

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.models.tables.model import Model

_SCALE_BLOCK_ELEMENTS: Final = 32
_PACKED_BLOCKS_ARRAY: Final = QuantizedArray(
    "blocks", ("U8",), ((AlongDim(OUT), AlongDim(IN, _SCALE_BLOCK_ELEMENTS), _SCALE_BLOCK_ELEMENTS // 2),)
)
_BLOCK_SCALES_ARRAY: Final = QuantizedArray("scales", ("U8",), ((AlongDim(OUT), AlongDim(IN, _SCALE_BLOCK_ELEMENTS)),))
_WEIGHT_DECODER: Final = PackedFloats(_PACKED_BLOCKS_ARRAY, _BLOCK_SCALES_ARRAY)


def list_block_encodings(model: Model) -> Mapping[str, WeightEncoding]:
    """List how each stack of experts is stored, by the name that its values have without quantization."""
    found = {}
    for name in model.plain.tensors if model.plain is not None else ():
        module, _, own = name.rpartition(".")
        arrays = []
        for array in (_PACKED_BLOCKS_ARRAY, _BLOCK_SCALES_ARRAY):
            tensor = model.tensors.get(f"{name}_{array.name}")
            if tensor is not None:
                suffix, form = f"{own}_{array.name}", array.forms[0]
                cuts = tensor.spec.cuts
                arrays.append(
                    WeightArray(suffix, array.name, form, tensor.shape, tensor.dtype, cuts, tensor.row, False, ())
                )
        if arrays:
            found[name] = WeightEncoding(module, _WEIGHT_DECODER, tuple(arrays), transposed=True)
    return found


MXFP4: Final = QuantizationMethod(("mxfp4",), lambda _config: None)
