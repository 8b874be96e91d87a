"""Reads and writes TensorRT-LLM's checkpoint directories: `rankN.safetensors` and its own `config.json`."""
