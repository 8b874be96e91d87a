"""Describes optimum-quanto's weights: bytes with a scale a row, or integers of 2 or 4 bits with scales of groups.

Layout: optimum-quanto 0.2.7 (nn/qmodule.py, `_save_to_state_dict`; tensor/weights/qbytes.py and qbits.py;
tensor/packed.py). `quanto_qmap.json` beside the files says the types, which the arrays show themselves.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.models.quantization.storage import (
    FLOAT,
    FP8,
    MATRIX,
    OUT,
    AlongDim,
    OpenDim,
    PackedGroups,
    QuantizedArray,
    ScaledFloats,
    ScaledIntegers,
)
from shardctl.models.quantization.stored_weight import (
    PackedArray,
    PackedWeight,
    StoredQuantization,
    WeightListing,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from shardctl.models.quantization.storage import WeightDecoder
    from shardctl.tensors.manifest import Manifest, Tensor

_UNPACKED_DATA_SUFFIX: Final = "._data"
_PACKED_DATA_SUFFIX: Final = "._data._data"
_SCALE_SUFFIX: Final = "._scale"
_SHIFT_SUFFIX: Final = "._shift"
_ACTIVATION_SCALE_NAMES: Final = ("input_scale", "output_scale")
_PER_ROW: Final = (AlongDim(OUT), 1)
_GROUP_SIZES: Final = (32, 64, 96, 128)
"""Inputs that may share a scale; a row of other lengths has one (`QModuleMixin.__init__`)."""
_GROUP_ROWS: Final = (OpenDim(), OpenDim())
"""Rows of groups, which run on from one row of the weight to the next."""


def find_quanto_weights(stored: Manifest, _config: Mapping[str, object]) -> StoredQuantization | None:
    """Find weights that quanto stored; None if there are none."""
    tensors = stored.tensors
    names = [name.removesuffix(_SCALE_SUFFIX) for name in tensors if name.endswith(_SCALE_SUFFIX)]
    weights = [
        name
        for name in names
        if f"{name}{_UNPACKED_DATA_SUFFIX}" in tensors or f"{name}{_PACKED_DATA_SUFFIX}" in tensors
    ]
    if not weights:
        return None
    arrays = {
        f"{name}{own}"
        for name in weights
        for own in (_UNPACKED_DATA_SUFFIX, _PACKED_DATA_SUFFIX, _SCALE_SUFFIX, _SHIFT_SUFFIX)
    }
    arrays |= {f"{name.rpartition('.')[0]}.{own}" for name in weights for own in _ACTIVATION_SCALE_NAMES}
    kinds = sorted({_name_type(tensors, name) for name in weights})
    title = f"quanto {' and '.join(kinds)}"
    return StoredQuantization(title, partial(_list_weights, tensors, weights), frozenset(arrays & tensors.keys()))


def _name_type(tensors: Mapping[str, Tensor], name: str) -> str:
    """Return what quanto calls the type of a weight's codes."""
    plain = tensors.get(f"{name}{_UNPACKED_DATA_SUFFIX}")
    if plain is None:
        return f"qint{_find_bits(tensors, name)}"
    return "qint8" if plain.dtype.name == "I8" else f"qfloat8 ({plain.dtype})"


def _list_weights(
    tensors: Mapping[str, Tensor], weights: Iterable[str], listing: WeightListing
) -> Mapping[str, PackedWeight]:
    return dict(_build_weights(tensors, weights, listing))


def _build_weights(
    tensors: Mapping[str, Tensor], weights: Iterable[str], listing: WeightListing
) -> Iterator[tuple[str, PackedWeight]]:
    for name in weights:
        plain = tensors.get(f"{name}{_UNPACKED_DATA_SUFFIX}")
        yield name, _build_packed(tensors, name, listing) if plain is None else _build_plain(plain, name, tensors)


