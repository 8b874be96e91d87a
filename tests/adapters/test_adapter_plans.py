"""`plan` of an adapter: its base is there and not trained; what is not counted is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardctl.base.errors import UsageError
from shardctl.cli.program import run
from shardctl.options import PlanOptions, ReshardOptions, SourceOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.plan import plan

FIXTURES = Path(__file__).parents[2] / "fixtures/peft"
ADAPTER = FIXTURES / "lora/adapter"
BASE = SourceOptions(config=FIXTURES / "hf/llama")
ONE = ReshardOptions()


def count_bytes(path):
    """The bytes of all tensors of a file."""
    return sum(tensor.nbytes for tensor in load_file(path).values())


def list_terms(planned, rank=0):
    """The terms of a rank by name."""
    return {term.name: term.nbytes for term in planned.forecast.estimate.ranks[rank].terms}


@pytest.mark.parametrize("case", ["lora", "conv1d", "experts", "embedding-head"])
def test_serving_needs_the_base_and_the_adapter(case):
    config = json.loads((FIXTURES / case / "adapter/adapter_config.json").read_text())
    base = FIXTURES / config["base_model_name_or_path"]
    found = plan(FIXTURES / case / "adapter", ONE, source_options=SourceOptions(config=base))
    alone = plan(base, ONE)
    own = count_bytes(FIXTURES / case / "adapter/adapter_model.safetensors")
    assert found.weight_bytes == found.adapter.slot_bytes == own
    assert found.adapter.base_bytes == alone.weight_bytes == count_bytes(base / "model.safetensors")
    assert list_terms(found)["weights"] == own + alone.weight_bytes
    assert {name: size for name, size in list_terms(found).items() if name != "weights"} == {
        name: size for name, size in list_terms(alone).items() if name != "weights"
    }
    assert any("further adapters" in each for each in found.adapter.uncounted)


def test_training_keeps_the_states_of_the_adapter_alone():
    own = sum(tensor.numel() for tensor in load_file(ADAPTER / "adapter_model.safetensors").values())
    options = PlanOptions(use="train", profile="hf", optimizer="adamw")
    planned = plan(ADAPTER, ONE, source_options=BASE, plan_options=options)
    parameters = [torch.nn.Parameter(t.float()) for t in load_file(ADAPTER / "adapter_model.safetensors").values()]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters)
    optimizer.step()
    states = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if t.ndim)
    found = {}
    for term in planned.forecast.estimate.ranks[0].terms:
        found[term.category] = found.get(term.category, 0) + term.nbytes
    gradients = sum(parameter.grad.nbytes for parameter in parameters)
    assert gradients == 4 * own
    assert found.get("gradients", 0) in (0, gradients)  # none, where the worst moment comes before they are there
    assert found["optimizer"] == states
    assert list_terms(planned)["weights that are not trained"] == count_bytes(BASE.config / "model.safetensors")
    assert list_terms(planned)["F32 weights"] == 4 * own


def test_every_rank_holds_its_part_of_both():
    mesh = ReshardOptions(mesh=Mesh.of(tp=2))
    found, alone = plan(ADAPTER, mesh, source_options=BASE), plan(BASE.config, mesh)
    assert found.adapter.base_rank_bytes == max(rank.weight_bytes for rank in alone.ranks)
    for rank, (mine, base) in enumerate(zip(found.ranks, alone.ranks, strict=True)):
        assert list_terms(found, rank)["weights"] == mine.weight_bytes + base.weight_bytes


def test_a_base_that_is_where_it_was_is_found_and_that_is_said(monkeypatch):
    monkeypatch.chdir(FIXTURES)
    found = plan(ADAPTER, ReshardOptions(mesh=Mesh.of(tp=2)))
    assert found.adapter.base == "LlamaForCausalLM"
    assert any("its base is taken to be hf/llama" in warning for warning in found.warnings)


def test_without_a_base_it_is_said_that_it_is_not_counted(capsys):
    assert run(["plan", str(ADAPTER)]) == 0
    assert "not counted: the base, because no config says which model it is" in capsys.readouterr().out
    assert run(["plan", str(ADAPTER), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)["adapter"]
    assert (document["base"], document["base_bytes"], document["base_rank_bytes"]) == ("", None, None)
    assert document["slot_bytes"] == count_bytes(ADAPTER / "adapter_model.safetensors")
    assert len(document["uncounted"]) == 2
    assert plan(BASE.config, ONE).adapter is None


def test_the_text_says_what_is_counted(capsys):
    assert run(["plan", str(ADAPTER), "--config", str(BASE.config), "--tp", "2"]) == 0
    out = capsys.readouterr().out
    assert "base: LlamaForCausalLM, 35.7 KiB of weights that are not trained, 18.1 KiB of them on a rank" in out


def test_an_adapter_is_not_quantized():
    with pytest.raises(UsageError, match="applies to models, not to adapters"):
        plan(ADAPTER, ONE, source_options=BASE, plan_options=PlanOptions(dtype="fp8"))
