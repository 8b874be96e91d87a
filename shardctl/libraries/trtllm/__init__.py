"""The checkpoint directories of TensorRT-LLM: `rankN.safetensors` and its own `config.json`."""
