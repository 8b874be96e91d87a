"""Mutants of every text that is read come to an exit code with a meaning; at length: docs/benchmarks/fuzz_texts.py."""

import copy
import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "hub"))

from cli_checkpoints import CONFIGS
from fuzzed_texts import ALLOWED, FuzzCase, TextFuzzer
from typer.main import get_command

from shardctl.cli.app import app
from shardctl.cli.quick_values import quicken_values

FIXTURES = CONFIGS.parent
SEED, CASES = 2026, 40
"""Of every kind; a case takes about 10 ms."""
EMPTY_FILE = (0, 354)
"""Seed and number of a listing that calls a file empty."""


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory):
    made = TextFuzzer(tmp_path_factory.mktemp("texts"))
    with pytest.MonkeyPatch.context() as patched:  # a process that imports torch takes seven seconds
        patched.setattr("shardctl.base.limited_child.run_limited_child", lambda *_, **__: "not tried here")
        yield made
    made.close()


KINDS = (
    *("config", "stored config", "index", "record", "plan", "rules", "listing", "environment"),
    *("params.json", "trtllm config", "calibration", "arguments"),
)


def test_every_kind_of_text_has_its_cases(fuzzer):
    assert tuple(fuzzer.kinds) == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_ends_in_a_bug(fuzzer, kind):
    for number in range(KINDS.index(kind), CASES * len(KINDS), len(KINDS)):
        case = fuzzer.case(SEED, number)
        found = fuzzer.outcome(case)
        assert not found.wrong, (number, case, found)


WRONG_VALUES = ("null", "-1", '"x"', "[]", "{}", "1e400", "[{}]")
HUGE = (str(10**400), "9" * 5000)
KEYS_OF_FAMILIES = {
    "llama4": ("text_config", "moe_layers"),
    "nemotron_h": ("layers_block_type",),
    "lfm2": ("block_ffn_dim_multiplier",),
}
"""By config, a key that its family reads and the sample does not have."""


def list_paths(values):
    """List the ways to each value of an object, and of the objects in it."""
    inside = [(key, inner) for key, part in values.items() if isinstance(part, dict) for inner in part]
    return [*((key,) for key in values), *inside]


def list_wrong_texts(values, paths, wrong_values=WRONG_VALUES):
    """Yield the JSON text of an object with each of the wrong values at each of the paths."""
    for path in paths:
        changed = copy.deepcopy(values)
        holder = changed
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = "@"
        text = json.dumps(changed)
        yield from (text.replace('"@"', wrong) for wrong in wrong_values)


def assert_read_or_refused(fuzzer, path, texts, *command):
    for text in texts:
        path.write_text(text)
        found = fuzzer.outcome(FuzzCase(path.name, tuple(map(str, command)), b"", {}))
        assert not found.wrong, (text, found)


@pytest.mark.parametrize("name", KEYS_OF_FAMILIES)
def test_no_value_of_a_config_ends_in_a_bug(fuzzer, name):
    path = fuzzer.place / "config.json"
    values = json.loads((CONFIGS / f"{name}.json").read_text())
    texts = list_wrong_texts(values, [*list_paths(values), KEYS_OF_FAMILIES[name]])
    assert_read_or_refused(fuzzer, path, texts, "plan", path, "--tp", 2)


@pytest.mark.parametrize(
    ("place", "file", "more"),
    [
        ("meta/llama31", "params.json", ("head_dim",)),
        ("meta/llama4/mp2", "params.json", ("rope_high_freq_factor",)),
        ("peft/lora/adapter", "adapter_config.json", ("peft_version",)),
    ],
)
def test_no_value_of_a_file_beside_weights_ends_in_a_bug(fuzzer, tmp_path, place, file, more):
    shutil.copytree(FIXTURES / place, tmp_path / "model")
    path = tmp_path / "model" / file
    values = json.loads(path.read_text())
    assert_read_or_refused(fuzzer, path, list_wrong_texts(values, [*list_paths(values), more]), "inspect", path.parent)
    assert_read_or_refused(fuzzer, path, list_wrong_texts(values, [more], HUGE), "inspect", path.parent)


def test_no_group_of_modelopt_ends_in_a_bug(fuzzer, tmp_path):
    shutil.copytree(FIXTURES / "modelopt" / "nvfp4", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    values = json.loads(path.read_text())
    paths = [("quantization_config", *rest) for rest in list_paths(values["quantization_config"])]
    paths.append(("quantization_config", "config_groups", "group_0", "weights"))
    assert_read_or_refused(fuzzer, path, list_wrong_texts(values, paths), "inspect", path.parent)


def test_no_rope_theta_ends_in_a_bug(fuzzer, tmp_path):
    place = shutil.copytree(FIXTURES / "peft" / "hf" / "llama", tmp_path / "model")
    path = place / "config.json"
    texts = list(list_wrong_texts(json.loads(path.read_text()), [("rope_theta",)], (*WRONG_VALUES, *HUGE)))
    for to in ("megatron", "meta", "torch_dist"):
        assert_read_or_refused(fuzzer, path, texts, "reshard", place, tmp_path / "out", "--to", to, "--dry-run")


@pytest.mark.parametrize("option", ["--mesh=tp={}", "--gpu={}", "--tp={}", "--stages={}", "--memory={}GB"])
def test_a_number_of_thousands_of_digits_is_a_usage_error(fuzzer, option):
    args = ("plan", str(fuzzer.source), option.format("9" * 5000))
    assert fuzzer.outcome(FuzzCase("arguments", args, b"", {})).code == 2


def test_a_bug_would_be_seen(fuzzer, monkeypatch):
    def failing(*_args, **_kwargs):
        raise KeyError("x")

    monkeypatch.setattr("shardctl.verbs.inspect._build_result", failing)
    found = fuzzer.outcome(FuzzCase("config", ("inspect", str(fuzzer.source)), b"", {}))
    assert found.code not in ALLOWED
    assert found.wrong == "exit code 1"


def test_texts_that_are_not_changed_are_read(fuzzer):
    for args in (
        ("plan", str(fuzzer.source / "config.json")),
        ("verify", str(fuzzer.place / "cut")),
        ("inspect", str(fuzzer.place / "sharded")),
        ("inspect", str(fuzzer.place / "meta")),
        ("inspect", str(fuzzer.place / "trtllm")),
        ("inspect", "me/model"),
        ("reshard", "--plan", str(fuzzer.place / "plan.json"), str(fuzzer.place / "out"), "--dry-run"),
        ("plan", str(fuzzer.source), "--tp", "2", "--rules", str(fuzzer.place / "rules.toml")),
    ):
        assert fuzzer.outcome(FuzzCase("config", args, b"", {})).code == 0, args


def test_a_case_that_ended_in_a_bug_is_refused(fuzzer):
    """A file of the Hub that the listing calls empty is read without a header that the Hub has read."""
    found = fuzzer.outcome(fuzzer.case(*EMPTY_FILE))
    assert not found.wrong
    assert found.code == 4


def test_a_command_that_is_kept_is_prepared_once():
    command = get_command(app)
    quicken_values(command)
    made = command.get_help_option
    quicken_values(command)
    assert command.get_help_option is made, "each run would add a call"
