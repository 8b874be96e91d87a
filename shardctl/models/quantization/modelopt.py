"""Describes ModelOpt (NVIDIA): its number formats, one for all linear layers or one for each.

Layout: ModelOpt 0.47 (torch/export/quant_utils.py, `to_quantized_weight` and `process_layer_quant_config`;
torch/export/unified_export_hf.py, `_export_quantized_weight`), and vLLM, which reads it
(model_executor/layers/quantization/modelopt.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.base.value import value_class
from shardctl.models.quantization.module_list import (
    build_list_extension,
    find_module_list,
    list_enclosing_modules,
    match_wildcards,
)
from shardctl.models.quantization.settings import SIDECAR
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
    from collections.abc import Callable, Mapping, Sequence

    from shardctl.models.quantization.storage import Names, WeightDecoder

_MIXED_PRECISION_ALGORITHM: Final = "MIXED_PRECISION"
_FP8_CODES: Final = QuantizedArray("weight", FP8, (MATRIX,))
_INT8_CODES: Final = QuantizedArray("weight", ("I8",), (MATRIX,))
_INT4_CODES: Final = QuantizedArray("weight", ("U8",), ((AlongDim(OUT, 2), AlongDim(IN)),))
"""Two outputs a byte, the first in the lower half, each in two's complement (`pack_int4_in_uint8`)."""
_FP4_CODES: Final = QuantizedArray("weight", ("U8",), (PAIRS,))
"""Two inputs a byte, the first in the lower half (torch/quantization/qtensor/nvfp4_tensor.py)."""
_GLOBAL_SCALE_ARRAY: Final = QuantizedArray("weight_scale_2", FLOAT, PER_TENSOR[::-1])
_INPUT_SCALE_ARRAY: Final = QuantizedArray("input_scale", FLOAT, PER_TENSOR[::-1], optional=True)
_PRE_QUANT_SCALE_ARRAY: Final = QuantizedArray("pre_quant_scale", FLOAT, ((AlongDim(IN),),), optional=True, plain=True)
"""What inputs are multiplied with; absent where the norm in front of the layer has taken it in."""
_EXPONENT_SCALE_DTYPES: Final = ("U8", "F8_E8M0")


@value_class
class _NumberFormat:
    """What weights of one `quant_algo` are stored as."""

    codes: QuantizedArray
    scale: Callable[[int], QuantizedArray]
    """The scales, by how many inputs share one."""
    more: tuple[QuantizedArray, ...] = ()
    group: int = 0
    """How many inputs share a scale if the config does not say; 0 if that is not a question."""

    def build_storage(self, config: ModelConfig) -> WeightStorage:
        """Build the arrays, with the `group_size` of the config."""
        group = config.size("group_size", _find_group_size(config) or self.group) if self.group else 0
        scale = self.scale(group)
        return WeightStorage((self.codes, scale, *self.more), decoder=self._build_decoder(scale))

    def _build_decoder(self, scale: QuantizedArray) -> WeightDecoder:
        """Build what decodes the weights; W4A8_AWQ's second scale is that of the FP8 codes that its kernel computes."""
        smoothing = _PRE_QUANT_SCALE_ARRAY if _PRE_QUANT_SCALE_ARRAY in self.more else None
        if self.codes is _FP4_CODES:
            return PackedFloats(
                self.codes,
                scale,
                _GLOBAL_SCALE_ARRAY if _GLOBAL_SCALE_ARRAY in self.more else None,
                smoothing=smoothing,
            )
        if self.codes is _FP8_CODES:
            return ScaledFloats(self.codes, scale)
        halved = self.codes is _INT4_CODES
        return ScaledIntegers(self.codes, scale, halved=halved, rounded="F32" if smoothing else "", smoothing=smoothing)


def _find_group_size(config: ModelConfig) -> int:
    """Find the `group_size` of the weights in the one group of `config_groups`; 0 if there is none."""
    groups = config.values.get("config_groups")
    group = next(iter(groups.values())) if isinstance(groups, dict) and len(groups) == 1 else None
    weights = group.get("weights") if isinstance(group, dict) else None
    return ModelConfig(weights, config.file).count("group_size", 0) if isinstance(weights, dict) else 0


def _scale_tensor(_group: int) -> QuantizedArray:
    return QuantizedArray("weight_scale", FLOAT, (*PER_TENSOR[::-1], *PER_ROW))


def _scale_rows(_group: int) -> QuantizedArray:
    return QuantizedArray("weight_scale", FLOAT, PER_ROW[::-1])


def _scale_blocks(block: int) -> QuantizedArray:
    """Scales of square blocks, which ModelOpt keeps as it computes them: each dim of blocks with a dim of 1."""
    rows, columns = build_block_form(block, block)
    return QuantizedArray("weight_scale weight_scale_inv", FLOAT, ((rows, 1, columns, 1), (rows, columns)))


def _scale_groups(*dtypes: str) -> Callable[[int], QuantizedArray]:
    return lambda group: QuantizedArray("weight_scale", dtypes, (build_block_form(1, group),))


