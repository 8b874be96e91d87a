"""Reads and writes vLLM's `sharded_state`: `model-rank-R-part-P.safetensors`."""
