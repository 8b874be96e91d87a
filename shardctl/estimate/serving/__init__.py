"""Estimates what a serving rank holds: caches, and what the engine keeps free."""
