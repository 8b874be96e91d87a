"""Holds what every part builds on: errors, types of elements, value classes, amounts, workers."""
