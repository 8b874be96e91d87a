"""Mutants of every text that is read come to an exit code with a meaning; at length: docs/benchmarks/fuzz_texts.py."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "hub"))

from fuzzed_texts import ALLOWED, FuzzCase, TextFuzzer
from typer.main import get_command

from shardctl.cli.app import app
from shardctl.cli.quick_values import quicken_values

SEED, CASES = 2026, 40
"""Of every kind; a case takes about 10 ms."""
EMPTY_FILE = (0, 354)
"""Seed and number of a listing that calls a file empty."""


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory):
    made = TextFuzzer(tmp_path_factory.mktemp("texts"))
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
