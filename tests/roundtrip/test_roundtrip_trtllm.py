"""Every family that TensorRT-LLM's schema knows: from transformers there and back, config and logits too."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_models import config_of, save
from transformers import AutoConfig, AutoModelForCausalLM

from shardctl.base.amounts import format_memory_size
from shardctl.options import PlanOptions, ReshardOptions, SourceOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.plan import plan
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

STEPS = {"decoder_sparse_step": 1, "mlp_only_layers": []}
FAMILIES = {
    "llama": ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50_000.0}}, Mesh.of(tp=8)),
    "llama-tied-biased": ({"vocab_size": 97}, Mesh.of(tp=2, pp=2)),
    "granite": (
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.0078125,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
            "attention_bias": True,
        },
        Mesh.of(tp=4, pp=2),
    ),
    "mistral": ({}, Mesh.of(tp=4)),
    "mixtral": ({}, Mesh.of(tp=2, pp=2, ep=2)),
    "qwen2": ({}, Mesh.of(tp=8)),
    "qwen2-tied": ({}, Mesh.of(tp=4)),
    "qwen2_moe": (STEPS, Mesh.of(tp=4, ep=2, etp=2)),
    "qwen3": ({}, Mesh.of(tp=2, pp=2)),
    "qwen3-tied": ({}, Mesh.of(tp=8)),
    "qwen3_moe": ({**STEPS, "norm_topk_prob": True}, Mesh.of(tp=4, ep=4)),
}
TOKENS = torch.tensor([[1, 5, 3, 2, 7, 0, 4, 6]])


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A family's model, saved by transformers, once."""
    made = {}

    def give(name):
        if name not in made:
            made[name] = save(tmp_path_factory.mktemp(name) / "source", {**config_of(name), **FAMILIES[name][0]})
        return made[name]

    return give


def logits(path) -> torch.Tensor:
    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()(TOKENS).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_there_and_back(source, name, tmp_path):
    tiny = source(name)
    reshard_options = ReshardOptions(to="trtllm", mesh=FAMILIES[name][1])
    made = reshard(tiny.path, tmp_path / "trt", reshard_options, source_options=SourceOptions(kv_heads="replicate"))
    assert verify(tmp_path / "trt", VerifyOptions(against=str(tiny.path))).ok
    back = reshard(tmp_path / "trt", tmp_path / "hf", ReshardOptions(to="hf"))
    assert back.record.digest == made.record.digest
    if tiny.config["dtype"] == "float32" or not ("moe" in name or name == "mixtral"):
        assert back.record.digest == digest(tiny.path).digest
    again = reshard(
        tmp_path / "hf", tmp_path / "again", reshard_options, source_options=SourceOptions(kv_heads="replicate")
    )
    assert again.record.digest == made.record.digest
    for path in (tmp_path / "trt").glob("rank*"):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
    assert (tmp_path / "trt" / "config.json").read_text() == (tmp_path / "again" / "config.json").read_text()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_config_that_is_made_gives_the_same_logits(source, name, tmp_path):
    tiny = source(name)
    reshard(tiny.path, tmp_path / "trt", ReshardOptions(to="trtllm", mesh=Mesh.of(tp=2)))
    (tmp_path / "trt" / "generation_config.json").unlink(missing_ok=True)
    reshard(tmp_path / "trt", tmp_path / "hf", ReshardOptions(to="hf"))
    made, given = AutoConfig.from_pretrained(tmp_path / "hf"), AutoConfig.from_pretrained(tiny.path)
    assert made.model_type == given.model_type
    assert made.rope_parameters == given.rope_parameters
    assert json.loads((tmp_path / "trt" / "config.json").read_text())["architecture"] == tiny.config["architectures"][0]
    assert torch.equal(logits(tmp_path / "hf"), logits(tiny.path))


def test_a_plan_says_that_each_rank_has_the_whole_embedding(tmp_path):
    vocabulary, hidden = 1 << 16, 64
    config = {**config_of("llama"), "vocab_size": vocabulary, "hidden_size": hidden, "dtype": "float32"}
    source = save(tmp_path / "source", config).path
    more = format_memory_size(vocabulary * hidden * 4 // 2)
    said = plan(source, ReshardOptions(to="trtllm", mesh=Mesh.of(tp=2)), plan_options=PlanOptions()).warnings
    assert any(f"rank 0 of layout trtllm holds {more} more than its part of the weights" in w for w in said)
    assert not plan(source, ReshardOptions(to="vllm", mesh=Mesh.of(tp=2)), plan_options=PlanOptions()).warnings
