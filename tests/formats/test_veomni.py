"""VeOmni saves model and optimizer in one save of torch, and what else it needs in files of its ranks beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardctl.base.errors import UsageError
from shardctl.options import ReshardOptions, SourceOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.reshard import reshard

FIXTURES = Path(__file__).parents[2] / "fixtures"
SAVED = FIXTURES / "veomni" / "global_step_2"
READ = SourceOptions(config=FIXTURES / "torchtitan" / "qwen3_moe" / "source" / "config.json")
STATES = ("exp_avg.", "exp_avg_sq.", "step.")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def load_saved(path: Path, target: Path) -> dict[str, dict]:
    dcp_to_torch_save(path, target)
    return torch.load(target, weights_only=True)


def list_values(tree: object, way: tuple = ()) -> dict[tuple, object]:
    """The leaves of nested dicts and lists, by the way to each."""
    if isinstance(tree, dict | list) and tree:
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {key: value for name, each in pairs for key, value in list_values(each, (*way, name)).items()}
    return {way: tree}


def test_weights_and_states_are_those_of_the_run(tmp_path):
    expected = load_file(FIXTURES / "veomni" / "whole.safetensors")
    done = reshard(SAVED, tmp_path / "dcp", ReshardOptions(to="dcp"), source_options=READ)
    assert not done.warnings
    assert not (tmp_path / "dcp" / "extra_state").exists()
    found = load_saved(tmp_path / "dcp", tmp_path / "whole.pt")
    made = {**found["model"], **{f"{s}.{name}": v for name, e in found["optim"]["state"].items() for s, v in e.items()}}
    assert made.keys() == expected.keys()
    assert [name for name in made if not torch.equal(made[name], expected[name])] == []


@pytest.mark.parametrize("mesh", [Mesh.of(), Mesh.of(fsdp=2)], ids=str)
def test_what_is_written_is_what_veomni_saves(mesh, tmp_path):
    """The same keys and values, for any mesh, so that its checkpointer goes on (`fixtures/veomni/make.py --check`)."""
    options = ReshardOptions(to="dcp", names="veomni", mesh=mesh)
    reshard(SAVED, tmp_path / "again", options, source_options=READ)
    ours, theirs = (list_values(load_saved(path, tmp_path / f"{path.name}.pt")) for path in (tmp_path / "again", SAVED))
    members = {key for key in theirs if key[:2] == ("optimizer", "param_groups") and "params" in key}
    assert {ours.pop(key) for key in members} == {theirs.pop(key) for key in members}
    assert ours.keys() == theirs.keys()
    different = [
        key
        for key, value in theirs.items()
        if (not torch.equal(ours[key], value) if isinstance(value, torch.Tensor) else ours[key] != value)
    ]
    assert different == []


def test_names_for_another_layout_are_refused(tmp_path):
    with pytest.raises(UsageError, match="--names veomni is for --to dcp"):
        reshard(SAVED, tmp_path / "no", ReshardOptions(to="ranks", names="veomni"), source_options=READ)
