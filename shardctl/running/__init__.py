"""Loads tensors of a checkpoint into this process or onto devices, and checks that they arrived."""
