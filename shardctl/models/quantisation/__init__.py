"""Describes quantised weights: the arrays in which each method stores them, and how those are cut."""

from shardctl.models.quantisation.quantiser import METHODS, quantise_model
from shardctl.models.quantisation.settings import complete_config, find_quantisation_config

__all__ = ["METHODS", "complete_config", "find_quantisation_config", "quantise_model"]
