"""Describes quantised weights: the arrays in which each method stores them, and how those are cut."""

from shardctl.models.quantization.mxfp4 import list_block_encodings
from shardctl.models.quantization.quantiser import quantise_model
from shardctl.models.quantization.settings import complete_config, drop_quantisation_config, find_quantisation_config
from shardctl.models.quantization.torchao import drop_torchao_metadata

__all__ = [
    "complete_config",
    "drop_quantisation_config",
    "drop_torchao_metadata",
    "find_quantisation_config",
    "list_block_encodings",
    "quantise_model",
]
