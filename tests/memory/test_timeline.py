"""The moments of a step are those of torch: FSDP2's storages, followed through a step of a model of 8B."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from known_models import stock

from shardctl.api import PlanOptions, ReshardOptions, plan
from shardctl.base.errors import UnsupportedError
from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.estimate.model.rank_shards import list_rank_shards
from shardctl.estimate.term import sum_terms
from shardctl.estimate.training.rank_training import build_timeline
from shardctl.estimate.training.selective import list_recomputation_remarks
from shardctl.estimate.workload import TrainingWorkload
from shardctl.tensors.mesh import Mesh

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"
PROGRAM = Path(__file__).with_name("fsdp2_moments.py")
MODEL = {
    "hidden": 4096, "intermediate": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128, "vocabulary": 128256,
}  # fmt: skip
"""Llama-3.1-8B, but for its layers."""
USUAL = {
    "ranks": 8,
    "batch": 1,
    "tokens": 8192,
    "units": "root",
    "recompute": "none",
    "fused": False,
    "microbatches": 1,
}
CASES = {
    "all is kept": ({"layers": 4}, {}),
    "recomputed": ({"layers": 4}, {"recompute": "full"}),
    "recomputed, at its real depth": ({"layers": 32}, {"recompute": "full"}),
    "torchtitan's list": ({"layers": 4}, {"recompute": "op"}),
    "every second layer": ({"layers": 4}, {"recompute": "2"}),
    "two microbatches": ({"layers": 4}, {"recompute": "full", "microbatches": 2}),
    "few tokens, many ranks": ({"layers": 4}, {"ranks": 64, "tokens": 512}),
    "one rank": ({"layers": 4}, {"ranks": 1, "tokens": 2048}),
    "weights stay": ({"layers": 4}, {"recompute": "full", "reshard": False, "zero": 2}),
    "as torch's pipelines": ({"layers": 4}, {"piped": True, "microbatches": 2, "reshard": False, "zero": 1}),
}


@pytest.fixture(scope="module")
def torchs():
    """The bytes of each moment by case, as torch has them."""
    cases = [USUAL | more | {"model": MODEL | layers} for layers, more in CASES.values()]
    said = subprocess.run([sys.executable, PROGRAM, json.dumps(cases)], check=True, capture_output=True, text=True)
    found = json.loads(said.stdout.splitlines()[-1])
    return {
        name: {rename(m["moment"]): m["bytes"] for m in moments} for name, moments in zip(CASES, found, strict=True)
    }


def rename(moment):
    known = {
        "backward loss": "backward pass of the loss",
        "backward root": "backward pass of the head",
        "reduce root": "reduction of the rest",
        "step": "optimizer's step",
    }
    words = moment.replace("backward layers.", "backward pass of layer ").replace(
        "reduce layers.", "reduction of layer "
    )
    return known.get(moment, words)


def join(found):
    """The same, of each layer the larger of its two moments, between which its gradients grow."""
    joined = {}
    for moment, nbytes in found.items():
        name = moment.replace("backward pass of layer", "layer").replace("reduction of layer", "layer")
        joined[name] = max(nbytes, joined.get(name, 0))
    return joined


def moments(layers, more):
    """The same, as they are estimated."""
    case = USUAL | more
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": MODEL["vocabulary"],
        "num_key_value_heads": MODEL["kv_heads"], "hidden_size": MODEL["hidden"], "head_dim": MODEL["head_dim"],
        "intermediate_size": MODEL["intermediate"], "num_hidden_layers": layers["layers"],
        "num_attention_heads": MODEL["heads"], "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    mesh, stages = Mesh.of(fsdp=case["ranks"]), [layers["layers"]]
    holding, *_ = list_rank_shards(stock(config), mesh, stages)
    recompute, every = {"op": ("selective", 1), "2": ("full", 2)}.get(case["recompute"], (case["recompute"], 1))
    work = TrainingWorkload(
        case["tokens"],
        case["batch"],
        microbatches=case["microbatches"],
        recompute=recompute,
        recompute_every=every,
        zero=case.get("zero", 0),
    )
    line = build_timeline(build_layer_graph(config), holding, mesh, work, stages=stages)
    return line, {moment.name: moment.nbytes for moment in line.list_moments()}


@pytest.mark.parametrize("name", CASES)
def test_the_worst_moment_is_torchs(torchs, name):
    line, ours = moments(*CASES[name])
    theirs = torchs[name]
    assert max(ours.values()) == pytest.approx(max(theirs.values()), rel=0.01)
    worst = max(theirs, key=theirs.get)
    # Moments that are nearly as large may change places.
    assert theirs[line.name_worst()] == pytest.approx(theirs[worst], rel=0.01)


@pytest.mark.parametrize("name", CASES)
def test_every_moment_is_torchs(torchs, name):
    _, ours = moments(*CASES[name])
    assert ours.keys() <= torchs[name].keys()
    theirs = join(torchs[name])
    off = {moment: round(nbytes / theirs[moment] - 1, 4) for moment, nbytes in join(ours).items()}
    assert max(map(abs, off.values())) < 0.03, off


def test_what_torchtitans_list_saves_of_other_layers_is_not_guessed():
    for name, why in (("mixtral", "experts"), ("qwen2", "biases"), ("phi3", "4 matrices"), ("gpt2", "no gate")):
        config = json.loads((CONFIGS / f"{name}.json").read_text())
        layers = len(build_layer_graph(config).layers)
        holding, *_ = list_rank_shards(stock(config), Mesh.of(), [layers])
        with pytest.raises(UnsupportedError, match=why):
            build_timeline(
                build_layer_graph(config),
                holding,
                Mesh.of(),
                TrainingWorkload(64, recompute="selective"),
                stages=[layers],
            )


def test_selective_recomputation_that_changes_nothing_says_so():
    def said(**options):
        return list_recomputation_remarks(TrainingWorkload(64, **options))

    assert "almost nothing with fused attention" in said(profile="megatron", recompute="selective")[0]
    assert said(profile="megatron", recompute="selective", attention="eager") == ()
    assert said(recompute="selective") == said(recompute="full") == list_recomputation_remarks(None) == ()


def test_what_the_allocator_keeps_for_other_streams_is_counted_and_not_needed():
    """Gathered units are made in one stream, reduced gradients in another, and the loss leaves a hole in the third."""
    line, _ = moments({"layers": 4}, {"recompute": "full"})
    terms = {term.name: term for term in line.list_worst_terms()}
    assert line.name_worst() == "backward pass of the loss"
    layer = 2 * (4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) + 2 * 4096)
    root = 2 * (2 * 128256 * 4096 + 4096)
    trained = (4 * layer + root) // 2
    assert terms["free memory of other streams"].nbytes == root + layer + 4 * trained // 8
    assert terms["hole that the logits leave"].nbytes == 2 * 8192 * 128256
    assert "hole that the head's input leaves" not in terms
    spared = sum(term.nbytes for term in terms.values() if term.spared)
    reserved, needed = (sum_terms(terms.values(), counter=counter).nbytes for counter in ("reserved", None))
    assert reserved - needed == spared > 0
    assert sum_terms(terms.values(), counter="allocated").nbytes == needed


@pytest.mark.parametrize(("batch", "hole"), [(1, 0), (2, 2 * 2 * 8192 * 4096)])
def test_what_tp_ranks_gather_for_the_head_leaves_a_hole(batch, hole):
    """torch 2.13 copies what is gathered along the tokens, unless there is only one sequence."""
    options = PlanOptions(use="train", profile="fsdp2", seq_len=8192, batch=batch, microbatches=1, recompute="full")
    llama = Path(__file__).parents[2] / "fixtures/configs_public/llama-3.1-8b.json"
    found = plan(llama, ReshardOptions(mesh=Mesh.of(fsdp=2, tp=2)), plan_options=options)
    terms = found.forecast.estimate.binding.terms
    assert sum(term.nbytes for term in terms if term.name == "hole that the head's input leaves") == hole


def test_one_rank_has_no_streams_to_keep_memory_for():
    line, _ = moments({"layers": 4}, {"ranks": 1, "tokens": 2048})
    assert not [term for term in line.list_worst_terms() if term.name == "free memory of other streams"]
