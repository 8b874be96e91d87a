"""Safetensors files: plain Hugging Face checkpoints, and directories of ranks."""
