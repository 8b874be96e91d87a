"""What Megatron-FSDP saved is read and written: torch and Megatron-FSDP itself go on from it with the same losses."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from shardctl.api import Mesh, ReshardOptions, SourceOptions, reshard
from shardctl.base.errors import PartitionError, UsageError
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.libraries.registry import detect_format
from shardctl.storage.local import LocalSource

ROOT = Path(__file__).parents[2]
HERE = ROOT / "fixtures" / "fsdp_dtensor"
TRAINING = importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.training")
CASES = sorted(path.parent.name for path in HERE.glob("*/losses.json"))
MODELS = {case: HERE / ("moe" if case == "moe" else "dense") / "hf" for case in CASES}


def load_all(place: Path) -> dict[str, torch.Tensor]:
    metadata = FileSystemReader(place).read_metadata()
    held = {
        key: torch.empty(each.size, dtype=each.properties.dtype)
        for key, each in metadata.state_dict_metadata.items()
        if hasattr(each, "size") and hasattr(each, "properties")
    }
    _load_state_dict(held, storage_reader=FileSystemReader(place), no_dist=True)
    return held


@pytest.mark.parametrize("case", CASES)
def test_torch_goes_on_with_the_losses_of_megatron_fsdp(case, tmp_path):
    experts = {"experts": "fused"} if case == "moe" else {}
    asked = ReshardOptions(to="dcp", mesh=Mesh.of(fsdp=2), optimizer_states="keep", **experts)
    hf = MODELS[case]
    reshard(HERE / case, tmp_path / "dcp", asked, source_options=SourceOptions(config=hf))
    words = [sys.executable, "-m", "fixtures.torch_dist.resume_torch", "resume", hf, tmp_path / "dcp"]
    done = subprocess.run(
        [*map(str, words), str(tmp_path / "losses.json")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    expected = json.loads((HERE / case / "losses.json").read_text())
    assert json.loads((tmp_path / "losses.json").read_text()) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_torch_dist_holds_the_same_arrays(case, tmp_path):
    """Compared with what torch itself reads of Megatron-FSDP's files."""
    asked = ReshardOptions(to="torch_dist", optimizer_states="keep")
    reshard(HERE / case, tmp_path / "out", asked, source_options=SourceOptions(config=MODELS[case]))
    ours, theirs = load_all(tmp_path / "out" / "iter_0000002"), load_all(HERE / case / "iter_0000002")
    for state, there in (("exp_avg", "optimizer.state.module.module"), ("exp_avg_sq", "optimizer.state.module.module")):
        for number in range(2):
            name = "self_attention.linear_qkv.weight"
            assert torch.equal(
                ours[f"optimizer.state.{state}.decoder.layers.{name}"][number],
                theirs[f"{there}.decoder.layers.{number}.{name}.{state}"],
            )
    assert torch.equal(ours["output_layer.weight"], theirs["model.module.output_layer.weight"])


def test_it_is_told_from_saves_of_torch():
    assert detect_format(LocalSource(HERE / CASES[0])).name == "torch_dist"
    with open_checkpoint(HERE / CASES[0]) as checkpoint:
        training = checkpoint.manifest.training
        assert training.notes[0].startswith("saved by Megatron-FSDP (fsdp_dtensor)")
        assert (training.step, [group.settings["wd_mult"] for group in training.groups]) == (2, [1.0, 0.0])


def find_keys(place: Path) -> dict[str, tuple[int, ...] | None]:
    """Every key with the shape of its tensor, wrappers left out: fixtures of fp32 have one less."""
    found = FileSystemReader(place / "iter_0000002").read_metadata().state_dict_metadata
    return {
        re.sub(r"(module\.)+", "", key): tuple(each.size) if hasattr(each, "size") else None
        for key, each in found.items()
    }


def write_again(case: str, out: Path, **more) -> None:
    asked = ReshardOptions(to="fsdp_dtensor", optimizer_states="keep", megatron="layers=local", **more)
    reshard(HERE / case, out, asked, source_options=SourceOptions(config=MODELS[case]))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mesh", [{}, {"tp": 2, "dp": 2, "ep": 2}])
