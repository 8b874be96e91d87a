"""The memory law for DeepSpeed's checkpoints: 300 MB of flat partitions are read in a fraction of that."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_memory import MIB, assert_kept, linux, measured

sys.path.append(str(Path(__file__).parent / "formats"))
from deepspeed_builder import joined, scattered

RANKS = 4


@pytest.fixture(scope="module")
def weights():
    """25 million parameters, in matrices that ranks cut at odd places."""
    torch.manual_seed(1)
    return {f"layers.{n}.weight": torch.randn(1003, 1021) for n in range(24)} | {"head": torch.randn(777, 1001)}


@linux
@pytest.mark.parametrize("build", [scattered, joined])
def test_flat_partitions_are_read_within_the_limit(build, weights, tmp_path):
    place = build(tmp_path / "made", weights, RANKS)
    assert sum(f.stat().st_size for f in place.rglob("*")) > 290e6
    run = measured(place, tmp_path / "out", "--memory", "96MiB", "--threads", 2)
    assert_kept(run, 96 * MIB)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
