"""Quantised weights: in which arrays each method stores them, and how those are cut with the weight."""

from shardctl.models.quantisation.quantiser import METHODS, find_quantisation_config, quantise_model

__all__ = ["METHODS", "find_quantisation_config", "quantise_model"]
