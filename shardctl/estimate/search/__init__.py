"""Compares meshes: what fits, what it costs, and what would make a model fit."""
