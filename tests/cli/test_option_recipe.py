"""An option is declared in one place, and is there everywhere: docs/extending.md, done with a copy of the package."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from cli_checkpoints import environment

import shardctl

FIELD = """
    skip_empty: Annotated[bool, CommandOption(HelpPanel.SOURCE, "Leave out tensors without elements.")] = False
"""
"""The example of docs/extending.md."""
OWN = """
    odd_{name}: Annotated[bool, CommandOption(HelpPanel.GENERAL, "An odd one.")] = False
"""
"""An option of one verb; each of these dataclasses gets one."""
OWNERS = {
    "inspect": ("inspect_options", "    show_rules: Annotated[\n"),
    "plan": ("plan_options", "    out: Annotated[\n"),
    "reshard": ("destination_options", "    checksums: Annotated[\n"),
    "verify": ("verify_options", "    level: Annotated[\n"),
}
COUNT = """
    most_files: Annotated[
        int | None, CommandOption(HelpPanel.WRITING, "Files at most.", flag="--files", metavar="N", least=1)
    ] = None
"""
VERB = """
from shardctl.cli.program import run
from shardctl.checkpoint import opening
import importlib
import inspect
import sys

opened = opening._read_checkpoint
def open_and_say(source, reading, *rest):
    print("source_options", reading.skip_empty)
    return opened(source, reading, *rest)
opening._read_checkpoint = open_and_say
if "--" in sys.argv:
    verb, parameter = sys.argv[sys.argv.index("--") + 1:]
    del sys.argv[-3:]
    module = importlib.import_module(f"shardctl.verbs.{verb}")
    real = getattr(module, verb)
    def call_and_say(*args, **named):
        options = inspect.signature(real).bind(*args, **named).arguments[parameter]
        print("own option", getattr(options, f"odd_{verb}"))
        return real(*args, **named)
    setattr(module, verb, call_and_say)
sys.exit(run(sys.argv[1:]))
"""
"""The program with a verb that uses the option: how a checkpoint is opened is the same for all of them."""


def add(path: Path, field: str, before: str) -> None:
    """One change in one file."""
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, f"{field.lstrip(chr(10))}{before}"))


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    place = tmp_path_factory.mktemp("package")
    shutil.copytree(Path(shardctl.__file__).parent, place / "shardctl", ignore=shutil.ignore_patterns("__pycache__"))
    add(place / "shardctl" / "options" / "source_options.py", FIELD, "    unbound: bool = False\n")
    add(place / "shardctl" / "options" / "reshard_options.py", COUNT, "    dtype: Annotated[\n")
    for verb, (module, before) in OWNERS.items():
        add(place / "shardctl" / "options" / f"{module}.py", OWN.format(name=verb), before)
    return place


def ask(copied, *args):
    return subprocess.run(
        [sys.executable, "-c", VERB, *map(str, args)],
        cwd=copied, env={**environment(), "PYTHONPATH": os.fspath(copied)}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def show_help(copied):
    """Gives what a verb's `--help-all` says, which is asked for once."""
    return cache(lambda verb: ask(copied, verb, "--help-all").stdout)


def test_the_recipe_is_the_one_of_the_page():
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    assert FIELD.strip() in page


@pytest.mark.parametrize("verb", ["inspect", "plan", "reshard", "verify", "diff", "digest"])
def test_it_is_in_the_help_of_every_verb_that_takes_it(show_help, verb):
    said = show_help(verb)
    panel = said.partition("Source")[2]
    assert "--skip-empty" in panel
    assert "Leave out tensors" in panel
    assert ("--files" in said) is (verb in {"plan", "reshard"})


def test_the_verb_has_it_with_its_type(copied, source):
    assert "source_options True" in ask(copied, "inspect", source, "--skip-empty").stdout
    assert "source_options False" in ask(copied, "inspect", source).stdout


@pytest.mark.parametrize("verb", OWNERS)
def test_an_option_of_one_verb_takes_one_place_too(copied, show_help, source, tmp_path, verb):
    destination = [tmp_path / "out"] if verb == "reshard" else []
    for given in ([], [f"--odd-{verb}"]):
        done = ask(copied, verb, source, *destination, *given, "--", verb, OWNERS[verb][0])
        assert f"own option {bool(given)}" in done.stdout, done.stderr
    for other in OWNERS:
        assert (f"--odd-{verb}" in show_help(other)) is (other == verb)


def test_it_is_in_the_plan_file_and_read_from_there(copied, source, tmp_path):
    plan = tmp_path / "plan.json"
    planned = ask(copied, "plan", source, "--tp", 2, "--skip-empty", "--files", 3, "--out", plan)
    assert planned.returncode == 0, planned.stderr
    document = json.loads(plan.read_text())
    assert document["source_options"]["skip_empty"] is True
    assert document["reshard_options"]["most_files"] == 3
    done = ask(copied, "reshard", "--plan", plan, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "source_options True" in done.stdout


def test_a_plan_file_of_another_type_is_refused_by_key(copied, source, tmp_path):
    plan = tmp_path / "plan.json"
    assert ask(copied, "plan", source, "--tp", 2, "--files", 3, "--out", plan).returncode == 0
    document = json.loads(plan.read_text())
    document["reshard_options"]["most_files"] = "three"
    plan.write_text(json.dumps(document))
    done = ask(copied, "reshard", "--plan", plan, tmp_path / "out")
    assert done.returncode == 4
    assert "reshard_options.most_files that is not a whole number" in done.stderr


@pytest.mark.parametrize("option", [["--skip-empty"], ["--files", 3]])
def test_it_is_refused_beside_a_plan(copied, source, tmp_path, option):
    plan = tmp_path / "plan.json"
    assert ask(copied, "plan", source, "--tp", 2, "--out", plan).returncode == 0
    done = ask(copied, "reshard", "--plan", plan, tmp_path / "out", *option)
    assert done.returncode == 2
    assert f"--plan and {option[0]} are both given" in done.stderr


def test_what_it_cannot_be_is_refused_in_the_words_of_the_parser(copied, source):
    done = ask(copied, "plan", source, "--files", 0)
    assert done.returncode == 2
    assert re.match(r"error: invalid value for '--files': must be at least 1\n", done.stderr)


def test_a_plan_file_from_before_the_option_is_refused_with_what_to_do(copied, say, source, tmp_path):
    plan = tmp_path / "plan.json"
    assert say("plan", source, "--tp", 2, "--out", plan).code == 0
    done = ask(copied, "reshard", "--plan", plan, tmp_path / "out")
    assert done.returncode == 4
    assert "has no reshard_options.most_files" in done.stderr
    assert "make the plan again" in done.stderr
