"""Holds what tables of families are made of: rows, dims, traits, and the model that they give."""
