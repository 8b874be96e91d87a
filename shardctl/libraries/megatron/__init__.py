"""Megatron-LM: directories of ranks (`--ckpt-format torch`) and distributed checkpoints (`torch_dist`)."""
