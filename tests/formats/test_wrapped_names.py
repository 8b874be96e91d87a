"""Checkpoints of trainers' own classes: whatever the format, the result has the names of the class in config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from deepspeed_builder import joined, scattered
from safetensors.torch import load_file, save_file

from shardctl.models import describe_model
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.tensors.training import format_state_name, split_state_name
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

FIXTURE = Path(__file__).parents[2] / "fixtures" / "configs" / "llama.json"


def make_weights() -> dict[str, torch.Tensor]:
    """The tensors of a tiny Llama, in fp32 and with other values each."""
    shapes = {tensor.name: tensor.shape for tensor in describe_model(json.loads(FIXTURE.read_text())).own()}
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


WEIGHTS = make_weights()


@pytest.fixture
def options(tmp_path):
    """The config beside no weights, whose type it has."""
    (tmp_path / "config.json").write_text(json.dumps(json.loads(FIXTURE.read_text()) | {"dtype": "float32"}))
    return SourceOptions(config=tmp_path / "config.json")


def save_bin(place, tensors):
    place.mkdir()
    torch.save(tensors, place / "pytorch_model.bin")
    return place


def save_pt(place, tensors):
    place.mkdir()
    torch.save({"state_dict": tensors, "epoch": 3}, place / "last.pt")
    return place


def save_safetensors(place, tensors):
    place.mkdir()
    save_file(tensors, place / "model.safetensors")
    return place


def save_dcp(place, tensors):
    state = {name: {"exp_avg": tensor * 2, "step": torch.tensor(7.0)} for name, tensor in tensors.items()}
    optimizer = {"state": state, "param_groups": [{"lr": 0.5, "params": list(tensors)}]}
    dcp.save({"model": tensors, "optim": optimizer}, checkpoint_id=place, no_dist=True)
    return place


SAVERS = {
    "pytorch_model.bin": save_bin,
    "state_dict": save_pt,
    "safetensors": save_safetensors,
    "dcp": save_dcp,
    "deepspeed stage 2": lambda place, tensors: joined(place, tensors, 2),
    "deepspeed stage 3": lambda place, tensors: scattered(place, tensors, 2),
}
STATES = ("dcp", "deepspeed stage 2", "deepspeed stage 3")
"""Formats that hold an optimizer's `exp_avg`, and the factor of it."""


def wrap(prefix):
    return {f"{prefix}{name}": tensor.clone() for name, tensor in WEIGHTS.items()}


@pytest.mark.parametrize("prefix", ["model.", "_forward_module.model.", "module.model."])
@pytest.mark.parametrize("form", SAVERS)
def test_the_result_has_the_names_of_the_class(form, prefix, options, tmp_path):
    source = SAVERS[form](tmp_path / "source", wrap(prefix))
    reshard(source, tmp_path / "hf", ReshardOptions(to="hf"), source_options=options)
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == WEIGHTS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in WEIGHTS.items())
    assert verify(tmp_path / "hf", VerifyOptions(level="full", against=source), source_options=options).ok


@pytest.mark.parametrize("form", STATES)
def test_optimizer_states_have_them_too(form, options, tmp_path):
    source = SAVERS[form](tmp_path / "source", wrap("model."))
    reshard(source, tmp_path / "ranks", ReshardOptions(to="ranks", optimizer_states="keep"), source_options=options)
    found = {n: t for file in (tmp_path / "ranks").glob("*.safetensors") for n, t in load_file(file).items()}
    assert {parts[1] for name in found if (parts := split_state_name(name))} == WEIGHTS.keys()
    factor = 2 if form == "dcp" else 1
    for name, tensor in WEIGHTS.items():
        assert torch.equal(found[format_state_name("exp_avg", name)], tensor * factor), name
    groups = json.loads((tmp_path / "ranks" / "optimizer.json").read_text())["groups"]
    assert {name for group in groups for name in group["parameters"]} == WEIGHTS.keys()


def test_torchs_wrappers_are_left_out_of_the_names_of_a_model_that_nobody_knows(tmp_path):
    source = save_pt(tmp_path / "source", wrap("_orig_mod."))
    reshard(source, tmp_path / "hf", ReshardOptions(to="hf"))
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == WEIGHTS.keys()


@pytest.mark.parametrize("to", ["hf", "ranks"])
def test_a_converted_base_model_is_known_again(to, options, tmp_path):
    base = {name.removeprefix("model."): tensor for name, tensor in WEIGHTS.items() if name != "lm_head.weight"}
    source = save_safetensors(tmp_path / "source", {f"encoder.{name}": tensor for name, tensor in base.items()})
    done = reshard(source, tmp_path / "out", ReshardOptions(to=to), source_options=options)
    assert done.record.options["base_only"] == "true"
    assert any("a loader makes lm_head.weight of LlamaForCausalLM anew" in line for line in done.warnings)
    assert verify(tmp_path / "out", VerifyOptions(level="full", against=source), source_options=options).ok
