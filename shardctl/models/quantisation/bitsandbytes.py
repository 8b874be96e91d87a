"""bitsandbytes: 4-bit codes in one flat array, or 8-bit rows in an order that only the values tell.

Layout: `Params4bit` and `Int8Params` in bitsandbytes (bitsandbytes/nn/modules.py, functional.py `QuantState.as_dict`),
as transformers writes them (quantizers/quantizer_bnb_4bit.py, integrations/bitsandbytes.py). Blocks run on from row to
row, their size is a value in `quant_state`, and so are the original shape and dtype: none of it is true of a part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.errors import UnsupportedError
from shardctl.models.quantisation.module_list import parts, words
from shardctl.models.quantisation.storage import FLOAT, IN, OUT, Along, Array, Method, Scheme, Storage

if TYPE_CHECKING:
    from shardctl.models.config import Config

_FLAT: Final = "flat array of bitsandbytes, which only pp or ep can place"
_WORDS: Final = ("U8", "I8", "F16", "BF16", "F32")
"""`bnb_4bit_quant_storage`: whatever codes are stored as."""
_EIGHT: Final = Storage(
    (
        Array("weight", ("I8",), ((Along(OUT), Along(IN)),)),
        Array("SCB", FLOAT, ((Along(OUT),),)),
        Array("weight_format", ("U8",), ((), (1,)), optional=True),
    ),
    whole="matrix in an order that bitsandbytes keeps as a value, which only pp or ep can place",
)


def _four(kind: str, nested: bool) -> Storage:  # noqa: FBT001 - private, and named at the call
    second = (
        Array("weight.nested_absmax", FLOAT, ((None,),), optional=not nested),
        Array("weight.nested_quant_map", FLOAT, ((None,),), optional=not nested),
    )
    return Storage(
        (
            Array("weight", _WORDS, ((None, 1),)),
            Array("weight.absmax", ("U8", *FLOAT) if nested else (*FLOAT, "U8"), ((None,),)),
            Array("weight.quant_map", FLOAT, ((None,),)),
            *second,
            Array(f"weight.quant_state.bitsandbytes__{kind}", ("U8",), ((None,),)),
        ),
        whole=_FLAT,
    )


def _read(config: Config) -> Scheme:
    listed = words(config, "llm_int8_skip_modules")
    if config.switch("load_in_4bit", default=False) or config.switch("_load_in_4bit", default=False):
        kind = config.text("bnb_4bit_quant_type", "fp4")
        if kind not in ("nf4", "fp4"):
            raise UnsupportedError(f"bitsandbytes knows no 4-bit type {kind!r}; it has nf4 and fp4")
        storage = _four(kind, config.switch("bnb_4bit_use_double_quant", default=False))
    elif config.switch("load_in_8bit", default=False) or config.switch("_load_in_8bit", default=False):
        storage = _EIGHT
    else:
        raise UnsupportedError("config.json says bitsandbytes, but neither load_in_4bit nor load_in_8bit")
    return Scheme(lambda _names: storage, parts(listed or ()), heads=listed is not None)


BITSANDBYTES: Final = Method(("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit"), _read)
