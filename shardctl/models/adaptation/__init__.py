"""Computes weights that adapters have changed, tile by tile and in bounded memory."""
