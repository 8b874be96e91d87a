"""One tool from any checkpoint layout to any other: plan, reshard, verify."""

__version__ = "0.1.0"
