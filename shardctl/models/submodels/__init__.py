"""Describes models inside models: towers, text models, drafters."""
