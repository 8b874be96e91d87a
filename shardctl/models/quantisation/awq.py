"""Describes AWQ as its `gemm` kernels want it: eight interleaved output codes an integer.

Layout: `WQLinear_GEMM` in AutoAWQ (awq/modules/linear/gemm.py). Within an integer the codes stand in the order 0, 2, 4,
6, 1, 3, 5, 7, so that no output can be taken from it, and eight outputs are the least that can be cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.quantisation.gptq import parse_bits_and_groups, refuse_kernel_order
from shardctl.models.quantisation.module_list import find_module_list, match_name_parts
from shardctl.models.quantisation.storage import (
    FLOAT,
    IN,
    OUT,
    AlongDim,
    PackedByInput,
    QuantisationMethod,
    QuantisationScheme,
    QuantisedArray,
    WeightStorage,
    build_packed_dim,
)

if TYPE_CHECKING:
    from shardctl.models.config import ModelConfig


_KERNEL_BITS: Final = 4
"""Bits of a code for which the order in an integer is known."""


def build_awq_storage(config: ModelConfig) -> WeightStorage:
    """Build the arrays of a weight with the bits and groups that a config says."""
    form = (config.text("version", "") or config.text("format", "gemm")).lower()
    if form != "gemm":
        raise refuse_kernel_order(f"AWQ weights in the format {form!r}", "gemm")
    bits, group = parse_bits_and_groups(config, "w_bit" if "w_bit" in config.values else "bits")
    by_group = AlongDim(IN, group) if group > 0 else 1
    codes = QuantisedArray("qweight", ("I32",), ((AlongDim(IN), build_packed_dim(OUT, bits)),))
    zeros = QuantisedArray("qzeros", ("I32",), ((by_group, build_packed_dim(OUT, bits)),))
    scales = QuantisedArray("scales", FLOAT, ((by_group, AlongDim(OUT)),), plain=True)
    bias = QuantisedArray("bias", FLOAT, ((AlongDim(OUT),),), optional=True)
    decoder = PackedByInput(codes, scales, zeros, bits, group, interleaved=True) if bits == _KERNEL_BITS else None
    return WeightStorage((codes, zeros, scales, bias), decoder=decoder)


def _parse_scheme(config: ModelConfig) -> QuantisationScheme:
    storage = build_awq_storage(config)
    return QuantisationScheme(
        lambda _names: storage, match_name_parts(find_module_list(config, "modules_to_not_convert") or ())
    )


AWQ: Final = QuantisationMethod(("awq",), _parse_scheme)
