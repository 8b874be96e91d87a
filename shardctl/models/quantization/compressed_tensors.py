"""Describes compressed-tensors, as LLM Compressor writes it: groups of modules, each with its own number format.

Layout: compressed-tensors 0.20 (compressors/*/base.py, quantization/lifecycle/initialize.py, utils/match.py).
`weight_shape` is the shape of the whole weight, whole on every rank: it stays true of the tensor, not of the part.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.models.quantization.fp8 import parse_block_size
from shardctl.models.quantization.module_list import build_list_extension, find_module_list, match_exact_names
from shardctl.models.quantization.storage import (
    FLOAT,
    FP8,
    IN,
    MATRIX,
    OUT,
    PAIRS,
    PER_ROW,
    PER_TENSOR,
    SCALE,
    AlongDim,
    Form,
    PackedFloats,
    QuantizationMethod,
    QuantizationScheme,
    QuantizedArray,
    ScaledFloats,
    ScaledIntegers,
    WeightStorage,
    build_block_form,
    build_packed_dim,
)
from shardctl.models.tables.config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardctl.models.quantization.storage import Names, WeightDecoder

_LINEAR_CLASS_NAMES: Final = ("Linear", "LinearBase")
"""Names of classes that mean every linear layer."""
_MAX_BITS_PER_WEIGHT: Final = 8
_ZERO_POINT_DTYPES: Final = ("I8", "I32", "U8", *FP8, *FLOAT)
_UNSPLITTABLE_INPUTS_LABEL: Final = "run of inputs, because act-order mixed their groups"
_ACTIVATION_QUANTIZATION_ARRAYS: Final = tuple(
    QuantizedArray(f"{side}_{what}", kinds, PER_TENSOR, optional=True)
    for side in ("input", "output")
    for what, kinds in (("scale", SCALE), ("zero_point", _ZERO_POINT_DTYPES), ("global_scale", SCALE))
)
"""What static quantization of activations needs; the config decides it together with the calibration."""
_UNQUANTIZED_WEIGHT_ARRAY: Final = QuantizedArray("weight", (), (MATRIX,))


@dataclass(frozen=True)
class _GroupWeights:
    """The `weights` of a group, and the format they are stored in."""

    config: ModelConfig
    form: str

    @cached_property
    def bits(self) -> int:
        bits = self.config.size("num_bits", 8)
        if bits > _MAX_BITS_PER_WEIGHT:
            raise SourceError(f"config.json has num_bits = {bits} where 1 to {_MAX_BITS_PER_WEIGHT} are expected")
        return bits

    @cached_property
    def group(self) -> int | None:
        """Inputs that share a scale; None if the config does not say, or all."""
        return None if self.config.values.get("group_size") == -1 else self.config.size("group_size", 0) or None

    @cached_property
    def strategy(self) -> str:
        """What shares a scale; a config that does not say is read as compressed-tensors reads it."""
        usual = "group" if self.group else "channel" if self.config.values.get("group_size") == -1 else "tensor"
        return self.config.text("strategy", usual)

    def scales(self) -> tuple[Form, ...]:
        """Return the form of `weight_scale`, and of zero points that are not packed."""
        if self.strategy == "tensor":
            return PER_TENSOR
        if self.strategy == "channel":
            return PER_ROW
        if self.strategy in ("group", "tensor_group") and self.group:
            return (build_block_form(1, self.group),)
        block = parse_block_size(self.config, "block_structure") if self.strategy == "block" else None
        if block is None:
            raise UnsupportedError(f"compressed-tensors weights by {self.strategy!r} are not known")
        return (build_block_form(*block),)

    def zeros(self) -> tuple[QuantizedArray, ...]:
        """Return the zero points of an asymmetric format."""
        if self.config.read_flag("symmetric", default=True):
            return ()
        forms = self.scales()
        if self.form == "pack-quantized" and self.strategy in ("group", "channel"):
            return (QuantizedArray("weight_zero_point", ("I32",), ((build_packed_dim(OUT, self.bits), forms[0][1]),)),)
        return (QuantizedArray("weight_zero_point", _ZERO_POINT_DTYPES, forms),)

    def order(self) -> tuple[QuantizedArray, ...]:
        """Return the group of each input, where act-order mixes them."""
        return (QuantizedArray("weight_g_idx", ("I32", "I64"), ((AlongDim(IN),),)),) if self.mixed else ()

    @cached_property
    def mixed(self) -> bool:
        """Whether neighbouring inputs may be of different groups (`actorder`; `weight` orders while calibrating)."""
        order: Any = self.config.values.get("actorder")
        return self.strategy == "group" and order in (True, "group", "dynamic")

    def storage(self) -> WeightStorage:
        """Return the arrays of the format; raises UnsupportedError for one that is not known."""
        scale = QuantizedArray(
            "weight_scale", SCALE, self.scales(), plain=self.form in ("pack-quantized", "int-quantized")
        )
        uncut = {IN: _UNSPLITTABLE_INPUTS_LABEL} if self.mixed else {}
        if self.form == "pack-quantized":
            codes = QuantizedArray("weight_packed", ("I32",), ((AlongDim(OUT), build_packed_dim(IN, self.bits)),))
            shape = QuantizedArray("weight_shape", ("I64", "I32"), ((2,),))
            arrays = (codes, scale, *self.zeros(), *self.order(), shape, *_ACTIVATION_QUANTIZATION_ARRAYS)
            return WeightStorage(arrays, uncut, decoder=self._build_decoder(codes, scale))
        if self.form in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
            codes = QuantizedArray("weight_packed", ("U8",), (PAIRS,))
            whole = QuantizedArray("weight_global_scale", FLOAT, PER_TENSOR, optional=self.form.startswith("mx"))
            pairs = None if self.zeros() else PackedFloats(codes, scale, whole, divided=True, rounded="BF16")
            return WeightStorage((codes, scale, whole, *self.zeros(), *_ACTIVATION_QUANTIZATION_ARRAYS), decoder=pairs)
        kinds = {
            "int-quantized": ("I8",),
            "float-quantized": FP8,
            "naive-quantized": ("I8", *FP8),
            "mxfp8-quantized": FP8,
        }.get(self.form)
        if kinds is None:
            raise UnsupportedError(f"the compressed-tensors format {self.form!r} is not known")
        codes = QuantizedArray("weight", kinds, (MATRIX,))
        decoder = self._build_decoder(codes, scale)
        return WeightStorage(
            (codes, scale, *self.zeros(), *self.order(), *_ACTIVATION_QUANTIZATION_ARRAYS), uncut, decoder=decoder
        )

    def _build_decoder(self, codes: QuantizedArray, scale: QuantizedArray) -> WeightDecoder | None:
        """Build what decodes weights whose codes are whole numbers, packed or not, or floats of a byte each."""
        zero, groups = next(iter(self.zeros()), None), next(iter(self.order()), None)
        if codes.dtypes == ("I32",):
            return ScaledIntegers(codes, scale, zero, groups, self.bits)
        if "I8" in codes.dtypes and self.config.text("type", "int") == "int":
            return ScaledIntegers(codes, scale, zero, groups)
        return ScaledFloats(codes, scale, by_scale=True) if zero is None and groups is None else None


@dataclass(frozen=True)
class _ModuleGroup:
    """Some modules, and how their weights are stored."""

    named: Callable[[Names], bool]
    """Whether the group names a module."""
    every: bool
    """Whether it is for every linear layer that no other group names."""
    storage: WeightStorage


def _parse_scheme(config: ModelConfig) -> QuantizationScheme:
    sparse = config.values.get("sparsity_config")
    if isinstance(sparse, dict) and sparse.get("format", "dense") != "dense":
        raise UnsupportedError(f"the sparse compressed-tensors format {sparse['format']!r} is not known")
    groups = _list_groups(config)

    def group_of(names: Names) -> _ModuleGroup | None:
        return next((g for g in groups if g.named(names)), next((g for g in groups if g.every), None))

    def storage(names: Names) -> WeightStorage:
        # A weight in quantized form that no group names can only be of the kind that the others are.
        return (group_of(names) or groups[0]).storage

    ignored = match_exact_names(find_module_list(config, "ignore") or ())
    return QuantizationScheme(storage, lambda names: ignored(names) or group_of(names) is None, heads=True)


def _list_groups(config: ModelConfig) -> tuple[_ModuleGroup, ...]:
    value = config.values.get("config_groups")
    if not isinstance(value, dict) or not value or not all(isinstance(group, dict) for group in value.values()):
        raise SourceError(f"config.json has config_groups = {value!r} where a table of groups is expected")
    return tuple(_parse_group(ModelConfig(group), config.text("format", "")) for group in value.values())


def _parse_group(group: ModelConfig, form: str) -> _ModuleGroup:
    targets = find_module_list(group, "targets") or ()
    weights = group.values.get("weights")
    if isinstance(weights, dict):
        storage = _GroupWeights(ModelConfig(weights), group.text("format", form)).storage()
    else:
        storage = WeightStorage((_UNQUANTIZED_WEIGHT_ARRAY, *_ACTIVATION_QUANTIZATION_ARRAYS))
    return _ModuleGroup(
        match_exact_names([t for t in targets if t not in _LINEAR_CLASS_NAMES]),
        any(t in _LINEAR_CLASS_NAMES for t in targets),
        storage,
    )


COMPRESSED_TENSORS: Final = QuantizationMethod(
    ("compressed-tensors", "compressed_tensors"), _parse_scheme, build_list_extension("ignore")
)
