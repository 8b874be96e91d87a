"""Describes torchao's tensors, as transformers writes them into safetensors: `_weight_qdata` and what belongs to it.

Layout: torchao 0.18 (prototype/safetensors/safetensors_support.py, `flatten_tensor_state_dict`), the classes in
quantization/quantize_/workflows, and transformers (quantizers/quantizer_torchao.py). How a weight is computed back:
`dequantize` of those classes, in the type of the model. Four-bit integers have no such function; theirs follows from
their writer (FBGEMM and MSLK, `int4_row_quantize_zp` and `pack_int4`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.models.quantization.expressions import compile_expression
from shardctl.models.quantization.module_list import build_list_extension, find_module_list, match_name_parts
from shardctl.models.quantization.storage import (
    FLOAT,
    FP8,
    IN,
    MATRIX,
    OUT,
    PAIRS,
    AlongDim,
    PackedFloats,
    QuantizationMethod,
    QuantizationScheme,
    QuantizedArray,
    ScaledFloats,
    ScaledIntegers,
    WeightStorage,
    build_block_form,
)
from shardctl.models.tables.config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from shardctl.models.quantization.storage import Form, Names

_METHOD_NAME: Final = "torchao"
_TENSOR_NAMES_KEY: Final = "tensor_names"
"""The key of a file's metadata that lists the tensors whose classes the other keys name."""
_CLASS_JSON_PREFIX: Final = '{"_type":'
"""How what such a key says begins."""
_PLAIN_TENSOR_JSON: Final = '{"_type": "Tensor"}'
"""What it says of a tensor that is not quantized."""
_REGEX_PREFIX: Final = "re:"
_DEFAULT_MODULE_KEY: Final = "_default"
_NVFP4_GROUP: Final = 16
_MX_GROUP: Final = 32
_MX_CODES: Final = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float4_e2m1fn_x2": "U8"}
_UNSPLITTABLE_SCALES_LABEL: Final = "row of scales, because those of 128 outputs are in the order of a kernel"
_PER_ROW_SHAPE: Final[Form] = (AlongDim(OUT), 1)
_ACTIVATION_PRE_SCALE_ARRAY: Final = QuantizedArray(
    "_weight_act_pre_scale", FLOAT, ((AlongDim(IN),), (1, AlongDim(IN))), optional=True
)
"""What inputs are multiplied with."""
_ACTIVATION_QUANTIZATION_ARRAYS: Final = (
    QuantizedArray("_weight_act_quant_scale", FLOAT, ((1, 1), (1,), ()), optional=True),
    QuantizedArray("_weight_act_quant_zero_point", ("I8", *FLOAT), ((1, 1), (1,), ()), optional=True),
    _ACTIVATION_PRE_SCALE_ARRAY,
)


def _build_byte_storage(config: ModelConfig, dtype: str) -> WeightStorage:
    form = _parse_granularity(config, "granularity", _PER_ROW_SHAPE)
    return _build_integer_storage(form, dtype, optional_zeros=True)


def _build_integer_storage(form: Form, dtype: str, *, optional_zeros: bool) -> WeightStorage:
    codes = QuantizedArray("_weight_qdata", ("I8",), (MATRIX,))
    scale = QuantizedArray("_weight_scale", FLOAT, (form,))
    zero = QuantizedArray("_weight_zero_point", ("I8", *FLOAT), (form,), optional=optional_zeros)
    decoder = ScaledIntegers(codes, scale, zero, rounded=dtype, smoothing=_ACTIVATION_PRE_SCALE_ARRAY)
    return WeightStorage((codes, scale, zero, *_ACTIVATION_QUANTIZATION_ARRAYS), decoder=decoder)


def _build_float_storage(config: ModelConfig, dtype: str) -> WeightStorage:
    packing = config.text("packing_format", "PLAIN")
    if packing != "PLAIN":
        raise _refuse_packing(packing)
    dynamic = "activation_dtype" in config.values
    codes = QuantizedArray("_weight_qdata", FP8, (MATRIX,))
    scale = QuantizedArray(
        "_weight_scale", FLOAT, (_parse_granularity(config, "granularity", (1, 1) if dynamic else _PER_ROW_SHAPE), ())
    )
    decoder = ScaledFloats(codes, scale, rounded=dtype)
    return WeightStorage((codes, scale, *_ACTIVATION_QUANTIZATION_ARRAYS[:2]), decoder=decoder)


def _build_small_storage(config: ModelConfig, dtype: str) -> WeightStorage:
    """Build the arrays of integers of up to eight bits, each in a byte."""
    packing = config.text("intx_packing_format", "UNPACKED_TO_INT8").upper()
    if packing != "UNPACKED_TO_INT8":
        raise _refuse_packing(packing)
    key = "weight_granularity" if "weight_granularity" in config.values else "granularity"
    return _build_integer_storage(_parse_granularity(config, key, _PER_ROW_SHAPE), dtype, optional_zeros=False)


