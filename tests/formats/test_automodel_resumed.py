"""NeMo Automodel's classes go on from what shardctl makes of a save of torch, and torch from a save of theirs."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardctl.api import ReshardOptions, SourceOptions, reshard

ROOT = Path(__file__).parents[2]
PROGRAMS = {"automodel": "fixtures.automodel.resume", "torch": "fixtures.torch_dist.resume_torch"}
MODELS = {"llama": "torch_dist/hf/llama", "qwen3": "torchtitan/qwen3/source"}
INSTALLED = importlib.util.find_spec("nemo_automodel") is not None
pytestmark = [pytest.mark.engine, pytest.mark.skipif(not INSTALLED, reason="nemo_automodel not installed")]


def run_trainer(trainer: str, action: str, hf: Path, folder: Path) -> list[float]:
    losses = folder.with_suffix(".json")
    command = [sys.executable, "-m", PROGRAMS[trainer], action, str(hf), str(folder), str(losses)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(losses.read_text())


@pytest.mark.parametrize("case", MODELS)
def test_either_goes_on_from_the_other(case, tmp_path):
    """To the last bit, because both compute with the same class."""
    hf = ROOT / "fixtures" / MODELS[case]
    read = SourceOptions(config=hf / "config.json")
    alone = {trainer: run_trainer(trainer, "train", hf, tmp_path / trainer) for trainer in PROGRAMS}
    reshard(tmp_path / "automodel", tmp_path / "to_torch", ReshardOptions(to="dcp"), source_options=read)
    own = ReshardOptions(to="dcp", names="automodel")
    reshard(tmp_path / "torch", tmp_path / "to_automodel", own, source_options=read)
    assert run_trainer("torch", "resume", hf, tmp_path / "to_torch") == alone["automodel"]
    assert run_trainer("automodel", "resume", hf, tmp_path / "to_automodel") == alone["torch"]
