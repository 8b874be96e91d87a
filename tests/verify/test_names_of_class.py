"""`verify` compares names with the class in the config, from headers; `reshard` refuses a config of another model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shardctl.cli.program import run
from shardctl.models import describe_model
from shardctl.options import ReshardOptions
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

CONFIG = json.loads((Path(__file__).parents[2] / "fixtures" / "configs" / "llama.json").read_text())
WEIGHTS = {tensor.name: torch.ones(tensor.shape) for tensor in describe_model(CONFIG).own()}
FIRST_LAYER = {name: tensor for name, tensor in WEIGHTS.items() if "layers.1" not in name}


def store(place, tensors, **config):
    place.mkdir()
    (place / "config.json").write_text(json.dumps({**CONFIG, "dtype": "float32", **config}))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, place / "model.safetensors")
    return place


def find(place):
    """The findings about names, by severity."""
    (level,) = verify(place).levels
    return [(finding.severity, finding.message) for finding in level.findings if finding.check == "names"]


def test_names_of_the_class_are_no_finding(tmp_path):
    assert find(store(tmp_path / "own", WEIGHTS)) == []


def test_tensors_that_are_missing_are_findings_and_the_exit_code_is_3(tmp_path):
    source = store(tmp_path / "some", FIRST_LAYER)
    ((severity, message),) = find(source)
    assert severity == "error"
    assert message.startswith("the checkpoint lacks 9 tensors of LlamaForCausalLM: model.layers.1.")
    assert run(["verify", str(source)]) == 3


def test_so_are_those_of_a_checkpoint_that_also_has_others(tmp_path):
    ((severity, message),) = find(store(tmp_path / "some", FIRST_LAYER | {"x.y": torch.ones(2)}))
    assert severity == "error"
    assert message.startswith("9 of 21 tensors of LlamaForCausalLM are missing: model.layers.1.")


def test_names_below_a_prefix_are_not_found_by_a_loader(tmp_path):
    wrapped = {f"net.model.{name}": tensor for name, tensor in WEIGHTS.items()}
    ((severity, message),) = find(store(tmp_path / "wrapped", wrapped))
    assert severity == "error"
    assert message.startswith("the names of 21 tensors begin with 'net.model.', under which a loader")


@pytest.mark.parametrize(
    ("tensors", "hint"),
    [
        ({"a.b.weight": torch.ones(3, 3)}, "--config may name another model's config"),
        ({f"foo.{n}": t for n, t in FIRST_LAYER.items()} | {"x.y": torch.ones(2)}, "--subtree foo reads the tensors"),
    ],
)
def test_a_config_of_another_model_is_refused_with_the_prefix_that_would_help(tmp_path, capfd, tensors, hint):
    source = store(tmp_path / "other", tensors)
    ((severity, message),) = find(source)
    assert severity == "error"
    assert message.startswith("none of 21 tensors of LlamaForCausalLM is there")
    assert run(["reshard", str(source), str(tmp_path / "out"), "--to", "hf"]) == 4
    assert hint in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_base_model_with_the_config_of_a_head_is_a_warning_that_lists_what_is_new(tmp_path):
    base = {name.removeprefix("model."): tensor for name, tensor in WEIGHTS.items() if name != "lm_head.weight"}
    checked = verify(store(tmp_path / "base", base))
    assert checked.ok
    assert any("a loader makes lm_head.weight of LlamaForCausalLM anew" in each.message for each in checked.findings)


def test_consumers_that_reject_other_tensors_are_named(tmp_path):
    source = store(tmp_path / "extra", WEIGHTS | {"v_head.weight": torch.ones(2)})
    assert verify(source).ok
    ((severity, message),) = find(source)
    assert severity == "warning"
    assert "vllm 0.33" in message
    assert "reject 1 tensor that the class does not have: v_head.weight" in message
    reshard(source, tmp_path / "hf", ReshardOptions(to="hf"))
    assert find(tmp_path / "hf") == []


def test_names_of_a_class_that_no_table_knows_are_said_to_be_unchecked(tmp_path):
    (level,) = verify(store(tmp_path / "odd", WEIGHTS, architectures=["OddModel"], model_type="odd")).levels
    assert "names: not checked, because no table knows the tensors of OddModel" in level.notes


def test_two_models_in_one_file_are_no_error(tmp_path):
    both = {f"{part}.{name}": tensor + n for n, part in enumerate("ab") for name, tensor in WEIGHTS.items()}
    checked = verify(store(tmp_path / "both", both))
    assert checked.ok
    assert any(note.startswith("names: not checked: the tensors below 'a.'") for note in checked.levels[0].notes)
