"""Optimizer states are compared whenever both checkpoints have them, in every layout that holds them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from shardctl.options import ReshardOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.record import RECORD
from shardctl.verbs.diff import diff
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

FIXTURES = Path(__file__).parents[2] / "fixtures"
TRAINED = FIXTURES / "torch_dist" / "trained" / "iter"
LAYOUTS = ("dcp", "universal", "torch_dist", "megatron", "fsdp_dtensor", "ranks")
FILE = "shard-00001-model-00001-of-00001.safetensors"
NORM, OTHER = "model.layers.0.input_layernorm.weight", "model.layers.0.post_attention_layernorm.weight"


def convert(source, place, to):
    mesh = Mesh.of(tp=2) if to == "ranks" and place.name != "source" else None
    reshard(source, place, ReshardOptions(to=to, mesh=mesh, optimizer_states="keep", threads=1))
    return place


def change_moment(tensors, _settings):
    tensors[f"optimizer.exp_avg.{NORM}"] += 0.5
    return {f"optimizer.exp_avg.{NORM}"}


def swap_moments(tensors, _settings):
    a, b = (f"optimizer.exp_avg.{name}" for name in (NORM, OTHER))
    tensors[a], tensors[b] = tensors[b], tensors[a]
    return {a, b}


def count_a_step_more(_tensors, settings):
    settings["step"] += 1
    return {"step"}


def change_rate(_tensors, settings):
    for group in settings["groups"]:
        group["settings"]["lr"] = 0.125
    return {"lr"}


FAULTS = {"moment": change_moment, "swapped moments": swap_moments, "step": count_a_step_more, "rate": change_rate}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What Megatron-LM trained, in one file that the library of safetensors can write again."""
    return convert(TRAINED, tmp_path_factory.mktemp("plain") / "source", "ranks")


@pytest.fixture(scope="module")
def spoiled(plain, tmp_path_factory):
    """Gives the checkpoint with a fault in its states, and what has changed, which nobody may change."""
    made = {}

    def give(fault):
        if fault not in made:
            place = tmp_path_factory.mktemp("spoiled") / "source"
            shutil.copytree(plain, place)
            (place / RECORD).unlink()
            tensors, settings = load_file(place / FILE), json.loads((place / "optimizer.json").read_text())
            changed = FAULTS[fault](tensors, settings)
            save_file(tensors, place / FILE, {"format": "pt"})
            (place / "optimizer.json").write_text(json.dumps(settings))
            made[fault] = place, changed
        return made[fault]

    return give


def find_errors(place, against, **options):
    result = verify(place, VerifyOptions(against=against, **options))
    return result.exit_code, [each for each in result.findings if each.severity == "error"]


@pytest.mark.parametrize("to", LAYOUTS)
def test_states_that_are_the_same_raise_no_alarm_with_a_record_and_without(plain, tmp_path, to):
    place = convert(plain, tmp_path / "out", to)
    assert find_errors(place, TRAINED, level="full") == (0, [])
    (place / RECORD).unlink()
    assert find_errors(place, TRAINED) == (0, [])
    assert not [each for each in diff(place, TRAINED).changes if "optimizer" in each.tensor]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("to", LAYOUTS)
def test_a_fault_in_the_states_is_found_in_every_layout_that_holds_them(spoiled, plain, tmp_path, to, fault):
    source, changed = spoiled(fault)
    place = convert(source, tmp_path / "out", to)
    for recorded in (True, False):
        if not recorded:
            (place / RECORD).unlink()
        code, errors = find_errors(place, plain)
        assert code == 3
        assert all(any(name in each.message for name in changed) for each in errors)
    found = diff(place, plain)
    assert not found.equal_all
    assert all(any(name in each.tensor for name in changed) for each in found.changes)


def test_a_moment_that_is_missing_is_found_with_a_source_and_without(tmp_path):
    whole, place = FIXTURES / "deepspeed" / "universal-z1", tmp_path / "lost"
    shutil.copytree(whole, place)
    (place / "universal" / "zero" / "cube" / "exp_avg.pt").unlink()
    code, errors = find_errors(place, whole)
    assert code == 3
    assert any("optimizer.exp_avg.cube is missing" in each.message for each in errors)
    code, errors = find_errors(place, None)
    assert (code, errors[0].check) == (3, "optimizer")
    assert errors[0].message.startswith("cube has no exp_avg")
    assert find_errors(whole, None)[0] == 0


def test_a_side_without_states_is_named(plain, tmp_path):
    bare = tmp_path / "bare"
    reshard(plain, bare, ReshardOptions(to="hf", threads=1))
    said = f"optimizer states, because {bare} has none"
    for place, against in ((bare, plain), (plain, bare)):
        result = verify(place, VerifyOptions(against=against))
        assert (result.exit_code, [each for each in result.unchecked if "optimizer" in each]) == (0, [said])
        assert f"not compared: {said}" in diff(place, against).warnings
    assert not any("optimizer" in each for each in verify(bare, VerifyOptions(against=bare)).unchecked)
