"""Describes MLX's weights: integers in words of 32 bits with scales and biases, or microscaled floats with scales.

Layout: mlx 0.32 (python/mlx/nn/layers/quantized.py, mlx/ops.cpp `quantize`), and mlx-lm 0.32 (utils.py,
`quantize_model`), which writes the settings into `quantization` of config.json, for all modules and for single ones.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.base.value import value_class
from shardctl.models.quantization.storage import (
    FLOAT,
    IN,
    MATRIX,
    OUT,
    PAIRS,
    WORD,
    AffineWords,
    AlongDim,
    PackedFloats,
    QuantizedArray,
    ScaledFloats,
    build_block_form,
    build_packed_dim,
)
from shardctl.models.quantization.stored_weight import (
    PackedArray,
    PackedWeight,
    StoredQuantization,
    WeightListing,
    flatten_shape,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from shardctl.models.quantization.storage import WeightDecoder
    from shardctl.tensors.manifest import Manifest, Tensor

_CONFIG_KEYS: Final = ("quantization", "quantization_config")
_SCALES_SUFFIX: Final = ".scales"
_STACK_DIMS: Final = 3
_AFFINE_BITS: Final = (1, 2, 3, 4, 5, 6, 8)
_AFFINE_GROUPS: Final = (32, 64, 128)
_FLOAT_MODES: Final = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
"""By mode: bits of a code, and inputs that share a scale."""
_DEFAULT_PACKING_BY_MODE: Final = {"affine": (4, 64), **_FLOAT_MODES}
_FLOAT_SCALES: Final = {"mxfp4": "U8", "mxfp8": "U8", "nvfp4": "F8_E4M3"}
"""What the bytes of scales are: exponents alone, or small floats."""
_NVFP4_MAX_MAGNITUDE: Final = 448.0 * 6.0
"""The number that the largest magnitude of a weight becomes, of which nvfp4 may store a `global_scale` (448 is that of
the scales, 6 that of the codes)."""
_CHANGES_BY_MODEL_TYPE: Final = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), "norms plus one"),
    **dict.fromkeys(("step3p5", "step3p7"), "norms plus one"),
    "falcon_h1": "weights with the model's multipliers in them",
}
"""By `model_type`: values that mlx-lm changes under the same names and shapes (`sanitize` of its classes)."""
_EXPERT_STACK_PREFIX: Final = "switch_mlp."
"""What mlx-lm calls the stacks of a layer's experts."""
_EXPERT_NAMES: Final = {"mlp": {}, "block_sparse_moe": {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}}
"""By the module around them: what the matrices are called on the Hub, if that differs."""


@value_class
class _PackingSettings:
    """How the weight of one module is packed."""

    bits: int
    group: int
    """Inputs that share a scale."""
    mode: str = "affine"

    def __str__(self) -> str:
        return f"{self.bits}-bit (group {self.group})" if self.mode == "affine" else self.mode


def find_mlx_weights(stored: Manifest, config: Mapping[str, object]) -> StoredQuantization | None:
    """Find weights that MLX packed into words; None if there are none."""
    modules = [name.removesuffix(_SCALES_SUFFIX) for name in stored.tensors if name.endswith(_SCALES_SUFFIX)]
    modules = [module for module in modules if _is_packed(stored.tensors.get(f"{module}.weight"))]
    if not modules:
        return None
    declared = find_mlx_settings(config)
    names = (f"{module}.{own}" for module in modules for own in ("weight", "scales", "biases", "global_scale"))
    arrays = frozenset(name for name in names if name in stored.tensors)
    words = _describe_settings(stored.tensors, modules, declared)
    return StoredQuantization(
        f"MLX {words}".rstrip(),
        partial(_list_weights, stored.tensors, modules, declared, config),
        arrays,
        config_keys=("quantization",),
        list_stacked_names=_list_stacked_names,
        renamed=True,
    )


def find_mlx_settings(config: Mapping[str, object]) -> Mapping[str, Any]:
    """Find what a config says of MLX's packing; empty if it says nothing."""
    text = config.get("text_config")
    for values in (config, text if isinstance(text, dict) else {}):
        for key in _CONFIG_KEYS:
            settings = values.get(key)
            if isinstance(settings, dict) and "quant_method" not in settings and "bits" in settings:
                return settings
    return {}


