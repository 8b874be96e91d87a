"""Describes ComfyUI's quantized weights: fp8 with `scale_weight`, and the formats that `comfy_quant` names.

Layout: ComfyUI (comfy/utils.py, `convert_old_quants`; comfy/quant_ops.py, `QUANT_ALGOS`; comfy/ops.py,
`_load_quantized_module`; QUANTIZATION.md) and comfy-kitchen 0.2 (comfy_kitchen/tensor, backends/eager/quantization.py).
A file of scaled fp8 has a marker `scaled_fp8`. Otherwise `comfy_quant` next to a weight is a JSON text with the format
of the layer, or `_quantization_metadata` in the header has those of all layers. For fp8 and nvfp4, ComfyUI rounds the
scale to the type that it computes in; here the product is computed in F32, and rounded once.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import SourceError, UnsupportedError, format_first_few
from shardctl.models.quantization.storage import (
    FLOAT,
    FP8,
    IN,
    MATRIX,
    OUT,
    PAIRS,
    PER_ROW,
    PER_TENSOR,
    AlongDim,
    PackedFloats,
    QuantizedArray,
    ScaledFloats,
    ScaledIntegers,
)
from shardctl.models.quantization.stored_weight import (
    PackedArray,
    PackedWeight,
    StoredQuantization,
    WeightListing,
    flatten_shape,
)
from shardctl.storage.bounded_text import TextLimits, check_size, parse_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from shardctl.models.quantization.storage import Form
    from shardctl.tensors.manifest import Manifest, Tensor

METADATA_KEY: Final = "_quantization_metadata"
"""The key of a file's metadata that names the format of each layer."""
_SCALED_FP8_MARKER: Final = "scaled_fp8"
_SCALE_SUFFIX: Final = ".scale_weight"
_LAYER_CONFIG_SUFFIX: Final = ".comfy_quant"
_ACTIVATION_SCALE_NAMES: Final = ("scale_input", "input_scale")
_MODEL_NAME_PREFIXES: Final = ("", "model.diffusion_model.", "diffusion_model.")
"""What may stand before the layers that a header names."""
_LAYER_TEXT: Final = TextLimits(size=1 << 12, memory=1 << 16, depth=4)
_HEADER_TEXT: Final = TextLimits(size=1 << 24, memory=1 << 28, depth=6)
_BLOCK_OUTPUTS: Final = 128
"""Outputs of a block of scales in the order of cuBLAS, which has 4 scales of each (`to_blocked`)."""
_GROUP_SIZES_BY_FORMAT: Final = {"mxfp8": 32, "nvfp4": 16}
"""By format: what ComfyUI pads rows and columns to, and inputs that share a scale."""
_SCALAR_FORMS: Final = (*PER_TENSOR, *PER_ROW)


def find_comfy_weights(stored: Manifest, _config: Mapping[str, object]) -> StoredQuantization | None:
    """Find weights that ComfyUI's formats hold; None if there are none."""
    tensors, header = stored.tensors, stored.metadata.get(METADATA_KEY)
    layers = [name.removesuffix(_LAYER_CONFIG_SUFFIX) for name in tensors if name.endswith(_LAYER_CONFIG_SUFFIX)]
    if header is not None or layers:
        names = _parse_header(header, tensors) if header is not None else {}
        modules = dict.fromkeys((*layers, *names))
        listing = partial(_list_layers, tensors, modules, names)
        title = "ComfyUI comfy_quant"
    else:
        modules = dict.fromkeys(name.removesuffix(_SCALE_SUFFIX) for name in tensors if name.endswith(_SCALE_SUFFIX))
        listing = partial(_list_scaled_weights, tensors, modules)
        title = "ComfyUI scaled fp8"
    markers = {name for name in tensors if name.replace("/", ".").rpartition(".")[2] == _SCALED_FP8_MARKER}
    if not modules and not markers:
        return None
    owns = ("weight", "scale_weight", "weight_scale", "weight_scale_2", "pre_quant_scale", *_ACTIVATION_SCALE_NAMES)
    arrays = {f"{module}.{own}" for module in modules for own in owns} & tensors.keys()
    markers |= {f"{module}{_LAYER_CONFIG_SUFFIX}" for module in modules} & tensors.keys()
    return StoredQuantization(
        title, listing, frozenset(arrays | markers), frozenset(markers), metadata_keys=(METADATA_KEY,)
    )


def _list_scaled_weights(
    tensors: Mapping[str, Tensor], modules: Iterable[str], _listing: WeightListing
) -> Mapping[str, PackedWeight]:
    return {f"{module}.weight": _build_scaled_floats(tensors, module, _SCALE_SUFFIX) for module in modules}


def _list_layers(
    tensors: Mapping[str, Tensor],
    modules: Iterable[str],
    header: Mapping[str, Mapping[str, Any]],
    listing: WeightListing,
) -> Mapping[str, PackedWeight]:
    return dict(_build_layers(tensors, modules, header, listing))


