"""What torchtitan's own adapters make of models is read, and written again: names, and experts in stacks."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardctl.base.errors import UnsupportedError, UsageError
from shardctl.options import ReshardOptions, SourceOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.reshard import reshard

FIXTURES = Path(__file__).parents[2] / "fixtures" / "torchtitan"
ELSEWHERE = {
    "llama3": FIXTURES.parent / "torch_dist" / "hf" / "llama",
    "gpt_oss": FIXTURES.parent / "megatron" / "hf" / "gpt-oss",
    "deepseek_v3_mtp": FIXTURES.parent / "megatron" / "hf" / "deepseek-v3-predicting",
}
CASES = ("qwen3", "qwen3_moe", "deepseek_v3", "qwen3_5", "qwen3_5_moe", "kimi_k25", *ELSEWHERE)
TIED = ("qwen3", "qwen3_5")
BALANCED = ("qwen3_moe", "qwen3_5_moe")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def find_source(case: str) -> Path:
    return ELSEWHERE.get(case, FIXTURES / case / "source")


def read_options(case: str) -> SourceOptions:
    return SourceOptions(config=find_source(case) / "config.json")


def load_arrays(case: str) -> dict[str, torch.Tensor]:
    """What torchtitan has, with what balances experts, which its runs ask for and older cases were made without."""
    found = load_file(FIXTURES / case / "titan.safetensors")
    if case in BALANCED:
        counts = {name: len(v) for name, v in found.items() if name.endswith("router.gate.weight")}
        found |= {n.replace("router.gate.weight", "expert_bias_E"): torch.zeros(count) for n, count in counts.items()}
    return found


def load_written(path: Path, target: Path) -> dict[str, object]:
    dcp_to_torch_save(path, target)
    return torch.load(target, weights_only=True)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [key for key in one if one[key].dtype != other[key].dtype or not torch.equal(one[key], other[key])] == []


@pytest.mark.parametrize("case", CASES)
def test_a_save_of_torchtitan_is_the_model(case, tmp_path):
    dcp.save(load_arrays(case), checkpoint_id=tmp_path / "titan", no_dist=True)
    form = "fused" if case == "qwen3_5_moe" else "keep"
    done = reshard(
        tmp_path / "titan", tmp_path / "hf", ReshardOptions(to="hf", experts=form), source_options=read_options(case)
    )
    assert any("to balance them" in said for said in done.warnings) == (case in {*BALANCED, "gpt_oss"})
    made = load_file(tmp_path / "hf" / "model.safetensors")
    made.pop("lm_head.weight", None) if case in TIED else None
    same(made, load_file(find_source(case) / "model.safetensors"))
    assert digest(tmp_path / "hf").digest == digest(find_source(case)).digest


@pytest.mark.parametrize("mesh", [Mesh.of(), Mesh.of(fsdp=2, tp=2)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_what_is_written_is_what_the_adapter_makes(case, mesh, tmp_path):
    """For any mesh: torch reads the same arrays, at the root of the state, as torchtitan saves them."""
    if case == "llama3" and mesh != Mesh.of():
        with pytest.raises(UnsupportedError, match="rows of heads take turns"):
            reshard(find_source(case), tmp_path / "no", ReshardOptions(to="dcp", names="torchtitan", mesh=mesh))
        return
    reshard(find_source(case), tmp_path / "titan", ReshardOptions(to="dcp", names="torchtitan", mesh=mesh))
    same(load_written(tmp_path / "titan", tmp_path / "whole.pt"), load_arrays(case))
    assert digest(tmp_path / "titan").digest == digest(find_source(case)).digest


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
    other = FIXTURES.parent / "megatron" / "hf" / "mixtral"
    with pytest.raises(UnsupportedError, match="torchtitan's names for MixtralForCausalLM are not known here"):
        reshard(other, tmp_path / "no", ReshardOptions(to="dcp", names="torchtitan"))


@pytest.mark.parametrize("mesh", [Mesh.of(), Mesh.of(fsdp=2)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_states_go_back_to_where_torchtitan_has_them(case, mesh, tmp_path):
    """Its optimizer is flat, and knows queries, keys and values as one parameter, group by group of heads."""
    if case == "llama3" and mesh != Mesh.of():
        return
    weights = load_arrays(case)
    second = {"lm_head.weight"} if case in TIED else set()  # one parameter of two names: torch trains the first
    trained = {n: v.float() for n, v in weights.items() if n not in second and not n.endswith("expert_bias_E")}
    for name in [name for name in trained if ".qkv_linear.wq." in name]:
        heads = (trained.pop(name.replace(".wq.", f".w{part}.")) for part in "qkv")
        groups = [each.unflatten(0, (2, -1)) for each in heads]  # every model here has two heads of keys
        trained[name.replace(".wq.", ".wqkv.")] = torch.cat(groups, 1).flatten(0, 1)
    flat: dict[str, object] = {}
    for number, (name, value) in enumerate(trained.items()):
        flat |= {f"state.{name}.exp_avg": value + number, f"state.{name}.exp_avg_sq": value**2}
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


def test_states_of_joined_parameters_need_a_config(tmp_path):
    weights = load_arrays("qwen3")
    name = "layers.0.attention.qkv_linear.wqkv.weight"
    state = {f"state.{name}.exp_avg": torch.zeros(64, 16), f"param_groups.{name}.lr": 0.5}
    dcp.save({**weights, "optimizer": state}, checkpoint_id=tmp_path / "titan", no_dist=True)
    done = reshard(tmp_path / "titan", tmp_path / "dcp", ReshardOptions(to="dcp"))
    assert any("which only the config of a model divides" in said for said in done.warnings)


def test_layers_that_predict_use_the_models_own_embedding(tmp_path):
    """The copies that DeepSeek's files have of it have no place."""
    shutil.copytree(find_source("deepseek_v3_mtp"), tmp_path / "source")
    state = load_file(tmp_path / "source" / "model.safetensors")
    last = next(name.removesuffix("enorm.weight") for name in state if name.endswith(".enorm.weight"))
    state[f"{last}embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    wish = ReshardOptions(to="dcp", names="torchtitan")
    with pytest.raises(UnsupportedError, match=r"no array for model\.layers\.\d\.embed_tokens") as told:
        reshard(tmp_path / "source", tmp_path / "no", wish)
    assert "--exclude" in told.value.hint
    reshard(tmp_path / "source", tmp_path / "titan", replace(wish, exclude=r"\.layers\.\d+\.embed_tokens"))
    same(load_written(tmp_path / "titan", tmp_path / "whole.pt"), load_arrays("deepseek_v3_mtp"))
