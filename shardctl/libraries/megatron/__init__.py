"""Reads and writes Megatron-LM's checkpoints: directories of ranks (`torch`) and `torch_dist`."""