def _build_layers(
    tensors: Mapping[str, Tensor],
    modules: Iterable[str],
    header: Mapping[str, Mapping[str, Any]],
    listing: WeightListing,
) -> Iterator[tuple[str, PackedWeight]]:
    for module in modules:
        own = tensors.get(f"{module}{_LAYER_CONFIG_SUFFIX}")
        said = _read_layer(own, listing.read) if own is not None else header[module]
        kind = said.get("format")
        build = _WEIGHT_BUILDERS_BY_FORMAT.get(kind) if isinstance(kind, str) else None
        inner = said.get("params")
        turned = said.get("convrot", inner.get("convrot") if isinstance(inner, dict) else False)
        if build is None or turned:
            words = f"{kind!r:.50}{' with rotated inputs (convrot)' if turned else ''}"
            raise UnsupportedError(
                f"{module}.weight is quantized in ComfyUI's format {words}, which shardctl does not decode",
                hint=(
                    f"shardctl decodes {', '.join(_WEIGHT_BUILDERS_BY_FORMAT)}; leave --dtype out to keep the quantized"
                    " weights"
                ),
            )
        yield f"{module}.weight", _trim_padding(build(tensors, module), tensors, module, listing)


def _trim_padding(
    weight: PackedWeight, tensors: Mapping[str, Tensor], module: str, listing: WeightListing
) -> PackedWeight:
    """Return a weight without the rows and columns that ComfyUI pads it with, as far as anything says its shape."""
    known = listing.shapes.get(f"{module}.weight")
    bias = tensors.get(f"{module}.bias")
    if known is None and bias is not None and len(bias.shape) == 1:
        known = (bias.shape[0], *weight.shape[1:])
    if known is None or len(known) != len(weight.shape) or len(known) != len(MATRIX):
        return weight
    blocked = getattr(weight.decoder, "blocked", 0)
    padded = tuple(-(-extent // blocked) * blocked if blocked else extent for extent in known)
    return replace(weight, shape=known) if padded == weight.shape else weight


def _read_layer(stored: Tensor, read: Callable[[str], bytes]) -> Mapping[str, Any]:
    check_size(stored.nbytes, stored.name, _LAYER_TEXT)
    said = parse_json(read(stored.name), stored.name, _LAYER_TEXT)
    if not isinstance(said, dict):
        raise SourceError(f"{stored.name} is not a JSON object")
    return said


def _parse_header(text: str, tensors: Mapping[str, Tensor]) -> Mapping[str, Mapping[str, Any]]:
    """Parse the formats of layers in a file's header, by the names that their modules have in the file."""
    said = parse_json(text.encode(), METADATA_KEY, _HEADER_TEXT)
    layers = said.get("layers") if isinstance(said, dict) else None
    if not isinstance(layers, dict):
        raise SourceError(f"{METADATA_KEY} in the file's header has no table of layers")
    found: dict[str, Mapping[str, Any]] = {}
    lost: list[str] = []
    for name, value in layers.items():
        module = next(
            (f"{prefix}{name}" for prefix in _MODEL_NAME_PREFIXES if f"{prefix}{name}.weight" in tensors), None
        )
        if module is None:
            lost.append(name)
        else:
            found[module] = value if isinstance(value, dict) else {"format": value}
    if lost and not found:
        raise SourceError(f"{METADATA_KEY} in the file's header names {format_first_few(lost)}, which the file lacks")
    return found


def _require(tensors: Mapping[str, Tensor], name: str, kinds: Iterable[str]) -> Tensor:
    """Return an array; raises SourceError if it is missing or has another type than its format."""
    stored = tensors.get(name)
    if stored is None:
        raise SourceError(f"{name} is missing, without which the weight beside it cannot be decoded")
    if stored.dtype.name not in kinds:
        raise SourceError(f"{name} is {stored.dtype}, where its format has {' or '.join(kinds)}")
    return stored


def _locate_scale(stored: Tensor, outputs: int) -> PackedArray:
    """Locate a scale of the whole weight, or of each output."""
    shape = stored.shape
    if all(extent == 1 for extent in shape):
        return PackedArray(stored.name, (), ())
    if shape[0] == outputs and all(extent == 1 for extent in shape[1:]):
        return PackedArray(stored.name, (AlongDim(OUT), 1), (outputs, 1))
    raise SourceError(f"{stored.name} has the shape {list(shape)} where one scale, or one of {outputs}, is expected")


def _build_scaled_floats(tensors: Mapping[str, Tensor], module: str, own: str = ".weight_scale") -> PackedWeight:
    codes = _require(tensors, f"{module}.weight", FP8)
    scale = _locate_scale(_require(tensors, f"{module}{own}", FLOAT), codes.shape[0])
    decoder = ScaledFloats(
        QuantizedArray("weight", FP8, (MATRIX,)), QuantizedArray("weight_scale", FLOAT, _SCALAR_FORMS)
    )
    matrix = _flatten_rows(codes)
    return PackedWeight(
        codes.shape, decoder, {"weight": PackedArray(codes.name, MATRIX, matrix), "weight_scale": scale}
    )


def _flatten_rows(codes: Tensor) -> tuple[int, int]:
    """Return the shape of a weight as a matrix of its outputs."""
    if not codes.shape:
        raise SourceError(f"{codes.name} has no dims where a weight is expected")
    rows = codes.shape[0]
    return rows, codes.size // rows if rows else 0


def _build_integers(tensors: Mapping[str, Tensor], module: str) -> PackedWeight:
    codes = _require(tensors, f"{module}.weight", ("I8",))
    scale = _locate_scale(_require(tensors, f"{module}.weight_scale", FLOAT), codes.shape[0])
    decoder = ScaledIntegers(
        QuantizedArray("weight", ("I8",), (MATRIX,)),
        QuantizedArray("weight_scale", FLOAT, _SCALAR_FORMS),
        rounded="F32",
    )
    matrix = _flatten_rows(codes)
    return PackedWeight(
        codes.shape, decoder, {"weight": PackedArray(codes.name, MATRIX, matrix), "weight_scale": scale}
    )


def _locate_blocked_scale(tensors: Mapping[str, Tensor], module: str, kind: str, shape: tuple[int, int]) -> PackedArray:
    """Locate scales in the order of cuBLAS, of blocks of 128 outputs by 4 groups."""
    group = _GROUP_SIZES_BY_FORMAT["mxfp8" if kind == "F8_E8M0" else "nvfp4"]
    stored = _require(tensors, f"{module}.weight_scale", (kind, "U8"))
    tall, wide = -(-shape[0] // _BLOCK_OUTPUTS), -(-shape[1] // (4 * group))
    if stored.shape != (tall * _BLOCK_OUTPUTS, wide * 4):
        raise SourceError(
            f"{stored.name} has the shape {list(stored.shape)} where ComfyUI has "
            f"{[tall * _BLOCK_OUTPUTS, wide * 4]} for a weight {list(shape)}"
        )
    form: Form = (AlongDim(OUT, 128, 32), AlongDim(IN, 4 * group, 16))
    return PackedArray(stored.name, form, (tall * 32, wide * 16), kind)


def _build_mxfp8(tensors: Mapping[str, Tensor], module: str) -> PackedWeight:
    codes = _require(tensors, f"{module}.weight", FP8)
    shape = flatten_shape(codes.shape)
    scale = _locate_blocked_scale(tensors, module, "F8_E8M0", shape)
    decoder = ScaledFloats(
        QuantizedArray("weight", FP8, (MATRIX,)),
        QuantizedArray("weight_scale", ("F8_E8M0",), (scale.form,)),
        blocked=_GROUP_SIZES_BY_FORMAT["mxfp8"],
    )
    return PackedWeight(codes.shape, decoder, {"weight": PackedArray(codes.name, MATRIX), "weight_scale": scale})


def _build_nvfp4(tensors: Mapping[str, Tensor], module: str) -> PackedWeight:
    codes = _require(tensors, f"{module}.weight", ("U8",))
    rows, width = flatten_shape(codes.shape)
    shape = (rows, 2 * width)
    scale = _locate_blocked_scale(tensors, module, "F8_E4M3", shape)
    arrays = {
        "weight": PackedArray(codes.name, PAIRS),
        "weight_scale": scale,
        "weight_scale_2": _locate_scale(_require(tensors, f"{module}.weight_scale_2", FLOAT), 0),
    }
    smoothing = tensors.get(f"{module}.pre_quant_scale")
    if smoothing is not None:
        arrays["pre_quant_scale"] = PackedArray(smoothing.name, (AlongDim(IN),), (smoothing.size,))
    decoder = PackedFloats(
        QuantizedArray("weight", ("U8",), (PAIRS,)),
        QuantizedArray("weight_scale", ("F8_E4M3",), (scale.form,)),
        QuantizedArray("weight_scale_2", FLOAT, ((),)),
        smoothing=QuantizedArray("pre_quant_scale", FLOAT, ((AlongDim(IN),),), optional=True),
        blocked=_GROUP_SIZES_BY_FORMAT["nvfp4"],
        high_first=True,
    )
    return PackedWeight(shape, decoder, arrays)


_WEIGHT_BUILDERS_BY_FORMAT: Final[Mapping[str, Callable[[Mapping[str, Tensor], str], PackedWeight]]] = {
    "float8_e4m3fn": _build_scaled_floats,
    "float8_e5m2": _build_scaled_floats,
    "mxfp8": _build_mxfp8,
    "nvfp4": _build_nvfp4,
    "int8_tensorwise": _build_integers,
}
"""By the format that a layer names: what builds its weight."""
