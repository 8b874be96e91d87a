"""Reads and writes Orbax checkpoints of JAX."""
