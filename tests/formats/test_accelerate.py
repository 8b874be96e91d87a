"""Accelerate, and so transformers' Trainer, has the model and the optimizer in folders of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardctl.errors import UsageError
from shardctl.mesh import Mesh
from shardctl.options import ReshardOptions, SourceOptions
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
