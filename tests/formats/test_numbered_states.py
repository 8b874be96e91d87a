"""Optimizers whose parameters are numbered, as verl saves those of FSDP2: named as torch names them, or left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import transformers
from stored_bytes import check, scan
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

if TYPE_CHECKING:
    from pathlib import Path

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 48,
}


def train(place: Path, divide, *, tied: bool = False) -> dict:
    """Save a model after a step as one rank does; returns the states as torch names them."""
    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied))
    optimizer = torch.optim.AdamW(divide(list(model.parameters())), lr=0.01, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape)
    optimizer.step()
    torch.save(model.state_dict(), place / "model_world_size_1_rank_0.pt")
    torch.save(optimizer.state_dict(), place / "optim_world_size_1_rank_0.pt")
    return get_optimizer_state_dict(model, optimizer)


def divide_by_decay(parameters: list) -> list[dict]:
    """Matrices and vectors, as most trainers have it."""
    return [
        {"params": [each for each in parameters if each.ndim > 1], "weight_decay": 0.1},
        {"params": [each for each in parameters if each.ndim == 1], "weight_decay": 0.0},
    ]


WAYS = {
    "one group": lambda parameters: parameters,
    "matrices first": divide_by_decay,
    "vectors first": lambda parameters: divide_by_decay(parameters)[::-1],
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_numbers_are_the_names_that_torch_knows(way, tied, tmp_path):
    named = train(tmp_path, WAYS[way], tied=tied)
    manifest = scan(tmp_path)
    assert not manifest.warnings
    assert "parameters of the optimizer are numbered; they were taken in the order of the weights" in (
        manifest.training.notes
    )
    expected = {
        f"optimizer.{state}.{parameter}": value
        for parameter, states in named["state"].items()
        for state, value in states.items()
    }
    check(tmp_path, manifest.training.states, expected)
    assert manifest.training.step == 1
    assert [group.parameters for group in manifest.training.groups] == [
        tuple(group["params"]) for group in named["param_groups"]
    ]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_shapes_say_which_weight_is_not_trained(tmp_path):
    """The embedding is frozen; no other choice of weights has the shapes of the states."""
    named = train(tmp_path, lambda parameters: parameters[1:])
    manifest = scan(tmp_path)
    assert not manifest.warnings
    states = {n: s for n, s in named["state"].items() if s}
    assert len(states) == len(manifest.tensors) - 1
    expected = {f"optimizer.{state}.{name}": v for name, held in states.items() for state, v in held.items()}
    check(tmp_path, manifest.training.states, expected)


LEFT = {
    "groups that decay alike": lambda parameters: [
        {**group, "weight_decay": 0.1} for group in divide_by_decay(parameters)
    ],
    "groups that are no matrices": lambda parameters: [
        {"params": parameters[:3], "weight_decay": 0.1},
        {"params": parameters[3:], "weight_decay": 0.0},
    ],
    "three groups": lambda parameters: [{"params": part} for part in (parameters[:1], parameters[1:2], parameters[2:])],
    "a norm that is not trained": lambda parameters: [each for each in parameters if each is not parameters[8]],
    "another order": lambda parameters: parameters[::-1],
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("way", LEFT)
def test_numbers_that_say_nothing_are_left_behind(way, tmp_path):
    train(tmp_path, LEFT[way])
    manifest = scan(tmp_path)
    assert manifest.training.states == {}
    assert "their parameters are numbered, not named" in manifest.warnings[0]
