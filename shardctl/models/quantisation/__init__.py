"""Quantised weights: in which arrays each method stores them, and how those are cut with the weight."""

from shardctl.models.quantisation.quantiser import METHODS, quantisation_config, quantise

__all__ = ["METHODS", "quantisation_config", "quantise"]
