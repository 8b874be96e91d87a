"""Copies what a plan says in bounded memory, can resume, and computes digests on the way."""
