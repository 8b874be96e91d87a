"""Answers what readers of every library ask of a directory: indexes, links, side files, impostors."""
