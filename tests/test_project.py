"""The files around the program: the package page, the documentation site, templates and the changelog."""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import shardctl
from shardctl.base import extras

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="module")
def addresses():
    spec = importlib.util.spec_from_file_location("addresses", ROOT / ".ci/addresses.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("git@example.org:owner/name.git", "https://example.org/owner/name"),
        ("ssh://git@example.org:2222/owner/name", "https://example.org/owner/name"),
        ("https://me:secret@example.org/owner/name.git", "https://example.org/owner/name"),
        ("https://example.org/owner/name/", "https://example.org/owner/name"),
        ("/srv/git/name.git", None),
        ("file:///srv/git/name.git", None),
        ("../name", None),
        ("", None),
    ],
)
def test_the_address_of_a_remote_has_no_password(addresses, remote, address):
    assert addresses.normalise_remote(remote) == address


def test_a_pipeline_that_installs_shardctl_is_not_its_repository(addresses, monkeypatch):
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://github.example")
    monkeypatch.setenv("GITHUB_REPOSITORY", "somebody/else")
    assert addresses.find_repository() != "https://github.example/somebody/else"
    monkeypatch.setenv("REPOSITORY_URL", "https://github.example/a/b")
    assert addresses.find_repository() == "https://github.example/a/b"


def test_links_are_absolute_on_a_package_index(addresses):
    text = "[a](docs/a.md#b) ![p](docs/p.png) [c](https://c) [d](#d)\n```\n[e](f)\n```\n"
    made = addresses.make_links_absolute(text, "README.md", "https://github.com/o/r")
    assert made == (
        "[a](https://github.com/o/r/blob/HEAD/docs/a.md#b) ![p](https://github.com/o/r/raw/HEAD/docs/p.png) "
        "[c](https://c) [d](#d)\n```\n[e](f)\n```\n"
    )
    lab = addresses.make_links_absolute("[a](../x)", "docs/a.md", "https://gitlab.com/o/r")
    assert lab == "[a](https://gitlab.com/o/r/-/blob/HEAD/x)"


def test_without_an_address_only_the_text_of_a_link_is_left(addresses):
    assert addresses.make_links_absolute("see [a](docs/a.md#b)", "README.md", None) == "see a"


def test_the_readme_of_a_package_has_no_relative_link(addresses):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(re.findall(r"\]\((?!https?:|#)", text)) > 10
    made = addresses.make_links_absolute(text, "README.md", "https://example.org/o/r")
    assert re.findall(r"\]\((?!https?:|#)", made) == []


def test_a_package_has_urls_and_a_readme(tmp_path):
    pytest.importorskip("hatchling", reason="hatchling builds the package")
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", ".ci", "shardctl/base/version.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    code = (
        "from hatchling.builders.wheel import WheelBuilder\n"
        "core = WheelBuilder('.').metadata.core\n"
        "print(core.urls, 'blob/HEAD/docs/guide.md' in core.readme)"
    )
    nowhere = {"PATH": "", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    where = nowhere | {"REPOSITORY_URL": "https://github.example/a/b"}
    for environment, links in ((where, True), (nowhere, False)):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        assert ("https://github.example/a/b/issues" in done.stdout) is links
        assert done.stdout.rstrip().endswith(str(links))


def test_the_first_command_of_the_readme_is_on_its_first_screen():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert next(number for number, line in enumerate(lines) if "pip install" in line) < 24
    assert next(number for number, line in enumerate(lines) if "| I have | I want |" in line) < 40


def test_a_deepspeed_run_is_in_the_table_of_the_readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(
        r"^\| .*DeepSpeed.* \| .*tensor-parallel.* \| `shardctl reshard ./zero.*--tp 4.*` \|$", text, re.MULTILINE
    )


COLLECT = """
import sys
import tarfile
from importlib.machinery import PathFinder

import pytest

HIDDEN, find_spec = set(sys.argv[2:]), PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name.partition(".")[0] in HIDDEN else find_spec(name, *rest)
sys.exit(pytest.main(["--collect-only", "-q", "-rs", "--basetemp", sys.argv[1], "tests"]))
"""
"""Collects the tests as if the modules that are named had not been installed."""
NEEDED = {"torch", "transformers", "hypothesis", "pytest", "pytest-xdist", "pyyaml", "mypy", "ruff", "rust-just"}
"""What the tests run with, or what is a program."""


def test_without_extras_tests_are_collected_and_say_what_they_lack(tmp_path):
    wanted = {re.split(r"[\[<>=]", each)[0] for each in PROJECT["optional-dependencies"]["dev"]} - NEEDED - {"shardctl"}
    modules = sorted(name.replace("-", "_") for name in (*wanted, "ray"))
    assert {"bitsandbytes", "tensorstore", "peft"} <= set(modules)
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, tmp_path / "base", *modules],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert skipped
    assert all(any(name in line for name in modules) for line in skipped), skipped
    for name in ("test_optimizers.py", "test_orbax.py", "test_adapted_embeddings.py"):
        assert f"/{name}::" in done.stdout, f"all of {name} needs an extra"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="the extra [docs] builds the site")
    where = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", ROOT / ".mkdocs.yml", "-d", where]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return where


