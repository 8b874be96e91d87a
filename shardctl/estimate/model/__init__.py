"""Describes a model for estimates: its layers, its tensors by kind, and what each rank holds."""
