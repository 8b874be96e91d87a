"""Quantizes weights to the nearest codes, a tile at a time, as compressed-tensors and LLM Compressor do."""
