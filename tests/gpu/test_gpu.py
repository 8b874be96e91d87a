"""What only a device can prove. Without one all is skipped; SHARDCTL_GPU_TESTS=cpu runs there what a CPU can."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import collectives
import forwarding
import loading
import local_tensor
import peaks
import pytest
import torch
from gpu_models import LLAMA, MIXTRAL, Scale, cut, random_checkpoint

import shardctl
from shardctl.options import VerifyOptions
from shardctl.verbs.verify import verify
from shardctl.verify.device import list_devices

GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(
    not GPU and os.environ.get("SHARDCTL_GPU_TESTS") != "cpu",
    reason="there is no CUDA device here; SHARDCTL_GPU_TESTS=cpu runs what a CPU can",
)
needs_gpu = pytest.mark.skipif(not GPU, reason="there is no CUDA device here")
ON = Scale("cuda:0" if GPU else "cpu", tiny=True)
"""Tests use tiny models; the table uses those of real proportions."""


def test_two_processes_can_reduce_and_broadcast_tensors_of_one_device():
    device = ON.device
    for operation in ("all_reduce", "broadcast"):
        assert collectives.outcome("gloo", operation, [device] * 2) == "right", operation


@pytest.mark.parametrize("operation", collectives.OPERATIONS)
def test_every_collective_is_told_right_from_wrong_on_the_cpu(operation):
    assert collectives.outcome("gloo", operation, ["cpu"] * 2) == "right"


@needs_gpu
def test_nccl_refuses_two_processes_on_one_device_and_the_run_ends_and_says_so():
    assert collectives.outcome("nccl", "all_reduce", ["cuda:0"] * 2) != "right"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two CUDA devices here")
@pytest.mark.parametrize("operation", collectives.OPERATIONS)
def test_nccl_with_a_device_each(operation):
    assert collectives.outcome("nccl", operation, ["cuda:0", "cuda:1"]) == "right"


def test_the_ranks_compute_what_the_source_computes(tmp_path):
    for ran in forwarding.ran(tmp_path, ON):
        assert ran.status == "passed", ran
        if ran.dtype == "fp32":
            assert ran.worst <= 1e-5, ran
        assert (ran.peak_bytes is None) is not GPU


def test_transformers_own_tensor_parallelism_agrees(tmp_path):
    for found in local_tensor.native(tmp_path, ON):
        assert not found.problem, found
        assert found.apart <= 1e-5, found


def test_every_way_of_loading_loads_the_same_bytes(tmp_path):
    found = list(loading.ways(tmp_path, ON))
    assert len({way.nbytes for way in found}) == 1
    assert {way.cache for way in found} == {"warm", "cold"}
    level = loading.proved(tmp_path, ON)
    assert [rank.device for rank in level.ranks] == [
        list_devices("auto")[n % len(list_devices("auto"))] for n in range(2)
    ]


def test_a_rank_takes_what_plan_says(tmp_path):
    source = random_checkpoint(tmp_path / "source", ON.config(MIXTRAL, 2))
    place = cut(source, tmp_path / "ranks", dp=2, ep=2)
    level = verify(place, VerifyOptions(level="load", against=source, device=ON.device)).levels[-1]
    assert level.status == "passed"
    for rank in level.ranks:
        slack = 512 * 100 if GPU else 0  # the allocator rounds each tensor up to 512 bytes
        assert rank.planned_bytes <= rank.peak_bytes <= rank.planned_bytes + slack


@needs_gpu
def test_what_does_not_fit_the_device_is_a_finding_and_not_a_crash(tmp_path):
    place = random_checkpoint(tmp_path / "source", ON.config(LLAMA, 2) | {"vocab_size": 400_000})
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1e6 / total, 0)
    try:
        level = verify(place, VerifyOptions(level="load", device="cuda:0")).levels[-1]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
    assert level.status == "failed"
    assert "do not fit on cuda:0" in level.findings[0].message


@needs_gpu
def test_a_bit_that_is_wrong_on_the_device_is_found(tmp_path):
    source = random_checkpoint(tmp_path / "source", ON.config(LLAMA, 2))
    place = cut(source, tmp_path / "ranks", tp=2)
    file = next(place.glob("shard-00002-*"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for against in (source, None):
        level = verify(place, VerifyOptions(level="load", against=against, device="cuda")).levels[-1]
        assert level.status == "failed"
        assert file.name in level.findings[0].message


@needs_gpu
def test_loading_many_small_blocks_overlaps_copies_and_loses_none(tmp_path):
    from shardctl.loading.state_dict import load
    from shardctl.workers import ExecutionOptions

    source = random_checkpoint(tmp_path / "source", ON.config(LLAMA, 2))
    place = cut(source, tmp_path / "ranks", tp=2)
    plain = shardctl.load(place, rank=1)
    for block in (64, 4096, 1 << 20):
        found = load(place, rank=1, device="cuda:0", effort=ExecutionOptions(threads=8, block=block))
        assert all(torch.equal(found[name].cpu(), tensor) for name, tensor in plain.items())


@pytest.mark.parametrize("case", peaks.CASES, ids=str)
def test_every_case_of_serving_and_training_runs_and_is_planned(case):
    (found,) = peaks.peaks(ON, (case,))
    assert not found.problem
    assert found.low <= found.planned <= found.high
    assert (found.measured is None) is not GPU


def test_the_table_is_printed(tmp_path):
    command = [
        sys.executable,
        Path(__file__).with_name("table.py"),
        "--device",
        ON.device,
        "--tiny",
        "--only",
        "loading",
    ]
    done = subprocess.run([*command, "--folder", tmp_path], capture_output=True, text=True, check=True)
    assert "| shardctl.load | warm |" in done.stdout
    assert "Tiny models" in done.stdout
