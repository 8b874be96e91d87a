"""What holds on a machine with any number of GPUs: which device is used, by whom, and that no other one is touched."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from gpu_mode import FAKE, fake, limit_device, needs_devices, needs_gpu
from gpu_models import LLAMA, TINY, cut, random_checkpoint

from shardctl.options import VerifyOptions
from shardctl.running.device import list_devices
from shardctl.running.forward.numerics import record_unstable_kernels
from shardctl.verbs.verify import verify

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [needs_devices, pytest.mark.usefixtures("fake")]
MESHES = {1: {"tp": 2}, 2: {"tp": 2}, 4: {"pp": 2, "tp": 2}, 8: {"pp": 2, "fsdp": 2, "tp": 2}}
"""For each number of GPUs a mesh that uses all of them; with one, two ranks share it."""
__all__ = ["fake"]


def degrees() -> dict[str, int]:
    return MESHES[max(number for number in MESHES if number <= torch.cuda.device_count())]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("several")
    config = {**LLAMA, **TINY, "num_hidden_layers": 2, "dtype": "float32"}
    source = random_checkpoint(base / "source", config)
    return source, cut(source, base / "ranks", **(MESHES[2] if FAKE else degrees()))


def test_each_rank_is_loaded_onto_its_device(made):
    source, ranks = made
    level = verify(ranks, VerifyOptions(level="load", against=source, device="cuda")).levels[-1]
    assert level.status == "passed", (level.reason, level.findings)
    places = list_devices("cuda")
    assert [rank.device for rank in level.ranks] == [places[rank.rank % len(places)] for rank in level.ranks]


def test_a_process_for_each_rank_after_this_one_has_used_the_devices(made):
    source, ranks = made
    torch.zeros(1, device="cuda:0")
    level = verify(ranks, VerifyOptions(level="forward", against=source, device="cuda", processes=8)).levels[-1]
    assert level.status == "passed", (level.reason, level.findings)
    assert "processes over gloo" in level.forward.engine
    assert level.forward.device.split(", ") == list_devices("cuda")[: len(level.forward.device.split(", "))]
    assert level.forward.worst.error <= 1e-5
    assert not any("one process" in note for note in level.notes)


def test_processes_share_one_device(made):
    source, ranks = made
    last = list_devices("cuda")[-1]
    level = verify(ranks, VerifyOptions(level="forward", against=source, device=last, processes=8)).levels[-1]
    assert level.status == "passed", (level.reason, level.findings)
    assert level.forward.device == last


PROGRAM = """
import sys, torch
from shardctl.options import VerifyOptions
from shardctl.verbs.verify import verify
if __name__ == "__main__":
    found = verify(sys.argv[2], VerifyOptions(level="forward", against=sys.argv[1], device=sys.argv[3]))
    print([level.status for level in found.levels], [level.reason for level in found.levels])
    print([n for n in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(n)])
"""


@needs_gpu
def test_no_other_device_is_touched(made):
    """A context takes some hundred MB, and fails where another program has the device for itself."""
    number = torch.cuda.device_count() - 1
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, made), f"cuda:{number}"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert said[-2].startswith("['passed', 'passed', 'passed', 'passed', 'passed']"), said
    assert said[-1] == f"[{number}]"


@needs_gpu
def test_numbers_count_what_the_environment_shows(made):
    number = torch.cuda.device_count() - 1
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    visible = {"CUDA_VISIBLE_DEVICES": shown[number] if len(shown) > number and shown[number] else str(number)}
    command = [sys.executable, "-c", PROGRAM, *map(str, made), "cuda:0"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **visible})
    assert said.stdout.splitlines()[-1] == "[0]"


def test_a_device_without_memory_that_nobody_named_is_left(made):
    source, ranks = made
    gc.collect()
    torch.cuda.empty_cache()
    limit_device(0, 1000)
    try:
        found = verify(ranks, VerifyOptions(level="forward", against=source, virtual=True))
        named = verify(ranks, VerifyOptions(level="forward", against=source, virtual=True, device="cuda:0"))
    finally:
        limit_device(0, -1)
    assert found.ok, found.findings
    following = "cuda:1" if torch.cuda.device_count() > 1 else "cpu"
    assert found.levels[-1].forward.device == following
    assert {rank.device for rank in found.levels[-2].ranks} == {following}
    assert any("because cuda:0 has too little free memory" in note for note in found.levels[-1].notes)
    assert named.exit_code == 7
    assert [level.status for level in named.levels[-2:]] == ["unfinished", "unfinished"]


@needs_gpu
def test_kernels_that_do_not_give_the_same_bits_each_time_are_named():
    found: dict[str, None] = {}
    with record_unstable_kernels("cuda:0", found):
        values = torch.rand(1 << 20, device="cuda:0")
        torch.zeros(10, device="cuda:0").index_add_(0, torch.randint(10, (1 << 20,), device="cuda:0"), values)
        torch.nn.functional.conv1d(torch.rand(1, 8, 64, device="cuda:0"), torch.rand(8, 8, 3, device="cuda:0"))
        assert torch.equal(values.cumsum(0), values.cumsum(0))
    assert not found, "of these torch has kernels that do"
    with record_unstable_kernels("cuda:0", found):
        torch.histc(values)
    assert any("histc" in name for name in found), found