def _is_packed(weight: Tensor | None) -> bool:
    return weight is not None and weight.dtype.name == "U32" and len(weight.shape) > 1


def _describe_settings(tensors: Mapping[str, Tensor], modules: Iterable[str], declared: Mapping[str, Any]) -> str:
    """Describe how weights are packed, the most frequent way first; empty if that does not follow."""
    found: dict[_PackingSettings, int] = {}
    for module in modules:
        try:
            settings = _choose_settings(tensors, module, declared, {})
        except SourceError:  # which decoding raises again
            continue
        found[settings] = found.get(settings, 0) + 1
    return " and ".join(map(str, sorted(found, key=lambda each: -found[each])))


def _choose_settings(
    tensors: Mapping[str, Tensor], module: str, declared: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> _PackingSettings:
    """Choose the settings that fit a module's arrays: its own in the config, those of all, or what the sizes leave."""
    weight, scales = tensors[f"{module}.weight"], tensors[f"{module}{_SCALES_SUFFIX}"]
    affine = scales.dtype.name in FLOAT
    for own in (declared.get(module), declared):
        settings = _read_settings(own) if isinstance(own, dict) else None
        if settings is not None and (settings.mode == "affine") == affine and _fits_sizes(weight, scales, settings):
            return settings
    modes = [_PackingSettings(*sizes, mode) for mode, sizes in _FLOAT_MODES.items()]
    ways = [_PackingSettings(bits, group) for bits in _AFFINE_BITS for group in _AFFINE_GROUPS] if affine else modes
    fitting = [way for way in ways if _fits_sizes(weight, scales, way)]
    inputs = shapes.get(f"{module}.weight", ())[-1:]
    if inputs:
        fitting = [way for way in fitting if scales.shape[-1] * way.group == inputs[0]]
    if len(fitting) != 1:
        found = " or ".join(map(str, fitting)) or "none that MLX has"
        raise SourceError(
            f"config.json does not say how MLX packed {module}.weight: its sizes {list(weight.shape)} and "
            f"{list(scales.shape)} (scales) fit {found}",
            hint='mlx-lm writes "quantization": {"group_size": 64, "bits": 4} there',
        )
    return fitting[0]


def _read_settings(values: Mapping[str, Any]) -> _PackingSettings | None:
    """Read settings of config.json; None for a mode or numbers that MLX does not have."""
    mode = values.get("mode", "affine")
    if not isinstance(mode, str) or mode not in _DEFAULT_PACKING_BY_MODE:
        return None
    bits, group = (
        values.get("bits") or _DEFAULT_PACKING_BY_MODE[mode][0],
        values.get("group_size") or _DEFAULT_PACKING_BY_MODE[mode][1],
    )
    if mode in _FLOAT_MODES:
        return _PackingSettings(bits, group, mode) if (bits, group) == _FLOAT_MODES[mode] else None
    return _PackingSettings(bits, group) if bits in _AFFINE_BITS and isinstance(group, int) else None


def _fits_sizes(weight: Tensor, scales: Tensor, settings: _PackingSettings) -> bool:
    inputs = scales.shape[-1] * settings.group
    return weight.shape[:-1] == scales.shape[:-1] and weight.shape[-1] * WORD == inputs * settings.bits


def _list_weights(
    tensors: Mapping[str, Tensor],
    modules: Iterable[str],
    declared: Mapping[str, Any],
    config: Mapping[str, object],
    listing: WeightListing,
) -> Mapping[str, PackedWeight]:
    """List the weights by their names on the Hub; raises UnsupportedError where MLX keeps other values than the Hub."""
    kind = str(config.get("model_type", ""))
    if kind in _CHANGES_BY_MODEL_TYPE:
        raise UnsupportedError(
            f"mlx-lm keeps {_CHANGES_BY_MODEL_TYPE[kind]} for {kind}, which shardctl does not take back",
            hint="take the original model, or decode this one with mlx_lm convert --dequantize on a Mac",
        )
    return dict(_build_weights(tensors, modules, declared, listing))


def _build_weights(
    tensors: Mapping[str, Tensor], modules: Iterable[str], declared: Mapping[str, Any], listing: WeightListing
) -> Iterator[tuple[str, PackedWeight]]:
    for module in modules:
        weight, scales = tensors[f"{module}.weight"], tensors[f"{module}{_SCALES_SUFFIX}"]
        settings = _choose_settings(tensors, module, declared, listing.shapes)
        shape = (*weight.shape[:-1], scales.shape[-1] * settings.group)
        stack = _list_expert_names(module, shape)
        decoder, arrays = _build_arrays(tensors, module, settings, flat=not stack)
        yield (
            f"{module}.weight",
            PackedWeight(shape[1:] if stack else shape, decoder, arrays, stack),
        )


def _list_expert_names(module: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """List what the Hub calls the matrices of a stack of experts; empty for anything else."""
    around, _, own = module.rpartition(_EXPERT_STACK_PREFIX)
    parent = around.rstrip(".").rpartition(".")[2]
    if not around or parent not in _EXPERT_NAMES or len(shape) != _STACK_DIMS:
        return ()
    return tuple(f"{around}experts.{number}.{_EXPERT_NAMES[parent].get(own, own)}.weight" for number in range(shape[0]))


def _list_stacked_names(name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    module = name.removesuffix(".weight")
    return _list_expert_names(module, shape) if module != name else ()


def _build_arrays(
    tensors: Mapping[str, Tensor], module: str, settings: _PackingSettings, *, flat: bool
) -> tuple[WeightDecoder, Mapping[str, PackedArray]]:
    """Build what decodes a module's weight, and where its arrays are; `flat` reads all rows as those of one matrix."""
    scales = f"{module}{_SCALES_SUFFIX}"
    by_group = build_block_form(1, settings.group)

    def locate(name: str, form: Any, dtype: str = "", units: int = 1) -> PackedArray:  # noqa: ANN401 - a form
        stored = tensors[name].shape
        rows, columns = flatten_shape(stored)
        shape = (rows, columns * units) if flat else (*stored[:-1], columns * units)
        return PackedArray(name, form, shape, dtype)

    if settings.mode == "affine":
        biases = f"{module}.biases"
        if biases not in tensors or tensors[biases].shape != tensors[scales].shape:
            raise SourceError(f"{module}.weight cannot be decoded without {biases}", hint="a shard may be missing")
        words = (AlongDim(OUT), build_packed_dim(IN, settings.bits))
        decoder: WeightDecoder = AffineWords(
            QuantizedArray("weight", ("U32",), (words,)),
            QuantizedArray("scales", FLOAT, (by_group,)),
            QuantizedArray("biases", FLOAT, (by_group,)),
            settings.bits,
        )
        arrays = {
            "weight": locate(f"{module}.weight", words),
            "scales": locate(scales, by_group),
            "biases": locate(biases, by_group),
        }
        return decoder, arrays
    kind = "F8_E4M3" if settings.bits == _FLOAT_MODES["mxfp8"][0] else "U8"
    form = MATRIX if kind == "F8_E4M3" else PAIRS
    codes = QuantizedArray("weight", (kind,), (form,))
    scale = QuantizedArray("scales", (_FLOAT_SCALES[settings.mode],), (by_group,))
    located = {
        "weight": locate(f"{module}.weight", form, kind, units=WORD // 8),
        "scales": locate(scales, by_group, _FLOAT_SCALES[settings.mode]),
    }
    if kind == "F8_E4M3":
        return ScaledFloats(codes, scale), located
    peak = f"{module}.global_scale"
    if peak not in tensors:
        return PackedFloats(codes, scale), located
    if flat and tensors[peak].shape:
        raise UnsupportedError(f"{peak} has the shape {list(tensors[peak].shape)} where one number is expected")
    whole = QuantizedArray("global_scale", ("F32",), ((),))
    decoder = PackedFloats(codes, scale, whole, largest=_NVFP4_MAX_MAGNITUDE)
    return decoder, {**located, "global_scale": PackedArray(peak, ())}
