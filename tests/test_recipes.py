"""A format and a layout take one folder and two lines in the catalogue: docs/extending.md, done in a package's copy."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import shardctl
from shardctl.models import describe_model

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "fixtures" / "configs" / "llama.json"
IMPORT = "from shardctl.libraries.toy import reading as toy_reading\n"
FORMATS = "FORMATS: Final[tuple[Format, ...]] = (\n"
LAYOUTS = "LAYOUT_FILES: Final = {\n"


def blocks_under(heading: str) -> list[str]:
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"```(?:python|text)\n(.*?)```", section, flags=re.DOTALL)


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """The package with the page's format and layout: two files of the page, one import, and a line for each."""
    place = tmp_path_factory.mktemp("package")
    package = place / "shardctl"
    shutil.copytree(Path(shardctl.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    source_options, line = blocks_under("A format")
    writing, layout = blocks_under("A layout")
    toy = package / "libraries" / "toy"
    toy.mkdir()
    (toy / "__init__.py").write_text("")
    (toy / "reading.py").write_text(source_options)
    (toy / "writing.py").write_text(writing)
    catalogue = package / "libraries" / "catalogue.py"
    text = catalogue.read_text()
    for mark, added in (("if TYPE_CHECKING:", IMPORT), (FORMATS, line), (LAYOUTS, layout)):
        before, found, after = text.partition(mark)
        assert found
        text = f"{before}{added}{mark}{after}" if added is IMPORT else f"{before}{mark}{added}{after}"
    catalogue.write_text(text)
    return place


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    place = tmp_path_factory.mktemp("source")
    said = json.loads(CONFIG.read_text()) | {"dtype": "float32"}
    random = np.random.default_rng(7)
    tensors = {t.name: random.standard_normal(t.shape, np.float32) for t in describe_model(said).own()}
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    (place / "config.json").write_text(json.dumps(said))
    return place


def ask(extended, *args):
    return subprocess.run(
        [sys.executable, "-m", "shardctl", *map(str, args)],
        cwd=extended, env={**os.environ, "PYTHONPATH": os.fspath(extended), "COLUMNS": "200", "NO_COLOR": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def tell(extended, *args):
    done = ask(extended, *args, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def written(extended, llama, tmp_path_factory):
    place = tmp_path_factory.mktemp("written") / "toy"
    done = ask(extended, "reshard", llama, place, "--to", "toy")
    assert done.returncode == 0, done.stderr
    return place


def test_what_is_written_is_one_file_and_what_travels_along(written):
    assert {path.name for path in written.iterdir()} >= {"weights.toy", "config.json"}
    assert not list(written.glob("*.safetensors"))


def test_it_is_detected_and_has_the_digest_of_its_source(extended, llama, written):
    assert tell(extended, "inspect", written)["format"] == "toy"
    assert tell(extended, "digest", written)["digest"] == tell(extended, "digest", llama)["digest"]


def test_it_is_converted_back_bit_for_bit(extended, llama, written, tmp_path):
    done = ask(extended, "reshard", written, tmp_path / "back", "--from", "toy", "--to", "hf")
    assert done.returncode == 0, done.stderr
    back, source = (load_file(place / "model.safetensors") for place in (tmp_path / "back", llama))
    assert {name: array.tobytes() for name, array in back.items()} == {n: a.tobytes() for n, a in source.items()}


def test_the_help_names_both(extended):
    said = " ".join(ask(extended, "plan", "--help-all").stdout.replace("│", " ").split())
    assert re.search(r"--to LAYOUT .*\btoy\b.*Default: ranks for a mesh", said)
    assert re.search(r"--from FORMAT .*\btoy\b.*Default: detected", said)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--to", "toys"), "the layouts are toy, hf"),
        (("--to", "toy", "--tp", "2"), "layout toy has no ranks"),
        (("--to", "toy", "--max-shard-size", "1MB"), "--to toy does not use --max-shard-size"),
        (("--to", "toy", "--vllm-profile", "0.25"), "layouts with this option: vllm"),
        (("--from", "toys"), "formats: toy, safetensors"),
    ],
)
def test_refusals_follow_from_the_tuple(extended, llama, options, message):
    done = ask(extended, "plan", llama, *options)
    assert done.returncode == 2
    assert message in done.stderr
