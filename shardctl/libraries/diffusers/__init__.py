"""Reads whole pipelines of diffusers."""
