"""Knows what the programs load that people convert checkpoints for: vLLM, SGLang, transformers, TGI and llama.cpp."""
