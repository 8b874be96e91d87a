"""Adapters of stacked experts, taken apart into those of each expert, against PEFT."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from shardctl.errors import UnsupportedError, UsageError
from shardctl.mesh import Mesh
from shardctl.options import ReshardOptions, SourceOptions
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

FIXTURES = Path(__file__).parents[2] / "fixtures" / "peft"
BASE = FIXTURES / "hf/qwen3_moe"
CASES = ("experts", "experts-0.18", "experts-0.19")
SPLIT = ReshardOptions(experts="split")
KNOWN = SourceOptions(config=BASE / "config.json")


@pytest.mark.parametrize("case", CASES)
def test_each_expert_gets_the_product_that_peft_merges(tmp_path, case):
    """In the layouts of PEFT 0.18, 0.19 and later, which differ in which matrix is that of the inputs."""
    out = tmp_path / "out"
    reshard(FIXTURES / case / "adapter", out, SPLIT, source_options=KNOWN)
    assert verify(out).ok
    reshard(BASE, tmp_path / "merged", ReshardOptions(merge=(out,)))
    found, base = (load_file(path / "model.safetensors") for path in (tmp_path / "merged", BASE))
    wanted = load_file(FIXTURES / case / "merged/model.safetensors")
    for name, tensor in wanted.items():
        steps = torch.maximum(base[name].abs(), (tensor - base[name]).abs()).double() * 2**-7
        assert ((found[name].double() - tensor.double()).abs() <= 2 * steps).all(), name
    assert any(not torch.equal(base[name], found[name]) for name in base if ".experts." in name)


def test_peft_computes_the_same_with_both_forms(tmp_path):
    reshard(FIXTURES / "experts/adapter", tmp_path / "out", SPLIT, source_options=KNOWN)
    tokens, logits = torch.arange(8)[None], []
    for adapter in (FIXTURES / "experts/adapter", tmp_path / "out"):
        base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
        with torch.no_grad():
            logits.append(PeftModel.from_pretrained(base, adapter).eval()(tokens).logits)
    assert torch.allclose(*logits, atol=1e-4)


def test_experts_are_divided_like_those_of_the_base(tmp_path):
    mesh = ReshardOptions(experts="split", mesh=Mesh.of(tp=2))
    reshard(FIXTURES / "experts/adapter", tmp_path / "ranks", mesh, source_options=KNOWN)
    reshard(FIXTURES / "experts/adapter", tmp_path / "out", SPLIT, source_options=KNOWN)
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    back, out = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("back", "out"))
    assert back.keys() == out.keys()
    assert all(torch.equal(back[name], out[name]) for name in out)
    assert inspect(tmp_path / "out").adapter.targets == ("down_proj", "gate_proj", "q_proj", "up_proj")


def test_what_cannot_be_taken_apart_is_refused(tmp_path):
    with pytest.raises(UsageError, match="needs an adapter of stacked experts"):
        reshard(
            FIXTURES / "lora/adapter",
            tmp_path / "out",
            SPLIT,
            source_options=SourceOptions(config=FIXTURES / "hf/llama/config.json"),
        )
    with pytest.raises(UnsupportedError, match="in one array on the Hub"):
        reshard(
            FIXTURES / "experts-transposed/adapter",
            tmp_path / "out",
            SPLIT,
            source_options=SourceOptions(config=FIXTURES / "hf/gpt_oss/config.json"),
        )
