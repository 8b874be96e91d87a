"""Reads and writes the files of other libraries: one folder for each, listed in `registry`."""
