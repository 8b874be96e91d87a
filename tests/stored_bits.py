"""Gives the bits of tensors of torch, which tests compare: a NaN equals the same NaN, and -0.0 differs from 0.0."""

from __future__ import annotations

import torch


def bits(value: torch.Tensor) -> bytes:
    """The bytes of a tensor in row-major order, wherever and however it lies."""
    plain = value.detach().cpu().as_subclass(torch.Tensor).clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
