"""Reads and writes the directories of DeepSeek's own inference code: `modelI-mpN.safetensors`."""
