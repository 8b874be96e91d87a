"""Accelerate, and so transformers' Trainer, has the model and the optimizer in folders of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from dcp_builder import changed
from stored_bytes import check, scan
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from shardctl.base.errors import UsageError
from shardctl.options import ReshardOptions, SourceOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.reshard import reshard

FIXTURES = Path(__file__).parents[2] / "fixtures" / "dcp"
SAVED = FIXTURES / "accelerate"
READ = SourceOptions(config=FIXTURES / "config.json")
OWN = ReshardOptions(to="dcp", names="accelerate")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def load_folder(path: Path, target: Path) -> dict[str, dict]:
    dcp_to_torch_save(path, target)
    return torch.load(target, weights_only=True)


def test_what_is_written_is_what_accelerate_saves(tmp_path):
    """By way of a save of both in one, which has other keys; FSDP1 and FSDP2 go on from it (docs/engines.md)."""
    reshard(SAVED, tmp_path / "dcp", ReshardOptions(to="dcp"), source_options=READ)
    reshard(tmp_path / "dcp", tmp_path / "again", OWN, source_options=READ)
    ours, theirs = (
        {name: load_folder(place / name, tmp_path / "whole.pt") for name in ("pytorch_model_fsdp_0", "optimizer_0")}
        for place in (tmp_path / "again", SAVED)
    )
    weights = theirs["pytorch_model_fsdp_0"]["model"]
    assert ours["pytorch_model_fsdp_0"].keys() == {"model"}
    assert ours["pytorch_model_fsdp_0"]["model"].keys() == weights.keys()
    assert all(torch.equal(ours["pytorch_model_fsdp_0"]["model"][name], weights[name]) for name in weights)
    (one, other) = (each["optimizer_0"]["optimizer"] for each in (ours, theirs))
    assert one["state"].keys() == other["state"].keys()
    for name, states in other["state"].items():
        assert one["state"][name].keys() == states.keys()
        assert all(torch.equal(one["state"][name][state], value) for state, value in states.items())
    members = [[sorted(group.pop("params")) for group in each["param_groups"]] for each in (one, other)]
    assert members[0] == members[1]
    assert one["param_groups"] == other["param_groups"]


def test_weights_alone_have_no_second_folder(tmp_path):
    reshard(SAVED, tmp_path / "out", ReshardOptions(to="dcp", names="accelerate", optimizer_states="drop"))
    assert {path.parent.name for path in (tmp_path / "out").rglob("*.distcp")} == {"pytorch_model_fsdp_0"}


def test_what_makes_no_sense_is_refused(tmp_path):
    with pytest.raises(UsageError, match="--names accelerate takes no mesh"):
        reshard(SAVED, tmp_path / "no", ReshardOptions(to="dcp", names="accelerate", mesh=Mesh.of(fsdp=2)))
    with pytest.raises(UsageError, match="--names accelerate is for --to dcp"):
        reshard(SAVED, tmp_path / "no", ReshardOptions(to="ranks", names="accelerate"))


def save_numbered(place: Path, *, tied: bool, order: int = 1) -> dict[str, torch.Tensor]:
    """Save a model and its optimizer as accelerate 1.12 does with FSDP2; returns the states as torch names them."""
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=48,
        tie_word_embeddings=tied,
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(list(model.parameters())[::order], lr=0.01, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape)
    optimizer.step()
    dcp.save({"model": model.state_dict()}, checkpoint_id=place / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=place / "optimizer_0", no_dist=True)
    named = get_optimizer_state_dict(model, optimizer)["state"]
    return {f"optimizer.{state}.{name}": v for name, states in named.items() for state, v in states.items()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shuffled", [False, True])
def test_numbered_parameters_are_the_weights_in_the_order_of_the_state_dict(tied, shuffled, tmp_path):
    """accelerate#3971: the table of tensors may have another order, in which ranks wrote them."""
    expected = save_numbered(tmp_path / "run", tied=tied)
    if shuffled:

        def reverse(metadata):
            metadata.state_dict_metadata = dict(reversed(metadata.state_dict_metadata.items()))

        (tmp_path / "run/pytorch_model_fsdp_0").rename(tmp_path / "first")
        changed(tmp_path / "first", tmp_path / "run/pytorch_model_fsdp_0", reverse)
    found = scan(tmp_path / "run")
    assert not found.warnings
    check(tmp_path / "run", found.training.states, expected)
    assert found.training.step == 1
    (group,) = found.training.groups
    assert set(group.parameters) == {name.split(".", 2)[2] for name in expected}
    assert "parameters of the optimizer are numbered; they were taken in the order of the weights" in (
        found.training.notes
    )


@pytest.mark.parametrize("why", ["order", "places"])
def test_numbers_that_say_nothing_are_left_behind(why, tmp_path):
    save_numbered(tmp_path / "run", tied=False, order=-1 if why == "order" else 1)
    if why == "places":

        def forget(metadata):
            metadata.planner_data = None

        (tmp_path / "run/pytorch_model_fsdp_0").rename(tmp_path / "first")
        changed(tmp_path / "first", tmp_path / "run/pytorch_model_fsdp_0", forget)
    found = scan(tmp_path / "run")
    assert not found.training.states
    assert any("their parameters are numbered, not named" in warning for warning in found.warnings)
