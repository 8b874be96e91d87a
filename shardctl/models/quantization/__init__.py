"""Describes quantized weights: the arrays in which each method stores them, and how those are cut."""

from shardctl.models.quantization.mxfp4 import list_block_encodings
from shardctl.models.quantization.quantizer import quantize_model
from shardctl.models.quantization.settings import complete_config, drop_quantization_config, find_quantization_config
from shardctl.models.quantization.torchao import drop_torchao_metadata

__all__ = [
    "complete_config",
    "drop_quantization_config",
    "drop_torchao_metadata",
    "find_quantization_config",
    "list_block_encodings",
    "quantize_model",
]
