"""Knows devices: their memory, speed and links, with the source of each figure."""
