"""NeMo Automodel saves weights and config in `model/`, as safetensors, and its optimizer in `optim/`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardctl.base.errors import SourceError, UnsupportedError, UsageError
from shardctl.options import ReshardOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

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


@pytest.mark.parametrize("case", ["qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss"])
def test_states_of_grouped_experts_are_those_of_the_adapters(case, tmp_path):
    """Weights have the names of the Hub, states those of Automodel's own arrays, which its adapters take apart so."""
    expected = load_file(FIXTURES / f"moe_{case}.safetensors")
    form = "keep" if case == "gpt_oss" else "split"
    done = reshard(FIXTURES / f"moe_{case}", tmp_path / "dcp", ReshardOptions(to="dcp", experts=form))
    assert not done.warnings
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    same(found["model"], {name: value for name, value in expected.items() if not name.startswith(STATES)})
    held = found["optim"]["state"]
    assert held.keys() == found["model"].keys()
    assert {float(each["step"]) for each in held.values()} == {2}
    states = {f"{kind}.{name}": each[kind] for name, each in held.items() for kind in ("exp_avg", "exp_avg_sq")}
    same(states, {name: value for name, value in expected.items() if name.startswith(STATES)})
    (group,) = found["optim"]["param_groups"]
    assert (sorted(group["params"]), group["lr"]) == (sorted(held), 0.01)


def test_states_of_another_number_of_experts_are_refused(tmp_path):
    place = Path(shutil.copytree(FIXTURES / "moe_qwen3_moe", tmp_path / "cut"))
    file = next((place / "model").glob("*.safetensors"))
    weights = load_file(file)
    kept = {name: value for name, value in weights.items() if ".experts.2." not in name}
    gate = next(name for name in kept if name.endswith(".mlp.gate.weight"))
    save_file({**kept, gate: kept[gate][:2].clone()}, file)
    config = place / "model" / ".hf_metadata" / "config.json"
    config.write_text(config.read_text().replace('"num_experts": 3', '"num_experts": 2'))
    with pytest.raises(SourceError, match="gate_and_up_projs"):
        reshard(place, tmp_path / "dcp", ReshardOptions(to="dcp"))


def load_trained(path: Path, target: Path) -> dict[str, object]:
    dcp_to_torch_save(path, target)
    return torch.load(target, weights_only=True)["optim"]


@pytest.mark.parametrize("case", ["qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss", ""])
def test_what_is_written_is_what_automodel_saves(case, tmp_path):
    """By way of plain DCP: weights under the names of the Hub, and states and settings of its own arrays."""
    saved = FIXTURES / f"moe_{case}" if case else SAVED
    expected = load_file(FIXTURES / (f"moe_{case}.safetensors" if case else "whole.safetensors"))
    reshard(saved, tmp_path / "dcp", ReshardOptions(to="dcp"))
    reshard(tmp_path / "dcp", tmp_path / "out", ReshardOptions(to="dcp", names="automodel"))
    (file,) = (tmp_path / "out" / "model").glob("*.safetensors")
    same(load_file(file), {name: value for name, value in expected.items() if not name.startswith(STATES)})
    ours, theirs = (load_trained(place / "optim", tmp_path / "whole.pt") for place in (tmp_path / "out", saved))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value) if isinstance(value, torch.Tensor) else ours[name] == value, name
    done = reshard(tmp_path / "out", tmp_path / "again", ReshardOptions(to="dcp"))
    assert done.record.digest == digest(saved).digest == digest(tmp_path / "out").digest
    assert (tmp_path / "again" / ".metadata").read_bytes() == (tmp_path / "dcp" / ".metadata").read_bytes()
    assert verify(tmp_path / "out", VerifyOptions(level="full")).ok


def test_weights_alone_have_no_optimizer(tmp_path):
    wish = ReshardOptions(to="dcp", names="automodel", optimizer_states="drop")
    reshard(SAVED, tmp_path / "out", wish)
    assert not (tmp_path / "out" / "optim").exists()
    with pytest.raises(UsageError, match="takes no mesh"):
        reshard(SAVED, tmp_path / "no", ReshardOptions(to="dcp", names="automodel", mesh=Mesh.of(fsdp=2)))
    with pytest.raises(UnsupportedError, match="Automodel's names for MixtralForCausalLM are not known"):
        reshard(FIXTURES.parent / "megatron" / "hf" / "mixtral", tmp_path / "no", wish)
