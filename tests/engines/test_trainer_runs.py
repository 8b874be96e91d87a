"""Consumers load what `--for` writes and compute the same, and their profiles name the classes that they have."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from docs.consumers import FROM_HEADERS, KEPT, MODELS, PAGE, PROMPTS, RUN_BY, TRAINERS, build_page, judge, make
from docs.trainer_runs import load
from shardctl.libraries.consumers.profile import find_profile
from shardctl.options import ReshardOptions, SourceOptions
from shardctl.running.engines.engine_client import ask_engine
from shardctl.verbs.reshard import reshard
from shardctl.verify.engine_result import EngineQuestion

PYTHONS = {
    "transformers": sys.executable,
    "transformers@4.57": os.environ.get("SHARDCTL_TRANSFORMERS4_PYTHON", ""),
    "vllm": os.environ.get("SHARDCTL_VLLM_PYTHON", sys.executable if importlib.util.find_spec("vllm") else ""),
}
"""A Python that has each consumer, or nothing."""


@pytest.fixture(params=RUN_BY)
def consumer(request):
    if not PYTHONS[request.param]:
        variable = "SHARDCTL_TRANSFORMERS4_PYTHON" if "4" in request.param else "SHARDCTL_VLLM_PYTHON"
        pytest.skip(f"{request.param} is not installed; {variable} may name a Python that has it")
    return request.param


def test_the_page_is_what_was_kept():
    kept = json.loads(KEPT.read_text())
    assert build_page(kept) == PAGE.read_text()
    assert kept["cells"].keys() == MODELS.keys()
    for model, cells in kept["cells"].items():
        assert cells.keys() == TRAINERS.keys() - ({"megatron"} if "LLaVA" in model else set())
        assert all(row.keys() == {*RUN_BY, *FROM_HEADERS} for row in cells.values())


def test_every_consumer_that_was_run_computes_the_same():
    kept = json.loads(KEPT.read_text())
    cells = [(model, *place, cell) for model, rows in kept["cells"].items() for *place, cell in _list_cells(rows)]
    assert [place for *place, cell in cells if place[-1] in RUN_BY and cell["status"] != "same"] == []
    assert [place for *place, cell in cells if cell["status"] == "refused" and not cell["why"]] == []


def _list_cells(rows):
    return [(trainer, name, cell) for trainer, row in rows.items() for name, cell in row.items()]


@pytest.mark.parametrize("model", ["mixture of experts (Mixtral)", "vision and language (LLaVA)"])
def test_it_computes_what_the_trained_model_does(model, consumer, tmp_path):
    kind, settings, _ = MODELS[model]
    make(kind, settings, tmp_path / "original")
    weights = load(tmp_path / "original").state_dict()
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "run" / "step-1", no_dist=True)
    given = SourceOptions(config=tmp_path / "original")
    reshard(tmp_path / "run", tmp_path / "out", ReshardOptions(consumer=consumer), source_options=given)
    answers = []
    for engine, path in (("transformers", "original"), (consumer, "out")):
        question = EngineQuestion(engine.partition("@")[0], str(tmp_path / path), PROMPTS, tokens=4)
        answers.append(ask_engine(question, Path(PYTHONS[engine]), 600)[0])
    assert judge(answers[1], answers[0])["status"] == "same"


CLASSES = {
    "transformers": "import sys, transformers as t; print(*(n for n in sys.stdin.read().split() if not hasattr(t, n)))",
    "vllm": "import sys; from vllm import ModelRegistry as r; known = set(r.get_supported_archs())\n"
    "print('LACKS', *(n for n in sys.stdin.read().split() if n not in known))",
}


def test_a_consumer_has_the_classes_of_its_profile(consumer):
    profile = find_profile(consumer)
    code = CLASSES[profile.consumer]
    done = subprocess.run(
        [PYTHONS[consumer], "-c", code],
        input="\n".join(profile.architectures),
        capture_output=True,
        text=True,
        check=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert done.stdout.strip().splitlines()[-1:] in ([], ["LACKS"])
