"""Estimates what a training rank holds in each moment of a step."""
