"""Describes Quark (AMD): fp8, int8 and OCP's microscaling formats, with other settings for some modules.

Layout: vLLM's readers (model_executor/layers/quantization/quark/quark.py, `_find_matched_config`, and quark/schemes).
"""

from __future__ import annotations

import fnmatch
import re
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.models.quantization.fp8 import parse_block_size
from shardctl.models.quantization.module_list import (
    build_list_extension,
    find_module_list,
    match_exact_names,
    match_wildcards,
)
from shardctl.models.quantization.storage import (
    FLOAT,
    FP8,
    MATRIX,
    PAIRS,
    PER_ROW,
    PER_TENSOR,
    SCALE,
    Form,
    PackedFloats,
    QuantizationMethod,
    QuantizationScheme,
    QuantizedArray,
    ScaledFloats,
    WeightStorage,
    build_block_form,
)
from shardctl.models.tables.config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.models.quantization.storage import Names

_EXPONENT_SCALE_DTYPES: Final = ("U8", "F8_E8M0")
_ZERO_POINT_DTYPES: Final = ("I8", "I32", *FLOAT)
_ACTIVATION_QUANTIZATION_ARRAYS: Final = tuple(
    QuantizedArray(f"{side}_{what}", kinds, PER_TENSOR, optional=True)
    for side in ("input", "output")
    for what, kinds in (("scale", FLOAT), ("zero_point", _ZERO_POINT_DTYPES))
)
"""Static scales of activations, and those of the cache, which Quark has as outputs of k_proj and v_proj."""
_DEFAULT_GROUP_SIZE: Final = 32
"""Inputs that share an exponent (OCP Microscaling Formats 1.0)."""


def _parse_scheme(config: ModelConfig) -> QuantizationScheme:
    export = config.values.get("export")
    if isinstance(export, dict) and export.get("pack_method", "reorder") not in ("reorder", "order"):
        raise UnsupportedError(f"Quark's pack_method {export['pack_method']!r} is not known")
    layers = config.values.get("layer_quant_config") or {}
    if not isinstance(layers, dict):
        raise SourceError(f"{config.file} has layer_quant_config = {layers!r:.200} where a table is expected")
    rules = [(re.compile(fnmatch.translate(name)), _build_storage(said, config)) for name, said in layers.items()]
    kinds = config.values.get("layer_type_quant_config")
    linear = next((kinds[n] for n in ("nn.Linear", "Linear") if n in kinds), None) if isinstance(kinds, dict) else None
    usual = _build_storage(linear or config.values.get("global_quant_config"), config)
    listed = find_module_list(config, "exclude") or ()
    excluded = match_exact_names([entry for entry in listed if entry.startswith("re:")])
    left = match_wildcards([entry for entry in listed if not entry.startswith("re:")])

    def find(names: Names) -> WeightStorage | None:
        if excluded(names) or left(names):
            return None
        return next((s for e, s in rules if any(e.match(name) for name in names)), usual)

    some = usual or next((storage for _, storage in rules if storage is not None), None)
    if some is None:
        raise UnsupportedError(f"{config.file} says Quark, but names no quantized weights")
    return QuantizationScheme(lambda names: find(names) or some, lambda names: find(names) is None, heads=bool(listed))


def _build_storage(said: object, config: ModelConfig) -> WeightStorage | None:
    """Build the arrays that settings mean; None if they leave weights as they are."""
    weights = said.get("weight") if isinstance(said, dict) else None
    if isinstance(weights, list) and len(weights) == 1:
        weights = weights[0]
    if weights is None:
        return None
    if not isinstance(weights, dict):
        raise UnsupportedError("Quark's weights of several number formats are not known")
    settings = ModelConfig(weights, config.file)
    kind, scheme = settings.text("dtype", ""), settings.text("qscheme", "")
    group = settings.size("group_size", _DEFAULT_GROUP_SIZE) if scheme == "per_group" else 0
    exponents = scheme == "per_group" and settings.text("scale_format", "e8m0") == "e8m0"
    if kind == "fp4" and exponents:
        codes = QuantizedArray("weight", ("U8",), (PAIRS,))
        scale = QuantizedArray("weight_scale", _EXPONENT_SCALE_DTYPES, (build_block_form(1, group),))
        return WeightStorage((codes, scale, *_ACTIVATION_QUANTIZATION_ARRAYS), decoder=PackedFloats(codes, scale))
    if kind == "fp8_e4m3" and (exponents or scheme in _SCALE_SHAPES_BY_SCHEME or scheme == "per_block"):
        codes = QuantizedArray("weight", FP8, (MATRIX,))
        scale = QuantizedArray(
            "weight_scale", _EXPONENT_SCALE_DTYPES if exponents else SCALE, _list_scale_forms(settings)
        )
        return WeightStorage((codes, scale, *_ACTIVATION_QUANTIZATION_ARRAYS), decoder=ScaledFloats(codes, scale))
    if kind == "int8" and scheme in _SCALE_SHAPES_BY_SCHEME:
        codes = QuantizedArray("weight", ("I8",), (MATRIX,))
        zeros = QuantizedArray("weight_zero_point", _ZERO_POINT_DTYPES, _SCALE_SHAPES_BY_SCHEME[scheme], optional=True)
        return WeightStorage(
            (
                codes,
                QuantizedArray("weight_scale", FLOAT, _SCALE_SHAPES_BY_SCHEME[scheme]),
                zeros,
                *_ACTIVATION_QUANTIZATION_ARRAYS,
            )
        )
    raise UnsupportedError(f"Quark's {kind or 'weights without dtype'} {scheme.replace('_', ' ')} is not known")


_SCALE_SHAPES_BY_SCHEME: Final[Mapping[str, tuple[Form, ...]]] = {
    "per_tensor": PER_TENSOR[::-1],
    "per_channel": PER_ROW[::-1],
}


def _list_scale_forms(settings: ModelConfig) -> tuple[Form, ...]:
    scheme = settings.text("qscheme", "")
    if scheme in _SCALE_SHAPES_BY_SCHEME:
        return _SCALE_SHAPES_BY_SCHEME[scheme]
    if scheme == "per_group":
        return (build_block_form(1, settings.size("group_size", _DEFAULT_GROUP_SIZE)),)
    block = parse_block_size(settings, "block_size")
    if block is None:
        raise SourceError(f"{settings.file} has weights per_block, and no block_size")
    return (build_block_form(*block),)


QUARK: Final = QuantizationMethod(("quark",), _parse_scheme, build_list_extension("exclude"))
