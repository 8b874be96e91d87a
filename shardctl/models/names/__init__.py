"""Translates stored names into canonical ones, for the Hub, wrappers and trainers."""
