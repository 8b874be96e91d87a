"""A trainer saves, another goes on from what shardctl makes of it, and the losses are those of the first.

torch, DeepSpeed and megatron-core with the same Adam on the same batches (`fixtures/torch_dist/resume*.py`), and
torchtitan's model and NeMo Automodel's classes where these are installed, too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardctl.api import Mesh, ReshardOptions, SourceOptions, reshard

ROOT = Path(__file__).parents[2]
MISSING = [name for name in ("megatron", "deepspeed") if importlib.util.find_spec(name) is None]
FURTHER = {"titan": "torchtitan", "automodel": "nemo_automodel"}
FOUND = [trainer for trainer, name in FURTHER.items() if importlib.util.find_spec(name) is not None]
PROGRAMS = {"torch": "torch_dist.resume_torch", "deepspeed": "torch_dist.resume_deepspeed"}
PROGRAMS |= {"megatron": "torch_dist.resume", "titan": "torchtitan.resume", "automodel": "automodel.resume"}
LAYOUTS = {"torch": "dcp", "deepspeed": "universal", "megatron": "torch_dist", **dict.fromkeys(FOUND, "dcp")}
NAMES = {"titan": "torchtitan", "automodel": "automodel"}
SAVERS = (("torch", ()), ("deepspeed", ("1",)), ("deepspeed", ("2",)), ("deepspeed", ("3",)), ("megatron", ("tp=2",)))
SAVERS += tuple((trainer, ()) for trainer in FOUND)
pytestmark = [pytest.mark.engine, pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed")]


def run_trainer(trainer: str, *words: object) -> None:
    command = [sys.executable, "-m", f"fixtures.{PROGRAMS[trainer]}", *map(str, words)]
    settings = os.environ | {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=settings)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("model")
    run_trainer("megatron", "model", place, "llama", "float32")
    return place


@pytest.mark.parametrize(("saver", "more"), SAVERS)
def test_other_trainers_go_on_with_the_same_losses(saver, more, hf, tmp_path):
    run_trainer(saver, "train", hf, tmp_path / "run", tmp_path / "run.json", *more)
    losses = json.loads((tmp_path / "run.json").read_text())
    for other, layout in LAYOUTS.items():
        out, mesh = tmp_path / other, Mesh.of(tp=2) if layout == "torch_dist" else Mesh.of()
        names = NAMES.get(other, "transformers")
        asked = ReshardOptions(to=layout, names=names, mesh=mesh, optimizer_states="keep")
        reshard(tmp_path / "run", out, asked, source_options=SourceOptions(config=hf))
        run_trainer(other, "resume", hf, out, tmp_path / f"{other}.json", *(("tp=2",) if other == "megatron" else ()))
        found = json.loads((tmp_path / f"{other}.json").read_text())
        apart = max(abs(a - b) for a, b in zip(found, losses, strict=True))
        print(f"{saver} {' '.join(more)} > {layout} > {other}: {apart:.1e}")
        assert found == pytest.approx(losses, rel=1e-6), other
