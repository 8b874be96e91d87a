"""Describes AWQ as its `gemm` kernels want it: eight interleaved output codes an integer; `gemv` and `marlin`, too.

Layout: `WQLinear_GEMM` in AutoAWQ (awq/modules/linear/gemm.py). Within an integer the codes stand in the order 0, 2, 4,
6, 1, 3, 5, 7, so that no output can be taken from it, and eight outputs are the least that can be cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.quantization.gptq import parse_bits_and_groups, refuse_kernel_order
from shardctl.models.quantization.marlin import build_marlin_storage
from shardctl.models.quantization.module_list import build_list_extension, find_module_list, match_name_parts
from shardctl.models.quantization.storage import (
    FLOAT,
    IN,
    OUT,
    AlongDim,
    OpenDim,
    PackedByInput,
    PackedRows,
    QuantizationMethod,
    QuantizationScheme,
    QuantizedArray,
    WeightStorage,
    build_packed_dim,
)

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig


_KERNEL_BITS: Final = 4
"""Bits of a code for which the order in an integer is known."""


def build_awq_storage(config: ModelConfig) -> WeightStorage:
    """Build the arrays of a weight with the bits and groups that a config says."""
    form = (config.text("version", "") or config.text("format", "gemm")).lower()
    bits, group = parse_bits_and_groups(config, "w_bit" if "w_bit" in config.values else "bits")
    if form == "gemv" and bits == _KERNEL_BITS:
        return _build_row_storage(group)
    if form == "marlin" and bits == _KERNEL_BITS:
        return build_marlin_storage("qweight", "scales", group)
    if form != "gemm":
        raise refuse_kernel_order(f"AWQ weights in the format {form!r}", "gemm")
    by_group = AlongDim(IN, group) if group > 0 else 1
    codes = QuantizedArray("qweight", ("I32",), ((AlongDim(IN), build_packed_dim(OUT, bits)),))
    zeros = QuantizedArray("qzeros", ("I32",), ((by_group, build_packed_dim(OUT, bits)),))
    scales = QuantizedArray("scales", FLOAT, ((by_group, AlongDim(OUT)),), plain=True)
    bias = QuantizedArray("bias", FLOAT, ((AlongDim(OUT),),), optional=True)
    decoder = PackedByInput(codes, scales, zeros, bits, group, interleaved=True) if bits == _KERNEL_BITS else None
    return WeightStorage((codes, zeros, scales, bias), decoder=decoder)


def _build_row_storage(group: int) -> WeightStorage:
    """Build the arrays for the `gemv` kernel (awq/modules/linear/gemv.py, `calculate_zeros_width`)."""
    codes = QuantizedArray("qweight", ("I32",), ((AlongDim(OUT), build_packed_dim(IN, _KERNEL_BITS)),))
    zeros = QuantizedArray("qzeros", ("I32",), ((AlongDim(OUT), OpenDim()),))
    scales = QuantizedArray("scales", FLOAT, ((AlongDim(OUT), OpenDim(8)),), plain=True)
    bias = QuantizedArray("bias", FLOAT, ((AlongDim(OUT),),), optional=True)
    return WeightStorage(
        (codes, zeros, scales, bias),
        uncut={IN: "row of scales with a padded end, as the gemv kernel wants it"},
        decoder=PackedRows(codes, scales, zeros, group),
    )


def _parse_scheme(config: ModelConfig) -> QuantizationScheme:
    storage = build_awq_storage(config)
    return QuantizationScheme(
        lambda _names: storage, match_name_parts(find_module_list(config, "modules_to_not_convert") or ())
    )


AWQ: Final = QuantizationMethod(("awq",), _parse_scheme, build_list_extension("modules_to_not_convert"))
