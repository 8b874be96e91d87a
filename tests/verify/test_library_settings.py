"""What another library keeps of the model is compared with the source, also where a config.json lies beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardctl.options import ReshardOptions, VerifyOptions
from shardctl.tensors.record import RECORD
from shardctl.verbs.diff import diff
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

LLAMA = Path(__file__).parents[2] / "fixtures" / "megatron" / "hf" / "llama"
ARGS = {"rotary_base": 12_345, "norm_epsilon": 0.125, "swiglu": False, "add_bias_linear": True, "num_query_groups": 1}
PARAMS = {"rope_theta": 12_345.0, "norm_eps": 0.125, "n_heads": 2}


def edit_args(place, **changes):
    """Change the namespace as Megatron-LM would save it."""
    (file,) = (*place.rglob("model_optim_rng.pt"), *place.rglob("common.pt"))
    state = torch.load(file, weights_only=False)
    for name, value in changes.items():
        assert getattr(state["args"], name) != value
        setattr(state["args"], name, value)
    torch.save(state, file)


def edit_params(place, **changes):
    file = place / "params.json"
    params = json.loads(file.read_text())
    assert not changes.items() <= params.items()
    file.write_text(json.dumps(params | changes))


EDITS = {
    **{("megatron", name): edit_args for name in ARGS},
    **{("torch_dist", name): edit_args for name in ARGS},
    **{("meta", name): edit_params for name in PARAMS},
}


@pytest.fixture
def converted(tmp_path):
    """Gives the model in a library's layout, with its config beside it and without a record."""

    def give(to, name="out"):
        reshard(LLAMA, tmp_path / name, ReshardOptions(to=to, threads=1))
        (tmp_path / name / RECORD).unlink()
        assert (tmp_path / name / "config.json").is_file()
        return tmp_path / name

    return give


def find_errors(place, against):
    found = verify(place, VerifyOptions(against=against))
    return [each.message for each in found.findings if each.severity == "error"]


@pytest.mark.parametrize(("to", "name"), EDITS)
def test_a_setting_that_is_not_the_source_s_is_an_error_whatever_config_json_says(converted, to, name):
    place = converted(to)
    assert find_errors(place, LLAMA) == []
    EDITS[to, name](place, **{name: ({**ARGS, **PARAMS})[name]})
    errors = find_errors(place, LLAMA)
    assert any(f" has {name} " in message for message in errors)


@pytest.mark.parametrize(("to", "name"), [("torch_dist", "swiglu"), ("meta", "norm_eps")])
def test_settings_of_one_library_are_compared_with_each_other_and_by_diff(converted, to, name):
    sound, place = converted(to, "sound"), converted(to)
    EDITS[to, name](place, **{name: ({**ARGS, **PARAMS})[name]})
    assert any(f" has {name} " in message for message in find_errors(place, sound))
    assert name in {change.key for change in diff(place, sound).config_changes}


@pytest.mark.parametrize(("to", "name"), [("megatron", "rotary_base"), ("meta", "norm_eps")])
def test_settings_that_contradict_the_config_beside_them_are_a_warning_without_a_source(converted, to, name):
    place = converted(to)
    EDITS[to, name](place, **{name: ({**ARGS, **PARAMS})[name]})
    result = verify(place)
    assert result.exit_code == 0
    assert any(f" has {name} " in each.message and "config.json means" in each.message for each in result.findings)


def test_settings_that_shardctl_cannot_compare_are_named(converted):
    place, bare = converted("megatron"), converted("hf", "bare")
    (bare / "config.json").unlink()
    (bare / RECORD).unlink(missing_ok=True)
    notes = [note for level in verify(place, VerifyOptions(against=bare)).levels for note in level.notes]
    assert any(note.startswith("the settings in the namespace args were not compared") for note in notes)
