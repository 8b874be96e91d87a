"""Weights of single ranks of known models, as one would add them up by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardctl.options import ReshardOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.plan import plan

PUBLIC = Path(__file__).parents[2] / "fixtures" / "configs_public"
BF16 = 2


def planned(name, **mesh):
    return plan(PUBLIC / f"{name}.json", ReshardOptions(mesh=Mesh.of(**mesh)))


def test_mixtral_on_eight_devices_with_one_expert_each():
    ranks = planned("mixtral-8x7b", dp=8, ep=8).ranks
    expert = 3 * 4096 * 14336
    layer = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 2 * 4096 + 8 * 4096 + expert
    assert [rank.weight_bytes for rank in ranks] == [BF16 * (32 * layer + 2 * 32000 * 4096 + 4096)] * 8


@pytest.mark.parametrize(("tp", "kv_heads"), [(4, 2), (8, 1)])
def test_llama_70b_cut_by_heads(tp, kv_heads):
    ranks = planned("llama-3.1-70b", tp=tp).ranks
    attention = 2 * 8192 * 8192 // tp + 2 * kv_heads * 128 * 8192
    layer = attention + 3 * 8192 * 28672 // tp + 2 * 8192
    assert {rank.weight_bytes for rank in ranks} == {BF16 * (80 * layer + 2 * 128256 * 8192 // tp + 8192)}


def test_deepseek_v3_as_stored_in_fp8_on_32_devices():
    """Codes of one byte, a scale in fp32 for each block of 128 x 128, and what is not quantized."""
    ranks = planned("deepseek-v3", dp=32, ep=32).ranks

    def coded(rows, columns):
        return rows * columns + 4 * -(-rows // 128) * -(-columns // 128)

    hidden, heads = 7168, 128
    attention = coded(1536, hidden) + coded(heads * 192, 1536) + coded(576, hidden)
    attention += coded(heads * 256, 512) + coded(hidden, heads * 128) + BF16 * (1536 + 512)
    expert = 2 * coded(2048, hidden) + coded(hidden, 2048)
    # The shared expert on every rank, and 8 of 256; the router in bf16, its bias in fp32.
    mixture = (1 + 8) * expert + BF16 * 256 * hidden + 4 * 256
    dense = 2 * coded(18432, hidden) + coded(hidden, 18432)
    layers = 61 * (attention + BF16 * 2 * hidden) + 58 * mixture + 3 * dense
    ends = BF16 * (2 * 129280 * hidden + hidden)
    found = {rank.weight_bytes for rank in ranks}
    assert found == {layers + ends}
