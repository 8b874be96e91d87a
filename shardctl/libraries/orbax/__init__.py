"""Orbax checkpoints of JAX."""
