"""Quantizes and dequantizes the weights of an opened checkpoint."""
