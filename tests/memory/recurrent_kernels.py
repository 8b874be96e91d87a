"""What kernels of recurrent layers keep: autograd functions that save what theirs do, and compute nothing.

Each saves the tensors that the function of its name saves in causal-conv1d 1.7, mamba-ssm 2.3.2 or
flash-linear-attention 0.6, of the same shapes and types. `tests/memory/test_activations_recurrent.py` compares the
estimate with what those functions themselves allocate.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

CHUNK = 64
"""Tokens that flash-linear-attention takes at once."""


class ShortConvolution(torch.autograd.Function):
    """`CausalConv1dFn`: a convolution over the last tokens that keeps its input."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError


class DeltaRule(torch.autograd.Function):
    """`ChunkGatedDeltaRuleFunction` and `ChunkKDAFunction`, which has one more product of each chunk and the decays
    that it is given, of each channel."""

    @staticmethod
    def forward(ctx, queries, keys, values, decays, strengths):
        rows = [torch.empty(one.shape[:-1], dtype=torch.float32) for one in (queries, keys)]
        normed = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in (queries, keys)]
        sums = torch.empty_like(decays, dtype=torch.float32)
        products = [keys.new_empty(*decays.shape[:3], CHUNK) for _ in range(2 if decays.dim() == keys.dim() else 1)]
        given = [decays.contiguous()] if decays.dim() == keys.dim() else []
        kept = values.contiguous()
        ctx.save_for_backward(*normed, *rows, kept, sums, strengths.contiguous(), *products, *given)
        return torch.empty_like(kept)

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError


class SplitScan(torch.autograd.Function):
    """`MambaSplitConv1dScanCombinedFn` with a norm and a projection behind: what was projected, results of the scan,
    and a statistic of the norm of each group."""

    @staticmethod
    def forward(ctx, projected, negative, weight, groups):
        results = projected.new_empty(*projected.shape[:2], weight.shape[1])
        ctx.save_for_backward(projected, negative, results, torch.empty(*projected.shape[:2], groups))
        return projected.new_empty(*projected.shape[:2], weight.shape[0])

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError


def convolve(x, weight, *_, **__):
    return ShortConvolution.apply(x, weight)


def compute_delta_rule(query, key, value, g, beta, **_):
    return DeltaRule.apply(query, key, value, g, beta), None


def scan_in_chunks(projected, _weight, _bias, _steps, negative, *, outproj_weight, ngroups=1, **_):
    return SplitScan.apply(projected, negative, outproj_weight, ngroups)


INSTEAD = {
    "causal_conv1d_fn": convolve,
    "chunk_kimi_delta_attention": compute_delta_rule,
    "torch_chunk_gated_delta_rule": compute_delta_rule,
    "mamba2_split_conv1d_scan_combined": scan_in_chunks,
}
"""By the name that transformers' modules call a kernel."""


def list_kernels(model: torch.nn.Module) -> list[tuple[Any, str, Any]]:
    """List what stands in for the kernels that a model's module calls: where, its name, and the function."""
    own = sys.modules[type(model).__module__]
    return [(own, name, instead) for name, instead in INSTEAD.items() if hasattr(own, name)]
