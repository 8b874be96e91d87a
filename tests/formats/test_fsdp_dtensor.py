"""What Megatron-FSDP saved is read, and torch goes on from it with the losses that Megatron-FSDP had."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from shardctl.api import Mesh, ReshardOptions, SourceOptions, reshard
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.libraries.registry import detect_format
from shardctl.storage.local import LocalSource

ROOT = Path(__file__).parents[2]
HERE = ROOT / "fixtures" / "fsdp_dtensor"
CASES = sorted(path.parent.name for path in HERE.glob("*/losses.json"))


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
    hf = HERE / case / "hf"
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
    reshard(HERE / case, tmp_path / "out", asked, source_options=SourceOptions(config=HERE / case / "hf"))
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
