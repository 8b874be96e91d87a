"""Reads Grok-2 as xAI publishes it."""
