"""torchtitan's own models go on from what shardctl makes of a save of torch, and torch from a save of theirs.

Both with the same Adam on the same batches (`fixtures/torchtitan/resume.py`, `fixtures/torch_dist/resume_torch.py`).
"""

from __future__ import annotations

import importlib.util

import pytest
from trainer_programs import ROOT, run_program

from shardctl.api import ReshardOptions, SourceOptions, reshard

PROGRAMS = {"titan": "fixtures.torchtitan.resume", "torch": "fixtures.torch_dist.resume_torch"}
MODELS = {
    "llama3": "torch_dist/hf/llama",
    "qwen3": "torchtitan/qwen3/source",
    "qwen3_moe": "torchtitan/qwen3_moe/source",
    "deepseek_v3": "torchtitan/deepseek_v3/source",
    "gpt_oss": "megatron/hf/gpt-oss",
}
MISSING = [name for name in ("torchtitan", "tyro") if importlib.util.find_spec(name) is None]
pytestmark = [pytest.mark.engine, pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed")]


@pytest.mark.parametrize("case", MODELS)
def test_either_goes_on_from_the_other(case, tmp_path):
    """The greatest difference of three losses of about 4 to 11; each trainer alone differs as much from the other."""
    hf = ROOT / "fixtures" / MODELS[case]
    read = SourceOptions(config=hf / "config.json")
    alone = {trainer: run_program(PROGRAMS[trainer], "train", hf, tmp_path / trainer) for trainer in PROGRAMS}
    reshard(tmp_path / "titan", tmp_path / "to_torch", ReshardOptions(to="dcp"), source_options=read)
    own = ReshardOptions(to="dcp", names="torchtitan")
    reshard(tmp_path / "torch", tmp_path / "to_titan", own, source_options=read)
    reshard(tmp_path / "to_torch", tmp_path / "back", own, source_options=read)
    assert run_program(PROGRAMS["titan"], "resume", hf, tmp_path / "back") == alone["titan"]
    for saver, goer, folder in (("titan", "torch", "to_torch"), ("torch", "titan", "to_titan")):
        found = run_program(PROGRAMS[goer], "resume", hf, tmp_path / folder)
        print(f"{case} {saver} > {goer}: {max(abs(a - b) for a, b in zip(found, alone[saver], strict=True)):.1e}")
        assert found == pytest.approx(alone[saver], rel=1e-6)


def test_layers_that_predict_go_on(tmp_path):
    """By way of transformers' names, whose class has none of these layers."""
    hf = ROOT / "fixtures" / "megatron" / "hf" / "deepseek-v3-predicting"
    read = SourceOptions(config=hf / "config.json")
    losses = run_program(PROGRAMS["titan"], "train", hf, tmp_path / "titan")
    reshard(tmp_path / "titan", tmp_path / "dcp", ReshardOptions(to="dcp"), source_options=read)
    reshard(tmp_path / "dcp", tmp_path / "back", ReshardOptions(to="dcp", names="torchtitan"), source_options=read)
    assert run_program(PROGRAMS["titan"], "resume", hf, tmp_path / "back") == losses
