"""Reads Orbax checkpoints of JAX."""