SEARCHES = {
    "install": "install",
    "pip install": "install",
    "Windows": "install",
    "offline": "install",
    "docker": "install",
    "convert FSDP checkpoint to huggingface": "tasks/fsdp-to-huggingface",
    "zero_to_fp32": "tasks/deepspeed-to-huggingface",
    "megatron to hf": "tasks/megatron-to-huggingface",
    "lightning ckpt": "tasks/lightning-to-huggingface",
    "vllm serve": "tasks/serve-with-vllm",
    "push_to_hub": "tasks/push-to-the-hub",
    "merge lora": "tasks/lora-merge",
    "merge_and_unload": "tasks/lora-merge",
    "s3 bucket": "remote",
    "multi node": "scale",
    "slurm": "ci",
    "fits on h100": "questions",
    "kv cache": "planning",
    "OOM": "troubleshooting",
    "CUDA out of memory": "troubleshooting",
    "troubleshooting": "troubleshooting",
    "error message": "troubleshooting",
    "no space left on device": "troubleshooting",
    "401 unauthorized": "troubleshooting",
    "exit code": "exit-codes",
    "command line options": "command-line",
    "python api": "python",
    "json schema": "json",
    "max_model_len": "glossary",
    "gradient checkpointing": "glossary",
}
"""What users type, and the page that must be among the first three; chosen before these pages were written."""


@pytest.fixture(scope="module")
def pages_of_the_site(site):
    return json.loads((site / "search/search_index.json").read_text())


@pytest.fixture(scope="module")
def index_of_the_site(pages_of_the_site):
    """The index that the search worker of mkdocs-material makes: no length normalization, stemmer or trimmer."""
    pytest.importorskip("lunr", reason="the extra [dev] searches the site")
    from lunr.builder import Builder
    from lunr.stop_word_filter import stop_word_filter

    assert pages_of_the_site["config"]["pipeline"] == ["stopWordFilter"]
    assert pages_of_the_site["config"]["separator"] == r"[\s\-]+", "where lunr divides words"
    builder = Builder()
    builder.b(0)
    builder.ref("location")
    for field, setting in pages_of_the_site["config"]["fields"].items():
        builder.field(field, boost=setting["boost"])
    builder.pipeline.add(stop_word_filter)
    for page in pages_of_the_site["docs"]:
        builder.add({"tags": None, **page, "text": re.sub(r"<[^>]*>", " ", page["text"])})
    return builder.build()


def search(index, docs, words):
    """Return the pages that match best, as the worker orders them."""
    first = {}
    for doc in docs:
        first.setdefault(doc["location"].partition("#")[0], doc["location"])
    terms = [term for term in re.split(r"[\s\-]+", words.lower()) if term]
    found = []
    for hit in index.search(" ".join(f"{term}*" for term in terms)):
        page = hit["ref"].partition("#")[0]
        matched = [term for term in terms if any(word.startswith(term) for word in hit["match_data"].metadata)]
        boost = (first[page] == hit["ref"]) + len(matched) / len(terms)
        found.append((hit["score"] * (1 + boost**2), page))
    return list(dict.fromkeys(page for _, page in sorted(found, key=lambda one: -one[0])))


@pytest.mark.parametrize(("words", "page"), SEARCHES.items())
def test_the_search_of_the_site_finds(index_of_the_site, pages_of_the_site, words, page):
    assert f"{page}/" in search(index_of_the_site, pages_of_the_site["docs"], words)[:3]


def test_every_page_has_a_place_in_the_navigation():
    """Without mkdocs, too; mkdocs itself says so when it builds strictly."""
    settings = yaml.safe_load((ROOT / ".mkdocs.yml").read_text())
    places = re.findall(r"[\w/.-]+\.md", json.dumps(settings["nav"]))
    assert len({*places}) == len(places)
    assert {*places} == {str(path.relative_to(ROOT / "docs")) for path in PAGES[2:]} | {"index.md", "changelog.md"}


def test_what_pages_were_compared_with_is_collapsed():
    """A reader who looks for a command meets no list of tests; GitHub and the site both fold these blocks."""
    pages = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
    begin = r'^<details class="note" markdown="1">\n<summary>[^<\n]+</summary>\n\n'
    folded = re.compile(rf"{begin}.*?\n\n</details>$", re.DOTALL | re.MULTILINE)
    assert sum(len(folded.findall(text)) for text in pages.values()) > 25
    for name, text in pages.items():
        shown = folded.sub("", text)
        assert "details>" not in shown, name
        assert not re.search(r"\*Compared\s+with", shown), name