def _build_plain(codes: Tensor, name: str, tensors: Mapping[str, Tensor]) -> PackedWeight:
    """Build a weight of one byte an element; raises SourceError for a scale that is not one a row."""
    scale, outputs = tensors[f"{name}{_SCALE_SUFFIX}"], codes.shape[0] if codes.shape else 0
    if codes.dtype.name not in ("I8", *FP8) or scale.shape != (outputs, *(1 for _ in codes.shape[1:])):
        raise SourceError(
            f"{codes.name} is {codes.dtype} {list(codes.shape)} and its scales {list(scale.shape)}; quanto has int8 or "
            "8-bit floats with a scale for each output"
        )
    matrix = (outputs, prod(codes.shape[1:]))
    array, factor = (
        QuantizedArray("_data", (codes.dtype.name,), (MATRIX,)),
        QuantizedArray("_scale", FLOAT, (_PER_ROW,)),
    )
    floats = codes.dtype.name in FP8
    decoder: WeightDecoder = ScaledFloats(array, factor, by_scale=True) if floats else ScaledIntegers(array, factor)
    arrays = {
        "_data": PackedArray(codes.name, MATRIX, matrix),
        "_scale": PackedArray(scale.name, _PER_ROW, (outputs, 1)),
    }
    return PackedWeight(codes.shape, decoder, arrays)


def _build_packed(tensors: Mapping[str, Tensor], name: str, listing: WeightListing) -> PackedWeight:
    """Build a weight of packed integers; raises SourceError where its shape does not follow from its arrays."""
    codes, scale, shift = (tensors.get(f"{name}{own}") for own in (_PACKED_DATA_SUFFIX, _SCALE_SUFFIX, _SHIFT_SUFFIX))
    if codes is None or scale is None or shift is None or not codes.shape or not scale.shape:
        raise SourceError(f"{name} cannot be decoded without {name}{_SHIFT_SUFFIX}", hint="a shard may be missing")
    bits, rows, width = _find_bits(tensors, name), scale.shape[0], prod(codes.shape[1:])
    whole = len(codes.shape) > len(_GROUP_ROWS) or width not in _GROUP_SIZES
    shape = (rows, *codes.shape[1:]) if whole else listing.shapes.get(name)
    if shape is None or prod(shape) != rows * width:
        said = f"has the shape {list(shape)}" if shape is not None else "the shape of the weight is not stored"
        raise SourceError(
            f"{codes.name} holds {rows} groups of {width} codes, and {said}",
            hint="give the model's config with --config PATH",
        )
    matrix = (codes.shape[0], width)
    arrays = {
        "_data": PackedArray(codes.name, _GROUP_ROWS, matrix),
        "_scale": PackedArray(scale.name, _GROUP_ROWS, (rows, 1)),
        "_shift": PackedArray(shift.name, _GROUP_ROWS, (rows, 1)),
    }
    decoder = PackedGroups(
        QuantizedArray("_data", ("U8",), (_GROUP_ROWS,)),
        QuantizedArray("_scale", FLOAT, (_GROUP_ROWS,)),
        QuantizedArray("_shift", ("I8", *FLOAT), (_GROUP_ROWS,)),
        bits,
        inputs=prod(shape[1:]),
    )
    return PackedWeight(tuple(shape), decoder, arrays)


def _find_bits(tensors: Mapping[str, Tensor], name: str) -> int:
    """Find the bits of a code from how many rows of groups share one of packed codes."""
    codes, scale = tensors[f"{name}{_PACKED_DATA_SUFFIX}"], tensors[f"{name}{_SCALE_SUFFIX}"]
    packed, rows = codes.shape[0], scale.shape[0] if scale.shape else 0
    fitting = [bits for bits in (2, 4) if packed == -(-rows * bits // 8)]
    if len(fitting) != 1:
        raise SourceError(f"{codes.name} has {packed} rows for {rows} scales, which fit no integers of 2 or 4 bits")
    return fitting[0]
