"""Reads adapters as PEFT writes them."""