def test_the_changelog_has_the_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {re.escape(shardctl.__version__)}\b", text, re.MULTILINE)


FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"))


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_is_one(path):
    """What GitHub asks of a form: name, description, elements with a label, and ids that are unique."""
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert form["name"]
    assert form["description"]
    named = [one["id"] for one in form["body"] if one["type"] != "markdown"]
    assert len({*named}) == len(named) > 1
    for one in form["body"]:
        assert one["type"] in {"markdown", "textarea", "input", "dropdown", "checkboxes"}
        assert one["attributes"].get("value" if one["type"] == "markdown" else "label")


@pytest.mark.parametrize("extra", ["verify", "cloud", "orbax", "ray", "sign"])
def test_a_hint_installs_the_packages_of_an_extra(extra, monkeypatch):
    """Also from a clone that is not installed; the name shardctl on an index says nothing of a clone."""
    wanted = PROJECT["optional-dependencies"][extra]
    lines = [f"{one}; extra == '{extra}'" for one in wanted]
    for needed in (lambda _: ["numpy>=1.26", *lines, "x; extra == 'dev'"], lambda _: []):
        monkeypatch.setattr(importlib.metadata, "requires", needed)
        assert extras.format_install_command(extra) == f"pip install {' '.join(map(repr, wanted))}"


WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}


def test_workflows_name_what_there_is():
    """They can only be checked statically here: no test starts them on GitHub."""
    assert {*WORKFLOWS} == {"check", "release", "weekly"}
    for name, workflow in WORKFLOWS.items():
        assert workflow["permissions"] == {"contents": "read"}, name
        for job in workflow["jobs"].values():
            assert job["timeout-minutes"] <= 360
            for step in job["steps"]:
                script = step.get("run", "")
                assert "${{" not in script, "an expression within a script is an injection"
                assert all((ROOT / path).exists() for path in re.findall(r"[\w./]+\.py\b|\.ci/run", script)), script
    checked = WORKFLOWS["check"]["jobs"]["check"]
    classified = [each for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)]
    assert [each.rpartition(" ")[2] for each in classified] == checked["strategy"]["matrix"]["python"]
    assert checked["continue-on-error"] == "${{ matrix.python == '3.14' }}"


def test_only_what_was_built_and_checked_for_a_tag_is_published():
    release = WORKFLOWS["release"]
    assert release[True] == {"push": {"tags": ["v*"]}}, "YAML reads `on` as true"
    build, publish = release["jobs"]["build"], release["jobs"]["publish"]
    scripts = "\n".join(step.get("run", "") for step in build["steps"])
    assert all(each in scripts for each in ("python -m build", "twine check --strict", ".ci/check_distribution.py"))
    installed = scripts.index('"$RUNNER_TEMP/fresh/bin/pip" install')
    checked = scripts.index('"$RUNNER_TEMP/fresh/bin/python" .ci/check_distribution.py')
    assert installed < checked, "the check imports the program, whose dependencies no other environment has"
    assert "permissions" not in build
    assert publish["permissions"] == {"id-token": "write"}
    assert (publish["needs"], publish["environment"]) == ("build", "pypi")
    assert publish["steps"][-1]["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert publish["steps"][-1]["with"] == {"attestations": True}, "and no password: PyPI trusts the workflow"


def test_a_wheel_has_manual_pages_and_schemas_and_a_check_misses_none(tmp_path):
    pytest.importorskip("hatchling", reason="hatchling builds the package")
    spec = importlib.util.spec_from_file_location("check_distribution", ROOT / ".ci/check_distribution.py")
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    built = f"shardctl-{shardctl.__version__}"
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(tmp_path / f"{built}.tar.gz", "w:gz") as source:
        for name in check.NEEDED_IN_SOURCE:
            source.add(ROOT / name, f"{built}/{name}")
    assert check.list_faults(tmp_path, f"v{shardctl.__version__}") == []
    assert check.list_faults(tmp_path, "v9") == [f"the tag is v9, and the version is {shardctl.__version__}"]
    (wheel,) = tmp_path.glob("*.whl")
    needed = check.list_needed_files(f"{built}.data/data")
    lacking = {f"{built}.data/data/share/man/man1/shardctl-plan.1", "shardctl/hardware/devices.toml"}
    assert lacking < needed
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(tmp_path / "other", "w") as part:
        schema = json.loads(whole.read(f"{built}.data/data/share/shardctl/schemas/verify.schema.json"))
        for name in sorted({*whole.namelist()} - lacking):
            part.writestr(name, b"")
        part.writestr("tests/conftest.py", b"")
    assert "VerifyDocument" in json.dumps(schema)
    (tmp_path / "other").rename(wheel)
    said = [*(f"the wheel lacks {name}" for name in sorted(lacking)), "the wheel has tests/conftest.py"]
    assert check.list_faults(tmp_path) == said
