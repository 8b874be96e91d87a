"""Reads and writes safetensors files: plain Hugging Face checkpoints, and directories of ranks."""
