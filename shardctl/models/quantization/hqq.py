"""Describes HQQ: groups of the flattened weight as rows or columns of a matrix, whose halves share bytes.

Layout: hqq 0.2.8 (core/quantize.py, `Quantizer.quantize` and `HQQLinear.state_dict`; core/bitpack.py), as transformers
4.46 to 4.57 wrote it. Group sizes, axes and shapes are values beside the codes: none of it is true of a part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.models.quantization.module_list import build_list_extension, find_module_list, match_name_parts
from shardctl.models.quantization.storage import (
    FLOAT,
    OUT,
    AlongDim,
    OpenDim,
    QuantizationMethod,
    QuantizationScheme,
    QuantizedArray,
    StackedIntegers,
    WeightStorage,
)
from shardctl.models.tables.config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.models.quantization.storage import Form, Names

_UNSPLITTABLE_ARRAY_LABEL: Final = "array of HQQ's groups, which only pp or ep can place"
_WEIGHT_PARAMETERS_KEY: Final = "weight_quant_params"
_PACKING_BY_BITS: Final[Mapping[int, tuple[str, int]]] = {
    1: ("U8", 8),
    2: ("U8", 4),
    3: ("I32", 10),
    4: ("U8", 2),
    8: ("U8", 1),
}
"""By bits of a code: the type of what codes share, and how many do."""
_NUMERIC_SETTING_NAMES: Final = ("nbits", "group_size", "axis", "view_as_float", "quant_scale", "quant_zero")
_OPTIONAL_SETTING_NAMES: Final = (
    "offload_meta",
    "encoded_state_dict",
    "stores_quant_config",
    "channel_wise",
    "optimize",
    "round_zero",
)
_SETTING_ARRAYS: Final = (
    QuantizedArray("shape", ("I64",), ((2,),)),
    *(QuantizedArray(name, ("I32", "U8", "F32"), ((), (1,))) for name in _NUMERIC_SETTING_NAMES),
    *(QuantizedArray(name, ("U8", "I32"), ((), (1,)), optional=True) for name in _OPTIONAL_SETTING_NAMES),
    QuantizedArray("packing", ("U8",), ((OpenDim(7),),)),
    QuantizedArray("compute_dtype", ("U8",), ((OpenDim(14),),)),
    QuantizedArray("unpack_view_dtype", ("U8",), ((OpenDim(11),),), optional=True),
)


def _build_storage(said: Mapping[str, Any], file: str) -> WeightStorage:
    """Build the arrays of a weight with HQQ's own settings (`BaseQuantizeConfig`)."""
    parameters = said.get(_WEIGHT_PARAMETERS_KEY)
    if not isinstance(parameters, dict):
        raise SourceError(f"{file} has a quant_config without {_WEIGHT_PARAMETERS_KEY}")
    config = ModelConfig(parameters, file)
    bits, group = config.values.get("nbits", 4), config.size("group_size", 64)
    if not isinstance(bits, int) or bits not in _PACKING_BY_BITS:
        raise UnsupportedError(
            f"HQQ's weights of {bits!r:.20} bits are not known; shardctl knows {list(_PACKING_BY_BITS)}"
        )
    kind, together = _PACKING_BY_BITS[bits]
    by_row = config.count("axis", 1) == 1
    grouped, alone = OpenDim(block=group), OpenDim(1)
    codes: Form = (
        (OpenDim(block=group * together), OpenDim(group)) if by_row else (OpenDim(-(-group // together)), grouped)
    )
    factors: Form = (grouped, alone) if by_row else (alone, grouped)
    decoder = StackedIntegers(
        codes=QuantizedArray("W_q", (kind, "U8", "I32"), (codes,)),
        scale=QuantizedArray("scale", FLOAT, (factors,), plain=True),
        zero=QuantizedArray("zero", FLOAT, (factors,), plain=True),
        settings=_SETTING_ARRAYS,
    )
    bias = QuantizedArray("bias", FLOAT, ((AlongDim(OUT),),), optional=True)
    return WeightStorage(
        (decoder.codes, decoder.scale, decoder.zero, *_SETTING_ARRAYS, bias),
        whole=_UNSPLITTABLE_ARRAY_LABEL,
        decoder=decoder,
    )


def _parse_scheme(config: ModelConfig) -> QuantizationScheme:
    said = config.values.get("quant_config")
    if not isinstance(said, dict):
        raise SourceError(f"{config.file} has quant_config = {said!r:.200} where HQQ's settings are expected")
    tags = said if _WEIGHT_PARAMETERS_KEY not in said else {"": said}
    storages: dict[str, WeightStorage] = {}
    for tag, settings in tags.items():
        if settings is not None:
            storages[tag] = _build_storage(settings if isinstance(settings, dict) else {}, config.file)
    if not storages:
        raise UnsupportedError(f"{config.file} says HQQ, but that no weight is quantized")
    skipped = match_name_parts(find_module_list(config, "skip_modules") or ())

    def find(names: Names) -> WeightStorage | None:
        if "" in storages:
            return storages[""]
        return next((storages[tag] for tag in storages if any(name.endswith(f".{tag}") for name in names)), None)

    usual = next(iter(storages.values()))
    return QuantizationScheme(lambda names: find(names) or usual, lambda names: skipped(names) or find(names) is None)


HQQ: Final = QuantizationMethod(("hqq",), _parse_scheme, build_list_extension("skip_modules"))
