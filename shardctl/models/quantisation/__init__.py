"""Describes quantised weights: the arrays in which each method stores them, and how those are cut."""

from shardctl.models.quantisation.quantiser import METHODS, find_quantisation_config, quantise_model

__all__ = ["METHODS", "find_quantisation_config", "quantise_model"]
