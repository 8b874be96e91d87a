"""Scripts save the optimizer beside the weights in one file, and so does Lightning: the states are torch's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from stored_bytes import check, scan
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from shardctl.options import ReshardOptions, SourceOptions
from shardctl.verbs.reshard import reshard

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CONFIG = transformers.LlamaConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=48,
    tie_word_embeddings=False,
    architectures=["LlamaForCausalLM"],
)


def train(kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options):
    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(CONFIG)
    optimizer = kind(model.parameters(), lr=0.01, foreach=False, **options)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape)
    optimizer.step()
    return model, optimizer


def list_states(model, optimizer) -> dict[str, torch.Tensor]:
    return {
        f"optimizer.{state}.{parameter}": value
        for parameter, states in get_optimizer_state_dict(model, optimizer)["state"].items()
        for state, value in states.items()
    }


WAYS = {
    "script": lambda model, optimizer: {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1},
    "names": lambda model, optimizer: {
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": get_optimizer_state_dict(model, optimizer),
    },
    "lightning": lambda model, optimizer: {
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "global_step": 1,
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_states_are_those_of_the_optimizer(way, tmp_path):
    model, optimizer = train()
    torch.save(WAYS[way](model, optimizer), tmp_path / "last.pt")
    manifest = scan(tmp_path / "last.pt")
    assert not any("optimizer" in text for text in manifest.warnings)
    check(tmp_path, manifest.training.states, list_states(model, optimizer))
    assert manifest.training.step == 1
    assert [group.settings["lr"] for group in manifest.training.groups] == [0.01]


def test_another_trainer_finds_them(tmp_path):
    model, optimizer = train()
    CONFIG.save_pretrained(tmp_path)
    torch.save(WAYS["lightning"](model, optimizer), tmp_path / "last.ckpt")
    read = SourceOptions(config=tmp_path / "config.json")
    reshard(tmp_path / "last.ckpt", tmp_path / "dcp", ReshardOptions(to="dcp"), source_options=read)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    expected = get_optimizer_state_dict(model, optimizer)
    for name, states in expected["state"].items():
        assert all(torch.equal(found["optim"]["state"][name][state], value) for state, value in states.items())
    assert sorted(found["optim"]["param_groups"][0]["params"]) == sorted(expected["param_groups"][0]["params"])


def test_states_that_nothing_names_are_left_behind(tmp_path):
    held = WAYS["script"](*train())
    held["optimizer"]["param_groups"][0]["params"].pop()
    torch.save(held, tmp_path / "last.pt")
    manifest = scan(tmp_path / "last.pt")
    assert not manifest.training.states
    assert any("their parameters are numbered, not named" in text for text in manifest.warnings)


def test_two_optimizers_are_left_behind(tmp_path):
    model, optimizer = train()
    held = WAYS["lightning"](model, optimizer)
    held["optimizer_states"] *= 2
    torch.save(held, tmp_path / "last.pt")
    manifest = scan(tmp_path / "last.pt")
    assert manifest.training is None
    assert any("'optimizer_states' (list)" in text for text in manifest.warnings)


def test_momentum_alone_is_a_state(tmp_path):
    model, optimizer = train(torch.optim.SGD, momentum=0.9)
    torch.save(WAYS["script"](model, optimizer), Path(tmp_path, "last.pt"))
    check(tmp_path, scan(tmp_path / "last.pt").training.states, list_states(model, optimizer))
