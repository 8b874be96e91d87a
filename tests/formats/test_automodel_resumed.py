"""NeMo Automodel's classes go on from what shardctl makes of a save of torch, and torch from a save of theirs."""

from __future__ import annotations

import importlib.util

import pytest
from trainer_programs import ROOT, run_program

from shardctl.api import ReshardOptions, SourceOptions, reshard

PROGRAMS = {"automodel": "fixtures.automodel.resume", "torch": "fixtures.torch_dist.resume_torch"}
MODELS = {"llama": "torch_dist/hf/llama", "qwen3": "torchtitan/qwen3/source"}
INSTALLED = importlib.util.find_spec("nemo_automodel") is not None
pytestmark = [pytest.mark.engine, pytest.mark.skipif(not INSTALLED, reason="nemo_automodel not installed")]


@pytest.mark.parametrize("case", MODELS)
def test_either_goes_on_from_the_other(case, tmp_path):
    """To the last bit, because both compute with the same class."""
    hf = ROOT / "fixtures" / MODELS[case]
    read = SourceOptions(config=hf / "config.json")
    alone = {trainer: run_program(PROGRAMS[trainer], "train", hf, tmp_path / trainer) for trainer in PROGRAMS}
    reshard(tmp_path / "automodel", tmp_path / "to_torch", ReshardOptions(to="dcp"), source_options=read)
    own = ReshardOptions(to="dcp", names="automodel")
    reshard(tmp_path / "torch", tmp_path / "to_automodel", own, source_options=read)
    assert run_program(PROGRAMS["torch"], "resume", hf, tmp_path / "to_torch") == alone["automodel"]
    assert run_program(PROGRAMS["automodel"], "resume", hf, tmp_path / "to_automodel") == alone["torch"]
