"""The moments of a step of DDP are those of torch: two processes that train, whose storages are followed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from known_models import stock

from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.estimate.model.rank_shards import list_rank_shards
from shardctl.estimate.term import sum_terms
from shardctl.estimate.training.rank_training import build_timeline
from shardctl.estimate.workload import TrainingWorkload
from shardctl.tensors.mesh import Mesh

PROGRAM = Path(__file__).with_name("ddp_moments.py")
MODEL = {
    "vocab_size": 2048, "num_key_value_heads": 2, "hidden_size": 256, "intermediate_size": 768,
    "num_attention_heads": 4, "head_dim": 64, "tie_word_embeddings": False, "num_hidden_layers": 3,
}  # fmt: skip
TOKENS = 128
RANKS = 2
CASES = [
    {"recompute": "none", "microbatches": 1, "view": False},
    {"recompute": "full", "microbatches": 1, "view": False},
    {"recompute": "none", "microbatches": 2, "view": False},
    {"recompute": "none", "microbatches": 1, "view": True},
]


@pytest.fixture(scope="module")
def torchs(tmp_path_factory):
    """The most bytes of each pass by case, as torch has them."""
    cases = json.dumps([case | {"model": MODEL, "tokens": TOKENS} for case in CASES])
    place = tmp_path_factory.mktemp("ddp") / "store"
    runs = [
        subprocess.Popen(
            [sys.executable, PROGRAM, place, str(rank), str(RANKS), cases], stdout=subprocess.PIPE, text=True
        )
        for rank in range(RANKS)
    ]
    said = [run.communicate()[0] for run in runs]
    assert [run.returncode for run in runs] == [0] * RANKS
    return json.loads(said[0].splitlines()[-1])


@pytest.mark.parametrize("number", range(len(CASES)))
def test_ddps_moments_are_torchs(torchs, number):
    case, most = CASES[number], torchs[number]
    config = MODEL | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    stages = [MODEL["num_hidden_layers"]]
    holding, *_ = list_rank_shards(stock(config), Mesh.of(dp=RANKS), stages)
    work = TrainingWorkload(TOKENS, profile="hf", recompute=case["recompute"], microbatches=case["microbatches"])
    line = build_timeline(build_layer_graph(config), holding, Mesh.of(dp=RANKS), work, stages=stages)
    *passes, step = line.list_moments()
    if case["view"]:  # gradients are parts of the buckets, which is the low end of the buckets' interval
        buckets = next(term for term in line.list_worst_terms() if term.name.startswith("buckets"))
        assert (buckets.low, buckets.nbytes) == (0, 4 * holding.elements(trainable=True))
        assert step.nbytes - buckets.nbytes == pytest.approx(most["step"], rel=0.002)
        assert sum_terms(line.list_worst_terms()).low < max(most.values())
        return
    assert step.nbytes == pytest.approx(most["step"], rel=0.002)
    assert max(moment.nbytes for moment in passes) == pytest.approx(max(most["forward"], most["backward"]), rel=0.005)
