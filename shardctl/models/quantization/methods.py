"""Lists the methods of quantization, and finds what a config means by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.models.quantization.autoround import AUTOROUND
from shardctl.models.quantization.awq import AWQ
from shardctl.models.quantization.bitsandbytes import BITSANDBYTES
from shardctl.models.quantization.compressed_tensors import COMPRESSED_TENSORS
from shardctl.models.quantization.fp8 import FBGEMM, FINE_GRAINED
from shardctl.models.quantization.gptq import GPTQ
from shardctl.models.quantization.hqq import HQQ
from shardctl.models.quantization.mlx import find_mlx_settings
from shardctl.models.quantization.modelopt import MODELOPT
from shardctl.models.quantization.module_list import build_list_extension, find_module_list, match_name_parts
from shardctl.models.quantization.mxfp4 import MXFP4
from shardctl.models.quantization.quark import QUARK
from shardctl.models.quantization.settings import find_quantization_config, name_method
from shardctl.models.quantization.storage import (
    FLOAT,
    IN,
    OUT,
    AffineWords,
    AlongDim,
    QuantizationMethod,
    QuantizationScheme,
    QuantizedArray,
    WeightStorage,
    build_block_form,
    build_packed_dim,
)
from shardctl.models.quantization.torchao import TORCHAO
from shardctl.models.tables.config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

_SUPPORTED_BIT_WIDTHS: Final = (2, 4, 8)
_SKIPPED_MODULES_KEY: Final = "modules_to_not_convert"


def _parse_scheme(config: ModelConfig) -> QuantizationScheme:
    bits, group = config.size("bits", 4), config.size("group_size", 64)
    if bits not in _SUPPORTED_BIT_WIDTHS:
        raise SourceError(
            f"{config.file} has bits = {bits} where one of {', '.join(map(str, _SUPPORTED_BIT_WIDTHS))} is expected"
        )
    codes = QuantizedArray("weight", ("U32",), ((AlongDim(OUT), build_packed_dim(IN, bits)),))
    by_group = (build_block_form(1, group),)
    scales, biases = (QuantizedArray(name, FLOAT, by_group) for name in ("scales", "qbiases"))
    bias = QuantizedArray("bias", FLOAT, ((AlongDim(OUT),),), optional=True)
    storage = WeightStorage((codes, scales, biases, bias), decoder=AffineWords(codes, scales, biases, bits))
    listed = find_module_list(config, _SKIPPED_MODULES_KEY)
    return QuantizationScheme(lambda _names: storage, match_name_parts(listed or ()), heads=listed is not None)


_METAL_METHOD: Final = QuantizationMethod(("metal",), _parse_scheme, build_list_extension(_SKIPPED_MODULES_KEY))


def _refuse_packed(settings: ModelConfig) -> None:
    """Return nothing where weights are rounded while a model runs; raises UnsupportedError where they are packed."""
    linear, mode = settings.text("linear_class", "bitlinear"), settings.text("quantization_mode", "offline")
    if (linear, mode) == ("autobitlinear", "online"):
        return
    raise UnsupportedError(
        "the packed weights of BitNet cannot be cut: each byte holds four rows that are a quarter of the matrix apart, "
        "so that no run of packed rows is a run of heads",
        hint="on one device they are converted as they are; cut the model whose weights are bfloat16",
    )


_BITNET_METHOD: Final = QuantizationMethod(("bitnet",), _refuse_packed)

METHODS: Final[tuple[QuantizationMethod, ...]] = (
    AUTOROUND,
    AWQ,
    _BITNET_METHOD,
    BITSANDBYTES,
    COMPRESSED_TENSORS,
    FBGEMM,
    FINE_GRAINED,
    GPTQ,
    HQQ,
    _METAL_METHOD,
    MODELOPT,
    QUARK,
    TORCHAO,
    MXFP4,
)
"""Every method; to add one, write its file and name it here."""


def find_method(name: str) -> QuantizationMethod | None:
    """Find the method that a config calls `name`, in small letters; None if it is not known."""
    return next((method for method in METHODS if name in method.names), None)


def read_scheme(config: Mapping[str, object]) -> QuantizationScheme | None:
    """Read what a config says of quantized weights; None if it says nothing, or the family's own table does.

    Raises UnsupportedError for a method that is not known, and SourceError for settings that make no sense.
    """
    settings = find_quantization_config(config)
    if settings is None:
        return None
    name = name_method(settings)
    method = find_method(name)
    if method is None:
        raise UnsupportedError(
            _describe_unknown_method(name, config),
            hint="on one device they are converted as they are; for a mesh, say how they are cut with --rules FILE",
        )
    around = {"expert_dtype": config.get("expert_dtype"), "model_dtype": ModelConfig(config).dtype().name}
    return method.read(settings.over(around))  # DeepSeek-V4 and torchao say some of it there


def _describe_unknown_method(name: str, config: Mapping[str, object]) -> str:
    if not name and find_mlx_settings(config):
        return "the weights are quantized by MLX, and there are no files to decode"
    return f"quantized weights by {name!r} are not known" if name else "quantization_config names no quant_method"
