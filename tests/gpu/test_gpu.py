"""What only a device can prove. Without one all is skipped; SHARDCTL_GPU_TESTS=cpu runs there what a CPU can."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import forwarding
import loading
import local_tensor
import peaks
import pytest
import torch
from gpu_mode import BARE, GPU, ON, fake, limit_device, needs_devices, skipped
from gpu_models import LLAMA, MIXTRAL, cut, random_checkpoint

import shardctl
from shardctl.options import VerifyOptions
from shardctl.verbs.verify import verify

pytestmark = skipped
__all__ = ["fake"]


@pytest.mark.usefixtures("fake")
def test_the_ranks_compute_what_the_source_computes(tmp_path):
    for ran in forwarding.ran(tmp_path, ON):
        assert ran.status == "passed", ran
        if ran.dtype == "fp32":
            assert ran.worst <= 1e-5, ran
        assert (ran.peak_bytes is None) is (ON.device == "cpu")


def test_transformers_own_tensor_parallelism_agrees(tmp_path):
    for found in local_tensor.native(tmp_path, BARE):
        assert not found.problem, found
        assert found.apart <= 1e-5, found


@pytest.mark.usefixtures("fake")
def test_every_way_of_loading_loads_the_same_bytes(tmp_path):
    found = list(loading.ways(tmp_path, BARE))
    assert len({way.nbytes for way in found}) == 1
    assert {way.cache for way in found} == {"warm", "cold"}
    level = loading.proved(tmp_path, ON)
    assert [rank.device for rank in level.ranks] == [ON.device] * 2


@pytest.mark.usefixtures("fake")
def test_a_rank_takes_what_plan_says(tmp_path):
    source = random_checkpoint(tmp_path / "source", ON.config(MIXTRAL, 2))
    place = cut(source, tmp_path / "ranks", dp=2, ep=2)
    level = verify(place, VerifyOptions(level="load", against=source, device=ON.device)).levels[-1]
    assert level.status == "passed"
    for rank in level.ranks:
        slack = 512 * 100 if GPU else 0  # the allocator rounds each tensor up to 512 bytes
        assert rank.planned_bytes <= rank.peak_bytes <= rank.planned_bytes + slack


@needs_devices
@pytest.mark.usefixtures("fake")
def test_what_does_not_fit_the_device_now_is_no_verdict_and_no_crash(tmp_path):
    place = random_checkpoint(tmp_path / "source", ON.config(LLAMA, 2) | {"vocab_size": 400_000})
    gc.collect()
    torch.cuda.empty_cache()
    limit_device(0, 1_000_000)
    try:
        found = verify(place, VerifyOptions(level="load", device="cuda:0"))
    finally:
        limit_device(0, -1)
    assert (found.exit_code, found.levels[-1].status, found.levels[-1].findings) == (7, "unfinished", [])
    assert "do not fit on cuda:0" in found.levels[-1].reason


@needs_devices
@pytest.mark.usefixtures("fake")
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


@needs_devices
@pytest.mark.usefixtures("fake")
def test_loading_many_small_blocks_overlaps_copies_and_loses_none(tmp_path):
    from shardctl.base.workers import ExecutionOptions
    from shardctl.running.state_dict import load

    source = random_checkpoint(tmp_path / "source", ON.config(LLAMA, 2))
    place = cut(source, tmp_path / "ranks", tp=2)
    plain = shardctl.load(place, rank=1)
    for block in (64, 4096, 1 << 20):
        found = load(place, rank=1, device="cuda:0", effort=ExecutionOptions(threads=8, block=block))
        assert all(torch.equal(found[name].cpu(), tensor) for name, tensor in plain.items())


@pytest.mark.parametrize("case", peaks.CASES, ids=str)
def test_every_case_of_serving_and_training_runs_and_is_planned(case):
    (found,) = peaks.peaks(BARE, (case,))
    assert not found.problem
    assert found.low <= found.planned <= found.high
    assert (found.measured is None) is not GPU


def test_the_table_is_printed(tmp_path):
    command = [
        sys.executable,
        Path(__file__).with_name("table.py"),
        "--device",
        BARE.device,
        "--tiny",
        "--only",
        "loading",
    ]
    done = subprocess.run([*command, "--folder", tmp_path], capture_output=True, text=True, check=True)
    assert "| shardctl.load | warm |" in done.stdout
    assert "Tiny models" in done.stdout