def test_every_key_of_megatron_fsdp_is_written(case, mesh, tmp_path):
    write_again(case, tmp_path / "out", mesh=Mesh.of(**mesh))
    ours, theirs = find_keys(tmp_path / "out"), find_keys(HERE / case)
    assert theirs.items() <= ours.items()
    held, expected = (load_all(place / "iter_0000002") for place in (tmp_path / "out", HERE / case))
    held, expected = ({re.sub(r"(module\.)+", "", k): v for k, v in each.items()} for each in (held, expected))
    assert all(torch.equal(held[key], tensor) for key, tensor in expected.items())
    assert {key for key in held if key not in expected} == set()


def test_the_optimizer_knows_parameters_behind_three_wrappers(tmp_path):
    """`load_checkpoint` looks for them there, because models with a gate are trained in 16 bits (`Float16Module`)."""
    write_again("dense", tmp_path / "out", dtype="bf16")
    found = FileSystemReader(tmp_path / "out" / "iter_0000002").read_metadata().state_dict_metadata
    assert "optimizer.state.module.module.module.output_layer.weight.exp_avg" in found
    assert found["model.module.output_layer.weight"].properties.dtype == torch.float32


def test_experts_that_are_divided_have_groups_of_their_own(tmp_path):
    for mesh in ({}, {"dp": 2, "ep": 2}):
        out = tmp_path / f"ep{len(mesh)}"
        write_again("moe", out, mesh=Mesh.of(**mesh))
        expert = "decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight"
        key = f"optimizer.param_to_group_meta.module.module.module.{expert}"
        held = {f"{key}.is_expert_parallel": None, f"{key}.lr": None}
        _load_state_dict(held, storage_reader=FileSystemReader(out / "iter_0000002"), no_dist=True)
        assert held == {f"{key}.is_expert_parallel": bool(mesh), f"{key}.lr": 2e-3}


def test_stages_and_what_megatron_fsdp_has_not_are_refused(tmp_path):
    with pytest.raises(PartitionError, match="counts the layers of every stage from 0"):
        write_again("dense", tmp_path / "out", mesh=Mesh.of(pp=2))
    for part in ("virtual=2", "padding=last-row", "layers=local,experts=grouped"):
        asked = ReshardOptions(to="fsdp_dtensor", megatron=part)
        with pytest.raises(UsageError):
            reshard(HERE / "dense" / "hf", tmp_path / "out", asked)


@pytest.mark.engine
@pytest.mark.skipif(not TRAINING, reason="megatron-core 0.19 with Megatron-LM's training loop is not installed")
@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        ("llama", ("tp=2", "dp=2")),
        ("qwen3_moe", ("tp=2", "ep=2", "dp=2")),
        ("glm4-moe-predicting", ("dp=2",)),
        ("gpt-oss", ("dp=2",)),
        ("qwen3_moe", ("tp=2", "ep=2", "engine=1")),
    ],
)
def test_megatron_fsdp_goes_on_with_its_own_losses(model, mesh, tmp_path):
    """Straight, and by way of torch's DCP; in bfloat16 `load_checkpoint` itself loads, and asks for every key."""
    hf = tmp_path / "hf"

    def run(module: str, *words: object) -> None:
        command = [sys.executable, "-m", module, *map(str, words)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]

    def convert(source: Path, out: Path, to: str, **more) -> None:
        asked = ReshardOptions(to=to, optimizer_states="keep", mesh=Mesh.of(**numbers), **more)
        reshard(source, out, asked, source_options=SourceOptions(config=hf))

    numbers = {key: int(value) for key, value in (each.split("=") for each in mesh)}
    engine = numbers.pop("engine", 0)
    if "-" in model:
        run("fixtures.megatron.trained", hf, model, "bfloat16")
    else:
        run("fixtures.torch_dist.resume", "model", hf, model, "bfloat16")
    run("fixtures.fsdp_dtensor.resume", "train", hf, tmp_path / "run", tmp_path / "run.json", *mesh)
    there = {"megatron": "experts=grouped" if engine else "layers=local", "dtype": "bf16"}
    convert(tmp_path / "run", tmp_path / "straight", "fsdp_dtensor", **there)
    convert(tmp_path / "run", tmp_path / "dcp", "dcp")
    convert(tmp_path / "dcp", tmp_path / "back", "fsdp_dtensor", **there)
    for name in ("run", "straight", "back"):
        run("fixtures.fsdp_dtensor.resume", "resume", hf, tmp_path / name, tmp_path / f"{name}.again.json", *mesh)
        assert json.loads((tmp_path / f"{name}.again.json").read_text()) == json.loads(
            (tmp_path / "run.json").read_text()
        )
