"""Checks a checkpoint: its structure from headers, its content element by element."""
