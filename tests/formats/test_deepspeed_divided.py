"""Checkpoints that DeepSpeed divided by itself (AutoTP, AutoEP) or trained with Muon, and what it makes of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from deepspeed_builder import changed
from safetensors.torch import load_file
from stored_bits import bits
from stored_bytes import gather, scan
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.libraries.deepspeed.files import sort_files
from shardctl.options import ReshardOptions, SourceOptions
from shardctl.verbs.reshard import reshard

FIXTURES = Path(__file__).parents[2] / "fixtures" / "deepspeed"
EXPERTS = ("ep-z1", "ep-z2", "ep-z3")
DIVIDED = (*EXPERTS, "tp-z2", "uneven-z1", "uneven-z3", "muon-z3")
ALIAS = "model.layers.0.mlp.gate.gate.weight"
"""The router's other name, under which DeepSpeed's converter has the module's copy."""
STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer", "step")
MODEL = "mp_rank_00_model_states.pt"


def read_own(name: str) -> dict:
    """What DeepSpeed's own converter, or its live engine, said."""
    return torch.load(FIXTURES / f"{name}.universal.pt", weights_only=True)


def same(place: Path, found, expected: dict[str, torch.Tensor]) -> None:
    assert [n for n, v in expected.items() if gather(place, found[n]) != bits(v.reshape(found[n].shape))] == []


def write_config(name: str, place: Path) -> SourceOptions:
    path = place / "config.json"
    path.write_text(json.dumps({k: v for k, v in read_own(name)["config"].items() if k != "dtype"}))
    return SourceOptions(config=path)


@pytest.mark.parametrize("name", DIVIDED)
def test_it_is_what_deepspeed_itself_makes_of_it(name):
    own = read_own(name)
    own["fp32"].pop(ALIAS, None)
    found = scan(FIXTURES / name)
    assert found.warnings == ()
    assert found.tensors.keys() == own["fp32"].keys()
    same(FIXTURES / name, found.tensors, own["fp32"])
    states = {f"optimizer.{state}.{n}": v for state in STATES for n, v in own.get(state, {}).items()}
    for key, value in states.items():
        if "momentum_buffer" in key:  # the live engine has it in fp32, its file in the type of gradients
            states[key] = value.bfloat16()
            assert torch.equal(states[key].float(), value)
    assert states.keys() <= found.training.states.keys()
    assert {key.split(".")[1] for key in found.training.states.keys() - states.keys()} <= {"step"}
    same(FIXTURES / name, found.training.states, states)


def test_the_modules_own_experts_are_files_of_their_own():
    own = read_own("ep-z2")["fp32"]
    assert gather(FIXTURES / "ep-z2", scan(FIXTURES / "ep-z2", "module").tensors["model.norm.weight"])
    found = scan(FIXTURES / "ep-z2", "module").tensors
    same(FIXTURES / "ep-z2", found, {name: value for name, value in own.items() if name != ALIAS})
    assert found["model.layers.0.mlp.router.gate.weight"].ties == (ALIAS,)
    assert len({chunk.where.file for chunk in found["model.layers.0.mlp.experts.w1"].chunks}) == 4


@pytest.mark.parametrize(("name", "close"), [("ep-z1", 2e-2), ("ep-z2", 1e-6), ("ep-z3", 2e-2)])
def test_transformers_computes_the_loss_of_the_engine(name, close, tmp_path):
    own = read_own(name)
    reshard(FIXTURES / name, tmp_path / "hf", ReshardOptions(to="hf"), source_options=write_config(name, tmp_path))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, experts_implementation="eager"
    )
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    assert abs(loss - own["loss"]) < close


def test_states_of_experts_follow_them(tmp_path):
    own = read_own("ep-z2")
    options = ReshardOptions(to="dcp", experts="split")
    reshard(FIXTURES / "ep-z2", tmp_path / "dcp", options, source_options=write_config("ep-z2", tmp_path))
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt", weights_only=True)["optim"]["state"]
    names = {"w1": "w1", "w2": "w2", "w3": "w3"}  # Mixtral's own names on the Hub are the same words
    for part, theirs in names.items():
        for expert in range(4):
            held = state[f"model.layers.0.block_sparse_moe.experts.{expert}.{theirs}.weight"]
            for kind in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(held[kind], own[kind][f"model.layers.0.mlp.experts.{part}"][expert])
            assert held["step"] == 2


def test_files_may_be_listed_in_any_order():
    """Files of experts alone were forgotten when another kind followed them."""

    class Listed:
        def files(self):
            names = ["layer_0_expert_0_mp_rank_00_model_states.pt", "mp_rank_00_model_states.pt"]
            return dict.fromkeys(f"global_step2/{name}" for name in names)

    (found,) = sort_files(Listed()).values()
    assert (len(found.experts), len(found.model)) == (1, 1)


def placed(change):
    def alter(tree):
        change(tree["ds_autoep_layers"][0])

    return alter


@pytest.mark.parametrize(("change", "error", "words"), [
    (lambda layer: layer["expert_placement"].update(version=2), UnsupportedError, "in version 2"),
    (lambda layer: layer["expert_placement"]["ranks"].pop(), SourceError, "do not have its 4 experts"),
    (lambda layer: layer["expert_placement"]["ranks"][0].update(experts=[0, 0]), SourceError, "do not have its 4"),
    (lambda layer: layer["expert_placement"]["ranks"][0].update(experts=[0, 1, 1]), SourceError, "an expert twice"),
    (lambda layer: layer["expert_placement"]["ranks"][0].update(experts=[0, 1, 2]), SourceError, "not those of its"),
    (lambda layer: layer.update(expert_key_prefix=None), SourceError, "lacks its name"),
    (lambda layer: layer.update(expert_placement=None, num_local_experts=3), SourceError, "do not have the 4"),
])  # fmt: skip
def test_a_description_of_experts_that_does_not_fit_is_refused(change, error, words, tmp_path):
    place = changed(FIXTURES / "ep-z2", tmp_path / "bad", MODEL, placed(change))
    with pytest.raises(error, match=words):
        scan(place)


