"""Describes bitsandbytes: 4-bit codes in one flat array, or 8-bit rows in an order that only the values tell.

Layout: `Params4bit` and `Int8Params` in bitsandbytes (bitsandbytes/nn/modules.py, functional.py `QuantState.as_dict`),
as transformers writes them (quantizers/quantizer_bnb_4bit.py, integrations/bitsandbytes.py). Blocks run on from row to
row, their size is a value in `quant_state`, and so are the original shape and dtype: none of it is true of a part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import UnsupportedError
from shardctl.models.quantization.module_list import build_list_extension, find_module_list, match_name_parts
from shardctl.models.quantization.storage import (
    FLOAT,
    MATRIX,
    OUT,
    AlongDim,
    ByteRows,
    OpenDim,
    PackedIntegers,
    QuantizationMethod,
    QuantizationScheme,
    QuantizedArray,
    WeightStorage,
)

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig

_UNSPLITTABLE_ARRAY_LABEL: Final = "flat array of bitsandbytes, which only pp or ep can place"
_STORAGE_DTYPES: Final = {"uint8": "U8", "int8": "I8", "float16": "F16", "bfloat16": "BF16", "float32": "F32"}
"""`bnb_4bit_quant_storage`: whatever codes are stored as."""
_BITS_PER_WEIGHT: Final = 4
"""Bits of one code."""
_SCALE_BLOCK_ELEMENTS: Final = 64
"""Elements that share a scale (transformers, quantizers/quantizer_bnb_4bit.py, leaves it to bitsandbytes)."""
_SCALES_PER_NESTED_BLOCK: Final = 256
"""Scales that share a scale of their own, and codes that a byte may be."""
_QUANT_STATE_BYTES: Final = {False: 80, True: 160}
"""Bytes of the JSON text that `quant_state` is, more or less; by whether scales have scales of their own."""
_INT8_ROW_DECODER: Final = ByteRows(
    QuantizedArray("weight", ("I8",), (MATRIX,)),
    QuantizedArray("SCB", FLOAT, ((AlongDim(OUT),),)),
    QuantizedArray("weight_format", ("U8",), ((), (1,)), optional=True),
)
_INT8_WEIGHT_STORAGE: Final = WeightStorage(
    (_INT8_ROW_DECODER.codes, _INT8_ROW_DECODER.peak, _INT8_ROW_DECODER.arrangement),
    whole="matrix in an order that bitsandbytes keeps as a value, which only pp or ep can place",
    decoder=_INT8_ROW_DECODER,
)


def _build_four_bit_storage(kind: str, word: str, *, nested: bool) -> WeightStorage:
    scales = ("U8", *FLOAT) if nested else (*FLOAT, "U8")
    words = (word, *(other for other in _STORAGE_DTYPES.values() if other != word))
    decoder = PackedIntegers(
        codes=QuantizedArray("weight", words, ((OpenDim(block=BY_NAME[word].bits // _BITS_PER_WEIGHT), 1),)),
        scale=QuantizedArray("weight.absmax", scales, ((OpenDim(block=_SCALE_BLOCK_ELEMENTS),),)),
        table=QuantizedArray("weight.quant_map", FLOAT, ((OpenDim(1 << _BITS_PER_WEIGHT),),)),
        settings=QuantizedArray(
            f"weight.quant_state.bitsandbytes__{kind}", ("U8",), ((OpenDim(_QUANT_STATE_BYTES[nested]),),)
        ),
        second=QuantizedArray(
            "weight.nested_absmax",
            FLOAT,
            ((OpenDim(block=_SCALE_BLOCK_ELEMENTS * _SCALES_PER_NESTED_BLOCK),),),
            optional=not nested,
        ),
        second_table=QuantizedArray(
            "weight.nested_quant_map", FLOAT, ((OpenDim(_SCALES_PER_NESTED_BLOCK),),), optional=not nested
        ),
    )
    arrays = (decoder.codes, decoder.scale, decoder.table, decoder.second, decoder.second_table, decoder.settings)
    return WeightStorage(arrays, whole=_UNSPLITTABLE_ARRAY_LABEL, decoder=decoder)


def _parse_scheme(config: ModelConfig) -> QuantizationScheme:
    listed = find_module_list(config, "llm_int8_skip_modules")
    if config.read_flag("load_in_4bit", default=False) or config.read_flag("_load_in_4bit", default=False):
        kind = config.text("bnb_4bit_quant_type", "fp4")
        if kind not in ("nf4", "fp4"):
            raise UnsupportedError(f"bitsandbytes knows no 4-bit type {kind!r}; it has nf4 and fp4")
        word = config.text("bnb_4bit_quant_storage", "uint8").removeprefix("torch.")
        if word not in _STORAGE_DTYPES:
            raise UnsupportedError(
                f"bitsandbytes stores no 4-bit codes as {word!r}; it has {', '.join(_STORAGE_DTYPES)}"
            )
        storage = _build_four_bit_storage(
            kind, _STORAGE_DTYPES[word], nested=config.read_flag("bnb_4bit_use_double_quant", default=False)
        )
    elif config.read_flag("load_in_8bit", default=False) or config.read_flag("_load_in_8bit", default=False):
        storage = _INT8_WEIGHT_STORAGE
    else:
        raise UnsupportedError("config.json says bitsandbytes, but neither load_in_4bit nor load_in_8bit")
    return QuantizationScheme(lambda _names: storage, match_name_parts(listed or ()), heads=listed is not None)


BITSANDBYTES: Final = QuantizationMethod(
    ("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit"),
    _parse_scheme,
    build_list_extension("llm_int8_skip_modules"),
)
