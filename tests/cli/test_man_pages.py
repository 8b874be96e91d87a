"""Manual pages are made of the declarations of options, and groff has nothing to complain of."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from shardctl.cli.app import app

SCRIPT = Path(__file__).parents[2] / "docs" / "man_pages.py"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("man_pages", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return {path.stem: path for path in script.write_pages(tmp_path_factory.mktemp("man"))}


def test_every_command_has_a_page_with_all_its_options(say, pages, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # the longest options are broken over two lines of 80
    names = [command.name for command in app.registered_commands]
    assert "settings" in names
    assert set(pages) == {"shardctl", *(f"shardctl-{name}" for name in names)}
    for name in names:
        text = pages[f"shardctl-{name}"].read_text().replace("\\-", "-")
        listed = set(re.findall(r"^\W{1,6}(--[a-z0-9-]+)", say(name, "--help-all").out, re.MULTILINE)) - {"--help"}
        assert listed == set(re.findall(r"^\\fB(--[a-z0-9-]+)", text, re.MULTILINE))
        assert f"\n  shardctl {name} " in text or name == "completion"
        assert "{" not in text, "the names of formats and layouts are filled in"


def test_the_page_of_the_program_has_the_exit_codes(pages):
    text = pages["shardctl"].read_text()
    assert all(re.search(rf"^ +{code} ", text, re.MULTILINE) for code in range(8))


@pytest.mark.skipif(not shutil.which("groff"), reason="groff is not installed")
def test_groff_has_no_warning(pages):
    for path in pages.values():
        done = subprocess.run(
            ["groff", "-man", "-ww", "-z", "-Tutf8", path], capture_output=True, text=True, check=True
        )
        assert done.stderr == ""
        shown = subprocess.run(["groff", "-man", "-Tutf8", path], capture_output=True, text=True, check=True).stdout
        assert "SEE ALSO" in re.sub(r"\x1b\[[0-9;]*m|.\x08", "", shown)
