"""A verb is two files and its name in one list: docs/extending.md, done with a copy of the package."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_checkpoints import environment

import shardctl

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    place = tmp_path_factory.mktemp("package")
    package = place / "shardctl"
    shutil.copytree(Path(shardctl.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    section = PAGE.read_text(encoding="utf-8").partition("## A verb")[2].partition("\n## ")[0]
    verb, command = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (package / "verbs" / "names.py").write_text(verb)
    (package / "cli" / "names.py").write_text(command)
    app = (package / "cli" / "app.py").read_text()
    before = re.compile(r"\binspect,(?=\s+plan,)")
    assert len(before.findall(app)) == 2, "the import and the list"
    (package / "cli" / "app.py").write_text(before.sub("inspect, names,", app))
    return place


def ask(copied, *args):
    return subprocess.run(
        [sys.executable, "-m", "shardctl", *map(str, args)],
        cwd=copied, env={**environment(), "PYTHONPATH": os.fspath(copied)}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_help_has_it_with_its_examples(copied):
    assert "Print the names of a checkpoint's tensors" in ask(copied, "--help").stdout
    said = ask(copied, "names", "--help").stdout
    assert "--config" in said
    assert "shardctl names ./llama" in said


def test_it_answers_and_refuses_as_the_others_do(copied, source):
    done = ask(copied, "names", source)
    assert (done.returncode, done.stderr) == (0, "")
    assert "lm_head.weight" in done.stdout.splitlines()
    assert ask(copied, "names", source / "nothing").returncode == 4
