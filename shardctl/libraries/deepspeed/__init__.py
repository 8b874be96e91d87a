"""Reads DeepSpeed checkpoints of every ZeRO stage, and reads and writes Universal Checkpoints."""