_NVFP4_FORMAT: Final = _NumberFormat(
    _FP4_CODES, _scale_groups("F8_E4M3", *SCALE), (_GLOBAL_SCALE_ARRAY, _INPUT_SCALE_ARRAY), 16
)
_MXFP4_FORMAT: Final = _NumberFormat(_FP4_CODES, _scale_groups(*_EXPONENT_SCALE_DTYPES), (_INPUT_SCALE_ARRAY,), 32)
_AWQ_FORMAT: Final = _NumberFormat(_INT4_CODES, _scale_groups(*FLOAT), (_PRE_QUANT_SCALE_ARRAY,), 128)
_FP8_PER_CHANNEL_FORMAT: Final = _NumberFormat(_FP8_CODES, _scale_rows, (_INPUT_SCALE_ARRAY,))
_FP8_BLOCK_FORMAT: Final = _NumberFormat(_FP8_CODES, _scale_blocks, (), 128)
_NUMBER_FORMATS: Final[Mapping[str, _NumberFormat]] = {
    "FP8": _NumberFormat(_FP8_CODES, _scale_tensor, (_INPUT_SCALE_ARRAY,)),
    "FP8_PER_CHANNEL_PER_TOKEN": _FP8_PER_CHANNEL_FORMAT,
    "FP8_PC_PT": _FP8_PER_CHANNEL_FORMAT,
    "FP8_PB_WO": _FP8_BLOCK_FORMAT,
    "FP8_PB_REAL": _FP8_BLOCK_FORMAT,
    "FP8_BLOCK_SCALES": _FP8_BLOCK_FORMAT,
    "NVFP4": _NVFP4_FORMAT,
    "W4A16_NVFP4": _NVFP4_FORMAT,
    "W4A8_NVFP4_FP8": _NVFP4_FORMAT,
    "NVFP4_AWQ": replace(_NVFP4_FORMAT, more=(*_NVFP4_FORMAT.more, _PRE_QUANT_SCALE_ARRAY)),
    "MXFP4": _MXFP4_FORMAT,
    "W4A8_MXFP4_FP8": _MXFP4_FORMAT,
    "MXFP8": _NumberFormat(_FP8_CODES, _scale_groups(*_EXPONENT_SCALE_DTYPES), (), 32),
    "W4A16_AWQ": _AWQ_FORMAT,
    "W4A8_AWQ": replace(_AWQ_FORMAT, more=(_GLOBAL_SCALE_ARRAY, _INPUT_SCALE_ARRAY, _PRE_QUANT_SCALE_ARRAY)),
    "W8A16": _NumberFormat(_INT8_CODES, _scale_rows),
    "W8A8_SQ_PER_CHANNEL": _NumberFormat(_INT8_CODES, _scale_rows, (_INPUT_SCALE_ARRAY, _PRE_QUANT_SCALE_ARRAY)),
}
"""By `quant_algo` in capitals, which ModelOpt writes of some in small letters."""


def _parse_scheme(config: ModelConfig) -> QuantizationScheme:
    algorithm = config.text("quant_algo", "").upper()
    if algorithm == _MIXED_PRECISION_ALGORITHM:
        return _parse_mixed_scheme(config)
    listed = find_module_list(config, "ignore", "exclude_modules")
    storage = build_modelopt_storage(config)
    if storage is None:  # only the cache of keys and values is quantized
        return QuantizationScheme(lambda _names: WeightStorage(()), lambda _names: True)
    return QuantizationScheme(lambda _names: storage, match_wildcards(listed or ()), heads=listed is not None)


def build_modelopt_storage(config: ModelConfig) -> WeightStorage | None:
    """Build how weights of the config's `quant_algo` are stored; None if it is null.

    Raises UnsupportedError for one that is not known.
    """
    algorithm = config.text("quant_algo", "").upper()
    if not algorithm:
        if "quant_algo" not in config.values:
            raise UnsupportedError(f"{config.file} says ModelOpt, but no quant_algo")
        return None
    if algorithm not in _NUMBER_FORMATS:
        raise UnsupportedError(f"ModelOpt's {algorithm} is not known")
    return _NUMBER_FORMATS[algorithm].build_storage(config)


def _parse_mixed_scheme(config: ModelConfig) -> QuantizationScheme:
    """Of every module that is named, or is in one that is, what `quantized_layers` says; others are as they were."""
    layers = config.values.get("quantized_layers")
    if not isinstance(layers, dict) or not layers or not all(isinstance(layer, dict) for layer in layers.values()):
        raise SourceError(
            f"{config.file} says {_MIXED_PRECISION_ALGORITHM}, and no table quantized_layers says which module has"
            " which precision",
            hint=f"older checkpoints have it in {SIDECAR}, which must be beside {config.file}",
        )
    storages: dict[str, WeightStorage] = {}
    known: dict[str, WeightStorage | None] = {}
    for name, layer in layers.items():
        kind = f"{layer.get('quant_algo')} {layer.get('group_size')}"
        if kind not in known:
            known[kind] = build_modelopt_storage(ModelConfig(layer, config.file))
        storage = known[kind]
        if storage is not None:
            storages[name] = storage
    if not storages:
        raise UnsupportedError(
            f"{config.file} says {_MIXED_PRECISION_ALGORITHM}, but quantized_layers names no precision"
        )

    def find(names: Names) -> WeightStorage | None:
        around = (around for name in names for around in list_enclosing_modules(name))
        return next((storages[module] for module in around if module in storages), None)

    usual = next(iter(storages.values()))  # of what is quantized though the config does not name it
    return QuantizationScheme(
        lambda names: find(names) or usual,
        lambda names: find(names) is None,
        heads=True,
        example=next(iter(storages)),
    )


def _spare_modules(settings: Mapping[str, Any], decoded: Sequence[str], plain: Sequence[str]) -> Mapping[str, Any]:
    """Return settings that leave modules as they are: out of the table of a mixed precision, or in the list."""
    layers = settings.get("quantized_layers")
    if isinstance(layers, dict):
        settings = {**settings, "quantized_layers": {n: said for n, said in layers.items() if n not in decoded}}
    return _extend_list(settings, decoded, plain)


_extend_list: Final = build_list_extension("ignore", "exclude_modules")
MODELOPT: Final = QuantizationMethod(("modelopt", "modelopt_fp8", "modelopt_fp4"), _parse_scheme, _spare_modules)