def _build_pair_storage(config: ModelConfig, _dtype: str) -> WeightStorage:
    """Build the arrays of four-bit integers, two to a byte, whose zero points are numbers that are added."""
    packing = config.text("int4_packing_format", "PLAIN").upper()
    if packing != "PLAIN":
        raise _refuse_packing(packing)
    form: Form = (AlongDim(IN, config.size("group_size", 128)), AlongDim(OUT))
    codes = QuantizedArray("_weight_qdata", ("I8", "U8"), (PAIRS,))
    scale = QuantizedArray("_weight_scale", FLOAT, (form,), plain=True)
    zero = QuantizedArray("_weight_zero_point", FLOAT, (form,), plain=True)
    decoder = ScaledIntegers(
        codes, scale, zero, halved=True, added=True, rounded="F32", smoothing=_ACTIVATION_PRE_SCALE_ARRAY
    )
    return WeightStorage((codes, scale, zero, _ACTIVATION_PRE_SCALE_ARRAY), decoder=decoder)


def _build_blocked_scale(dtype: str, group: int) -> QuantizedArray:
    """Build scales of `group` inputs each in the order of cuBLAS, which torchao's configs always ask for."""
    return QuantizedArray("_weight_scale", (dtype,), ((AlongDim(OUT, 128, 32), AlongDim(IN, 4 * group, 16)),))


def _build_nvfp4_storage(_config: ModelConfig, dtype: str) -> WeightStorage:
    codes, scale = QuantizedArray("_weight_qdata", ("U8",), (PAIRS,)), _build_blocked_scale("F8_E4M3", _NVFP4_GROUP)
    whole = QuantizedArray("_weight_per_tensor_scale", ("F32",), ((), (1,)), optional=True)
    inputs = QuantizedArray("_weight_act_per_tensor_scale", ("F32",), ((), (1,)), optional=True)
    decoder = PackedFloats(codes, scale, whole, rounded=dtype, blocked=_NVFP4_GROUP)
    return WeightStorage((codes, scale, whole, inputs), uncut={IN: _UNSPLITTABLE_SCALES_LABEL}, decoder=decoder)


def _build_mx_storage(config: ModelConfig, dtype: str) -> WeightStorage:
    """Build the arrays of codes of 8 or 4 bits whose scales are powers of two; both kinds are rounded alike."""
    group, kind = config.size("block_size", _MX_GROUP), config.text("weight_dtype", "float8_e4m3fn")
    if group != _MX_GROUP or kind not in _MX_CODES:
        raise UnsupportedError(f"torchao's MX weights of {kind} in blocks of {group} are not known")
    scale = _build_blocked_scale("F8_E8M0", group)
    codes = QuantizedArray("_weight_qdata", (_MX_CODES[kind],), (MATRIX if _MX_CODES[kind] in FP8 else PAIRS,))
    decoder = ScaledFloats if _MX_CODES[kind] in FP8 else PackedFloats
    return WeightStorage(
        (codes, scale),
        uncut={IN: _UNSPLITTABLE_SCALES_LABEL},
        decoder=decoder(codes, scale, rounded=dtype, blocked=group),
    )


_STORAGE_BUILDERS_BY_CONFIG: Final[Mapping[str, Callable[[ModelConfig, str], WeightStorage]]] = {
    "Int8WeightOnlyConfig": _build_byte_storage,
    "Int8DynamicActivationInt8WeightConfig": _build_byte_storage,
    "Int8StaticActivationInt8WeightConfig": _build_byte_storage,
    "Float8WeightOnlyConfig": _build_float_storage,
    "Float8DynamicActivationFloat8WeightConfig": _build_float_storage,
    "Float8StaticActivationFloat8WeightConfig": _build_float_storage,
    "IntxWeightOnlyConfig": _build_small_storage,
    "Int8DynamicActivationIntxWeightConfig": _build_small_storage,
    "Int4WeightOnlyConfig": _build_pair_storage,
    "Float8DynamicActivationInt4WeightConfig": _build_pair_storage,
    "NVFP4WeightOnlyConfig": _build_nvfp4_storage,
    "NVFP4DynamicActivationNVFP4WeightConfig": _build_nvfp4_storage,
    "MXDynamicActivationMXWeightConfig": _build_mx_storage,
}
_BY_NAME: Final = ("FqnToConfig", "ModuleFqnToConfig", "AOPerModuleConfig")


def _refuse_packing(packing: str) -> UnsupportedError:
    return UnsupportedError(
        f"torchao's weights in the packing {packing!r} are ordered for one kernel",
        hint="save the model again with torchao's packing PLAIN, or convert it as it is, on one device",
    )


def _parse_granularity(config: ModelConfig, key: str, usual: Form) -> Form:
    """Parse which elements share a scale; of two granularities, the second is that of weights."""
    value = config.values.get(key)
    if isinstance(value, list) and value:
        value = value[-1]
    if value is None:
        return usual
    kind, said = _open_object(value, config.file, key)
    if kind == "PerTensor":
        return (1, 1)
    if kind in ("PerRow", "PerAxis") and said.values.get("dim", said.values.get("axis", 0)) in (-1, 0, 1):
        return _PER_ROW_SHAPE
    if kind == "PerGroup":
        return build_block_form(1, said.size("group_size"))
    if kind == "PerBlock" and isinstance(block := said.values.get("block_size"), list) and len(block) == len(MATRIX):
        rows, columns = (ModelConfig({"block_size": size}, config.file).size("block_size") for size in block)
        return build_block_form(rows, columns)
    raise UnsupportedError(f"torchao's granularity {kind} of weights is not known")


