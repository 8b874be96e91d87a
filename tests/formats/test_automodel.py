"""NeMo Automodel saves weights and config in `model/`, as safetensors, and its optimizer in `optim/`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardctl.errors import SourceError
from shardctl.options import ReshardOptions
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard

FIXTURES = Path(__file__).parents[2] / "fixtures" / "automodel"
SAVED = FIXTURES / "epoch_0_step_2"
STATES = ("exp_avg.", "exp_avg_sq.", "step.")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [key for key in one if not torch.equal(one[key], other[key])] == []


def test_weights_states_and_config_are_found(tmp_path):
    expected = load_file(FIXTURES / "whole.safetensors")
    done = reshard(SAVED, tmp_path / "dcp", ReshardOptions(to="dcp"))
    assert not done.warnings
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    same(found["model"], {name: value for name, value in expected.items() if not name.startswith(STATES)})
    states = {f"{state}.{name}": v for name, held in found["optim"]["state"].items() for state, v in held.items()}
    same(states, {name: value for name, value in expected.items() if name.startswith(STATES)})
    assert found["optim"]["param_groups"][0]["lr"] == 0.01
    assert not (tmp_path / "dcp" / "model").exists()


def test_the_model_is_that_of_its_own_config(tmp_path):
    found = inspect(SAVED)
    assert (found.architecture, found.format) == ("LlamaForCausalLM", "safetensors")
    reshard(SAVED, tmp_path / "hf", ReshardOptions(to="hf"))
    expected = load_file(FIXTURES / "whole.safetensors")
    weights = {name: value for name, value in expected.items() if not name.startswith(STATES)}
    same(load_file(tmp_path / "hf" / "model.safetensors"), weights)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["num_hidden_layers"] == 2
    assert not (tmp_path / "hf" / "model").exists()


def test_a_config_that_is_none_is_an_error(tmp_path):
    place = Path(shutil.copytree(SAVED, tmp_path / "bad"))
    (place / "model" / ".hf_metadata" / "config.json").write_text("[]")
    with pytest.raises(SourceError, match="is not an object"):
        inspect(place)
