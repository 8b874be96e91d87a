"""Describes models inside models: towers, text models, draft models."""