def _open_object(value: object, file: str, key: str) -> tuple[str, ModelConfig]:
    """Return the class and the attributes of an object, as torchao writes one into JSON."""
    said = value.get("_data") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(value.get("_type"), str) or not isinstance(said, dict | str):
        raise SourceError(f"{file} has {key} = {value!r:.200} where an object of torchao is expected")
    plain = {
        name: each["_data"] if isinstance(each, dict) and isinstance(each.get("_data"), str) else each
        for name, each in (said.items() if isinstance(said, dict) else ())
    }
    return value["_type"], ModelConfig(plain, file)


def _parse_scheme(config: ModelConfig) -> QuantizationScheme:
    said = config.values.get("quant_type")
    chosen = said.get("default") if isinstance(said, dict) else None
    if chosen is None:
        raise UnsupportedError(
            f"{config.file} has quant_type = {said!r:.100}, as transformers wrote before it stored torchao's tensors "
            "in safetensors",
            hint="load the model with the transformers that wrote it, and save it with the present one",
        )
    dtype = config.text("model_dtype", "BF16")
    rules = _list_rules(chosen, config.file, dtype)
    skipped = match_name_parts(find_module_list(config, "modules_to_not_convert") or ())

    def find(names: Names) -> WeightStorage | None:
        for matches, storage in rules:
            if any(matches(name) for name in names):
                return storage
        return None

    usual = next((storage for _, storage in rules if storage is not None), None)
    if usual is None:
        raise UnsupportedError(f"{config.file} says torchao, but that no weight is quantized")
    return QuantizationScheme(
        lambda names: find(names) or usual,
        lambda names: skipped(names) or find(names) is None,
        heads=config.read_flag("include_input_output_embeddings", default=False),
    )


def _list_rules(chosen: object, file: str, dtype: str) -> list[tuple[Callable[[str], bool], WeightStorage | None]]:
    """List what each rule says of the modules that it matches, the first first; None for those left as they are."""
    kind, said = _open_object(chosen, file, "quant_type")
    if kind not in _BY_NAME:
        return [(lambda _name: True, _build_storage(chosen, file, dtype))]
    table = said.values.get("fqn_to_config") or said.values.get("module_fqn_to_config")
    if not isinstance(table, dict):
        raise SourceError(f"{file} has no table of modules in its {kind}")
    storages = {name: _build_storage(each, file, dtype) if each is not None else None for name, each in table.items()}
    exact = {
        name: storage
        for name, storage in storages.items()
        if name != _DEFAULT_MODULE_KEY and not name.startswith(_REGEX_PREFIX)
    }
    rules: list[tuple[Callable[[str], bool], WeightStorage | None]] = [
        (lambda found, name=name: found in (name, name.removesuffix(".weight")), storage)  # type: ignore[misc]
        for name, storage in exact.items()
    ]
    for name, storage in storages.items():
        if name.startswith(_REGEX_PREFIX):
            expression = compile_expression(rf"(?:{name.removeprefix(_REGEX_PREFIX)})$", file, name)
            rules.append(
                (
                    lambda found, e=expression: e.matches(found) or e.matches(f"{found}.weight"),  # type: ignore[misc]
                    storage,
                )
            )
    if _DEFAULT_MODULE_KEY in storages:
        rules.append((lambda _name: True, storages[_DEFAULT_MODULE_KEY]))
    return rules


def _build_storage(value: object, file: str, dtype: str) -> WeightStorage:
    kind, said = _open_object(value, file, "quant_type")
    if kind not in _STORAGE_BUILDERS_BY_CONFIG:
        raise UnsupportedError(
            f"torchao's {kind} is not known", hint=f"shardctl knows {', '.join(_STORAGE_BUILDERS_BY_CONFIG)}"
        )
    return _STORAGE_BUILDERS_BY_CONFIG[kind](said, dtype)


def mark_plain_tensors(metadata: Mapping[str, str], names: Collection[str]) -> Mapping[str, str]:
    """Return a file's metadata in which the tensors of these stored names are plain ones."""
    if _TENSOR_NAMES_KEY not in metadata:
        return metadata
    return {**metadata, **{name: _PLAIN_TENSOR_JSON for name in names if name in metadata}}


def drop_torchao_metadata(metadata: Mapping[str, str]) -> Mapping[str, str]:
    """Leave out of a file's metadata of which classes its tensors are."""
    if _TENSOR_NAMES_KEY not in metadata:
        return metadata
    return {
        key: value
        for key, value in metadata.items()
        if key != _TENSOR_NAMES_KEY and not value.startswith(_CLASS_JSON_PREFIX)
    }


TORCHAO: Final = QuantizationMethod((_METHOD_NAME,), _parse_scheme, build_list_extension("modules_to_not_convert"))