def test_experts_in_another_order_are_put_where_they_belong(tmp_path):
    def turn(layer):
        first, second = layer["expert_placement"]["ranks"]
        first["experts"], second["experts"] = [3, 1], [0, 2]

    place = changed(FIXTURES / "ep-z2", tmp_path / "turned", MODEL, placed(turn))
    (name,) = [n for n in read_own("ep-z2")["fp32"] if n.endswith("experts.w2")]
    value = read_own("ep-z2")["fp32"][name]
    same(place, scan(place).tensors, {name: value[[2, 1, 3, 0]]})


def test_experts_and_layers_divided_at_once_are_refused(tmp_path):
    place = Path(shutil.copytree(FIXTURES / "ep-z2", tmp_path / "bad"))
    (path,) = place.glob("global_step2/mp_rank_00_model_states.pt")
    shutil.copy(path, path.with_name("mp_rank_01_model_states.pt"))
    with pytest.raises(UnsupportedError, match="2 model-parallel ranks divided their layers"):
        scan(place)


def test_muons_groups_are_told_apart_and_universal_has_no_place_for_its_states(tmp_path):
    first, second = scan(FIXTURES / "muon-z3").training.groups
    assert (first.settings["use_muon"], first.settings["momentum"], len(first.parameters)) == (True, 0.95, 7)
    assert (second.settings["use_muon"], second.settings["lr"], len(second.parameters)) == (False, 0.01, 5)
    with pytest.raises(UnsupportedError, match="has a state momentum_buffer") as caught:
        reshard(FIXTURES / "muon-z3", tmp_path / "no", ReshardOptions(to="universal"))
    assert "--to dcp" in caught.value.hint


def change_rules(change):
    def alter(tree):
        change(tree["universal_checkpoint_info"])

    return alter


def describe_scaled(info):
    for entry in info["affine_map"]["params"].values():
        for rank in entry["ranks"].values():
            rank["pieces"][0]["scale"] = 0.5


def describe_strided(info):
    for entry in info["affine_map"]["params"].values():
        for rank in entry["ranks"].values():
            rank["pieces"][0]["dest"][1] = [1] * len(rank["pieces"][0]["shape"])


def describe_outside(info):
    for entry in info["affine_map"]["params"].values():
        for rank in entry["ranks"].values():
            rank["pieces"][0]["source"][0] = 1 << 40


@pytest.mark.parametrize(("change", "error", "words"), [
    (lambda info: info["affine_map"].update(version=2), UnsupportedError, "in version 2"),
    (describe_scaled, UnsupportedError, "multiplied by 0.5"),
    (describe_strided, UnsupportedError, "in another order on ranks"),
    (describe_outside, SourceError, "is not inside"),
    (lambda info: [each.update(ranks={}) for each in info["affine_map"]["params"].values()], SourceError, "otherwise"),
])  # fmt: skip
def test_a_description_of_blocks_that_cannot_be_followed_is_refused(change, error, words, tmp_path):
    place = changed(FIXTURES / "uneven-z1", tmp_path / "bad", MODEL, change_rules(change))
    with pytest.raises(error, match=words):
        scan(place)


def test_blocks_in_another_order_are_put_where_they_belong(tmp_path):
    """As of CodeGen and GPTBigCode, of which DeepSpeed describes the blocks and says nothing else."""
    own = read_own("uneven-z1")["fp32"]
    name = "model.layers.0.mlp.down_proj.weight"

    def turn(tree):
        info = tree["universal_checkpoint_info"]
        info["parameter_with_row_parallelism_patterns"] = []
        (pattern,) = [p for p in info["affine_map"]["params"] if "down_proj" in p]
        first, second = (info["affine_map"]["params"][pattern]["ranks"][rank]["pieces"][0] for rank in range(2))
        first["source"][0], second["source"][0] = second["shape"][1], 0

    place = changed(FIXTURES / "uneven-z1", tmp_path / "turned", MODEL, turn)
    width = 4
    same(place, scan(place).tensors, {name: torch.cat([own[name][:, width:], own[name][:, :width]], 1)})


def test_universal_says_which_arrays_are_of_experts(tmp_path):
    """Without that, an engine with AutoEP refuses them: it would cut them as layers."""
    reshard(FIXTURES / "ep-z2", tmp_path / "universal", ReshardOptions(to="universal"))
    place = tmp_path / "universal" / "universal" / "zero"
    for kind in ("fp32", "exp_avg", "exp_avg_sq"):
        found = torch.load(place / "model.layers.0.mlp.experts.w2" / f"{kind}.pt", weights_only=True)
        assert (found["is_expert_param"], found["ep_num_experts"]) == (True, 4)
        assert torch.equal(found["param"], read_own("ep-z2")[kind]["model.layers.0.mlp.experts.w2"])
        assert "is_expert_param" not in torch.load(place / "lm_head.weight" / f"{kind}.pt", weights_only=True)


def test_a_config_is_needed_for_the_models_names(tmp_path):
    reshard(FIXTURES / "ep-z2", tmp_path / "hf", ReshardOptions(to="hf"))
    assert load_file(tmp_path / "hf" / "model.safetensors")["model.layers.0.mlp.experts.w1"].shape == (4, 6, 8)
