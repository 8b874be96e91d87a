"""What torchtitan's own adapters make of models is read, and written again: names, and experts in stacks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardctl.errors import UnsupportedError, UsageError
from shardctl.mesh import Mesh
from shardctl.options import ReshardOptions, SourceOptions
from shardctl.verbs.digest import digest
from shardctl.verbs.reshard import reshard

FIXTURES = Path(__file__).parents[2] / "fixtures" / "torchtitan"
CASES = ("qwen3", "qwen3_moe", "deepseek_v3", "qwen3_5", "qwen3_5_moe", "kimi_k25")
TIED = ("qwen3", "qwen3_5")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def read_options(case: str) -> SourceOptions:
    return SourceOptions(config=FIXTURES / case / "source" / "config.json")


def load_written(path: Path, target: Path) -> dict[str, object]:
    dcp_to_torch_save(path, target)
    return torch.load(target, weights_only=True)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [key for key in one if one[key].dtype != other[key].dtype or not torch.equal(one[key], other[key])] == []


@pytest.mark.parametrize("case", CASES)
def test_a_save_of_torchtitan_is_the_model(case, tmp_path):
    dcp.save(load_file(FIXTURES / case / "titan.safetensors"), checkpoint_id=tmp_path / "titan", no_dist=True)
    form = "fused" if case == "qwen3_5_moe" else "keep"
    reshard(
        tmp_path / "titan", tmp_path / "hf", ReshardOptions(to="hf", experts=form), source_options=read_options(case)
    )
    made = load_file(tmp_path / "hf" / "model.safetensors")
    made.pop("lm_head.weight", None) if case in TIED else None
    same(made, load_file(FIXTURES / case / "source" / "model.safetensors"))
    assert digest(tmp_path / "hf").digest == digest(FIXTURES / case / "source").digest


@pytest.mark.parametrize("mesh", [Mesh.of(), Mesh.of(fsdp=2, tp=2)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_what_is_written_is_what_the_adapter_makes(case, mesh, tmp_path):
    """For any mesh: torch reads the same arrays, at the root of the state, as torchtitan saves them."""
    reshard(FIXTURES / case / "source", tmp_path / "titan", ReshardOptions(to="dcp", names="torchtitan", mesh=mesh))
    same(load_written(tmp_path / "titan", tmp_path / "whole.pt"), load_file(FIXTURES / case / "titan.safetensors"))
    assert digest(tmp_path / "titan").digest == digest(FIXTURES / case / "source").digest


def test_optimizer_states_follow_their_parameters(tmp_path):
    """A moment of a stack is taken apart with it, and every expert has the step."""
    weights = load_file(FIXTURES / "qwen3_moe" / "titan.safetensors")
    state: dict[str, object] = dict(weights)
    states = {f"state.{name}.exp_avg": value.float() * 2 for name, value in weights.items()}
    steps = {f"state.{name}.step": torch.tensor(5.0) for name in weights}
    state["optimizer"] = states | steps | {f"param_groups.{name}.lr": 0.5 for name in weights}
    dcp.save(state, checkpoint_id=tmp_path / "titan", no_dist=True)
    reshard(
        tmp_path / "titan",
        tmp_path / "dcp",
        ReshardOptions(to="dcp", experts="split"),
        source_options=read_options("qwen3_moe"),
    )
    found = load_written(tmp_path / "dcp", tmp_path / "whole.pt")
    model = load_file(FIXTURES / "qwen3_moe" / "source" / "model.safetensors")
    same(found["model"], model)
    for name, value in model.items():
        assert torch.equal(found["optim"]["state"][name]["exp_avg"], value.float() * 2)
        assert found["optim"]["state"][name]["step"] == 5
    (group,) = found["optim"]["param_groups"]
    assert sorted(group["params"]) == sorted(model)


def test_names_of_another_version_are_refused_by_name(tmp_path):
    weights = load_file(FIXTURES / "qwen3_moe" / "titan.safetensors")
    weights["layers.0.moe.experts.w1"] = weights.pop("layers.0.moe.routed_experts.inner_experts.w1_EFD")
    dcp.save(weights, checkpoint_id=tmp_path / "titan", no_dist=True)
    with pytest.raises(UnsupportedError, match=r"has no tensors layers\.0\.attention\.k_norm"):
        reshard(
            tmp_path / "titan",
            tmp_path / "cut",
            ReshardOptions(mesh=Mesh.of(tp=2)),
            source_options=read_options("qwen3_moe"),
        )


def test_what_torchtitan_does_not_have(tmp_path):
    source = FIXTURES / "qwen3" / "source"
    for options in ({"to": "hf"}, {"to": "ranks", "mesh": Mesh.of(tp=2)}, {"to": "dcp", "experts": "split"}):
        with pytest.raises(UsageError):
            reshard(source, tmp_path / "no", ReshardOptions(names="torchtitan", **options))
    with pytest.raises(UnsupportedError, match=r"cannot be written without|there is no array for"):
        reshard(source, tmp_path / "no", ReshardOptions(to="dcp", names="torchtitan", exclude=r"q_proj"))
    llama = FIXTURES.parent / "meta" / "llama31"
    with pytest.raises(UnsupportedError, match="torchtitan's names for LlamaForCausalLM are not known here"):
        reshard(llama, tmp_path / "no", ReshardOptions(to="dcp", names="torchtitan"))


@pytest.mark.parametrize("mesh", [Mesh.of(), Mesh.of(fsdp=2)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_states_go_back_to_where_torchtitan_has_them(case, mesh, tmp_path):
    """Its optimizer is flat (`optimizer/utils.py`): `state.<array>.<state>`, `param_groups.<array>.<key>`."""
    weights = load_file(FIXTURES / case / "titan.safetensors")
    second = {"lm_head.weight"} if case in TIED else set()  # one parameter of two names: torch trains the first
    trained = {name: value for name, value in weights.items() if name not in second}
    flat: dict[str, object] = {}
    for number, (name, value) in enumerate(trained.items()):
        flat |= {f"state.{name}.exp_avg": value.float() + number, f"state.{name}.exp_avg_sq": value.float() ** 2}
        flat[f"state.{name}.step"] = torch.tensor(5.0)
        flat |= {f"param_groups.{name}.lr": 0.5, f"param_groups.{name}.betas": (0.9, 0.95)}
        flat[f"param_groups.{name}.fused"] = None
    dcp.save({**weights, "optimizer": flat}, checkpoint_id=tmp_path / "titan", no_dist=True)
    reshard(tmp_path / "titan", tmp_path / "plain", ReshardOptions(to="dcp"), source_options=read_options(case))
    reshard(tmp_path / "plain", tmp_path / "back", ReshardOptions(to="dcp", names="torchtitan", mesh=mesh))
    found = load_written(tmp_path / "back", tmp_path / "whole.pt")
    back = found.pop("optimizer")
    same(found, weights)
    same(*({k: v for k, v in each.items() if isinstance(v, torch.Tensor)} for each in (back, flat)))
    assert {k: v for k, v in back.items() if not isinstance(v, torch.Tensor)} == {
        k: v for k, v in flat.items() if not isinstance(v, torch.Tensor)
    }
