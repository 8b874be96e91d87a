"""The documentation is executed: every command of the guide, in order, on a real model."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


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


def test_every_command_of_the_guide_runs(folder, minilm):
    """One test, because each command builds on those before it."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "MODEL": str(minilm), "PATH": path}
    assert len(commands()) > 15
    for command in commands():
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=folder, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


TABLE = {
    "llama": "llmcompressor/llama",
    "llama-fp8": "llmcompressor/fp8-block",
    "zero-run": "deepspeed/bf16",
    "fsdp-run": "dcp/fsdp2",
    "fsdp-config.json": "dcp/config.json",
    "megatron-run": "megatron/llama-tp2-pp2",
    "original": "megatron/hf/llama",
    "base": "peft/hf/llama",
    "lora": "peft/lora/adapter",
}
"""What the README's table calls a checkpoint, and the fixture that is one."""


def make_zero_run(place):
    """Three ranks of ZeRO-3 of a Llama with four heads; no fixture of DeepSpeed is of a model that transformers has."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sys.path.append(str(ROOT / "tests/formats"))
    from deepspeed_builder import scattered

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    scattered(place / "zero-llama", model.state_dict(), 3)
    torch.save(model.state_dict(), place / "zero-state.pt")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(place / "zero-config")


def test_every_command_of_the_readme_table_runs(tmp_path):
    for name, fixture in TABLE.items():
        (tmp_path / name).symlink_to(ROOT / "fixtures" / fixture)
    make_zero_run(tmp_path)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    found = re.findall(r"^\| .* \| `(shardctl .*)` \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(found) > 10
    for command in found:
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def make_lightning_run(place):
    """What Lightning saves of a module whose attribute `model` is the Llama of `zero-config`."""
    torch = pytest.importorskip("torch")
    tensors = torch.load(place / "zero-state.pt")
    (place / "lightning").mkdir()
    named = {f"model.{name}": tensor for name, tensor in tensors.items()} | {"loss.weight": torch.ones(2)}
    saved = {"epoch": 0, "global_step": 1, "pytorch-lightning_version": "2.5.0", "state_dict": named}
    torch.save(saved, place / "lightning" / "last.ckpt")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The runs that the pages of tasks begin with."""
    place = tmp_path_factory.mktemp("tasks")
    for name, fixture in TABLE.items():
        (place / name).symlink_to(ROOT / "fixtures" / fixture)
    make_zero_run(place)
    make_lightning_run(place)
    return place


PAGES = sorted((ROOT / "docs/tasks").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_every_command_of_a_task_runs(page, runs, tmp_path):
    for each in runs.iterdir():
        (tmp_path / each.name).symlink_to(each)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in "".join(blocks(page, "bash")).splitlines():
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_the_readme_speaks_of_files_that_exist():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_page_and_the_help_have_the_same_exit_codes():
    from typer.testing import CliRunner

    from shardctl.cli.app import app

    said = CliRunner().invoke(app, ["--help"]).output
    for code in re.findall(r"^\| ([\d, ]+) \|", (ROOT / "docs/exit-codes.md").read_text(), re.MULTILINE):
        assert re.search(rf"^\s*{code}\s", said, re.MULTILINE), code


VARIES = [
    (r"\d+\.\d+ s\b", "N s"),
    (r"\d+(\.\d+)? [kMG]?B/s", "N B/s"),
    (r"by safetensors [\d.]+,", "by safetensors N,"),
    (r"free space .*", "free space"),
    (r"peak host memory [\d.]+ [MG]iB", "peak host memory"),
    (r"^.*/cut$", "cut"),
    (r"^  carried .*", "  carried"),
    (r"^  moved .*", "  moved"),
    (r"\s+", " "),
]
"""What differs from run to run, or is shortened on the page."""
PROGRESS = re.compile(r"\w+: .* held$")
"""What slow machines say besides."""


def masked(line):
    for pattern, plain in VARIES:
        line = re.sub(pattern, plain, line)
    return line.strip()


def check_sessions(page, folder):
    """Run each command of a page in a folder, and compare all that it prints with what the page says."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    sessions = "".join(blocks(page, "console")).split("$ ")[1:]
    for session in sessions:
        command, *expected = session.rstrip("\n").split("\n")
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env={**os.environ, "PATH": path},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        printed = done.stdout.replace(f"{folder}/", "")  # errors have the whole path
        said = [masked(line) for line in printed.splitlines() if not PROGRESS.match(line)]
        if "fixtures/" in command:  # whose pages have the lines that matter
            said = [line for line in said if line in map(masked, expected)]
        assert said == [masked(line) for line in expected], command
    return len(sessions)


def test_the_transcripts_of_the_tutorial_are_what_the_program_says(minilm, tmp_path):
    (tmp_path / "all-MiniLM-L6-v2").symlink_to(minilm)
    assert check_sessions(ROOT / "docs/tutorial.md", tmp_path) > 5


def test_the_start_of_the_readme_prints_what_it_shows(minilm, tmp_path):
    (tmp_path / "all-MiniLM-L6-v2").symlink_to(minilm)
    assert check_sessions(ROOT / "README.md", tmp_path) == 5


def test_the_transcripts_of_troubleshooting_are_what_the_program_says(runs, tmp_path):
    for each in runs.iterdir():
        (tmp_path / each.name).symlink_to(each)
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    (tmp_path / "filled").mkdir()
    (tmp_path / "filled/notes.txt").write_text("mine")
    assert check_sessions(ROOT / "docs/troubleshooting.md", tmp_path) > 4


def load_script(name):
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


OTHERS_SAY = {"requires a different Python", "shardctl: command not found"}
"""What pip and the shell say."""


def test_the_errors_of_troubleshooting_are_those_of_the_code():
    said = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "shardctl").rglob("*.py"))
    said += load_script("errors").build_tables().replace("\\", "")
    text = (ROOT / "docs/troubleshooting.md").read_text()
    rows = re.findall(r"^\| `(.*?)`.*\|$", text.replace("| error", "", 1), re.MULTILINE)
    pieces = [
        one.strip(" :.,()")
        for row in rows
        for one in re.split(r"NAME|FILE|cuda:0|ImportError: |this conversion|HTTP \d+|\d+ ?MiB|\S*json", row)
    ]
    wrong = [one for one in pieces if one.count(" ") > 1 and one not in said and one not in OTHERS_SAY]
    assert len(pieces) > 20
    assert wrong == []


def test_every_error_has_its_hint():
    script = load_script("errors")
    found = script.list_errors()
    assert set(found) == set("234567")
    assert sum(map(len, found.values())) > 1000
    assert (
        found["4"]["<path> is a Git LFS pointer, not the weights themselves"] == "run `git lfs pull` in the repository"
    )
    page = script.build_tables()
    assert page.count("Where the hint is empty: ") == len(found)
    assert "<br>" not in page
    assert script.MARK in (ROOT / "docs/errors.md").read_text()


@pytest.mark.parametrize("name", ["command-line.md", "json.md", "glossary.md"])
def test_a_page_of_reference_is_that_of_the_code(name):
    """If this fails, run `python docs/reference.py`."""
    assert load_script("reference").PAGES[name]() == (ROOT / "docs" / name).read_text()


def test_the_options_of_the_pages_exist():
    """Of pages by hand; a value behind an option is checked where its command runs."""
    known = set(re.findall(r"`(--[a-z0-9-]+)", (ROOT / "docs/command-line.md").read_text())) | {"--help", "--help-all"}
    for name in ("glossary", "troubleshooting"):
        text, _, _ = (ROOT / f"docs/{name}.md").read_text().partition("<!-- words")
        assert set(re.findall(r"`(--[a-z0-9-]+)", text)) <= known


def test_the_list_of_models_is_that_of_the_code():
    done = subprocess.run([sys.executable, ROOT / "docs/models.py"], capture_output=True, text=True, check=True)
    assert (ROOT / "docs/models.md").read_text() == done.stdout


def test_which_format_goes_to_which_is_what_happens():
    """A hundred conversions, each with its digest compared; slow, and the only proof of the table."""
    pairs = load_script("pairs")
    assert pairs.page() == pairs.PAGE.read_text()


def transcripts():
    """Every command of `planning.md` with what the page says that it prints."""
    text = "".join(blocks(ROOT / "docs/planning.md", "console"))
    return [(said.split("\n", 1)[0], said.split("\n", 1)[1]) for said in text.split("$ ")[1:]]


@pytest.mark.parametrize(("command", "said"), transcripts(), ids=[command for command, _ in transcripts()])
def test_planning_prints_what_the_page_says(command, said, capfd):
    from shardctl.cli.program import run

    run([str(ROOT / word) if word.startswith("fixtures/") else word for word in command.split()[1:]])
    assert capfd.readouterr().out == said


def questions():
    """Every question of `questions.md` with its command and the lines that answer it."""
    text = (ROOT / "docs/questions.md").read_text()
    return re.findall(r"^### (.*?)$.*?```console\n\$ (.*?)\n(.*?)```", text, re.DOTALL | re.MULTILINE)


def test_there_are_the_questions_of_a_practitioner():
    assert len(questions()) == (ROOT / "docs/questions.md").read_text().count("### ") >= 24


@pytest.mark.parametrize(("question", "command", "answer"), questions(), ids=[one for one, _, _ in questions()])
def test_a_question_has_the_answer_that_the_page_gives(question, command, answer, capfd):
    """The page has the lines of the output that answer it, in order."""
    from shardctl.cli.program import run

    assert question.endswith("?")
    assert answer
    run([str(ROOT / word) if word.startswith("fixtures/") else word for word in command.split()[1:]])
    said = iter(capfd.readouterr().out.splitlines())
    missing = [line for line in answer.splitlines() if line not in said]
    assert not missing, f"{command} does not say {missing}"


def test_the_page_of_users_has_what_they_type():
    spec = importlib.util.spec_from_file_location("users", ROOT / "docs/benchmarks/users.py")
    users = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(users)
    page = users.PAGE.read_text()
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == [*users.USERS, "A terminal of 80 columns"]
    typed = [(f"$ {command}", code) for commands in users.USERS.values() for command, code in commands]
    lines = page.splitlines()
    answered = [(line, lines[i + 1]) for i, line in enumerate(lines) if line.startswith("$ ")]
    for (command, code), (line, answer) in zip(typed, answered, strict=True):
        assert line == command
        assert answer.endswith(f"  [exit {code}]") is bool(code), line
        if " plan " in line and code != 4:
            assert answer.startswith("DOES NOT FIT" if code else "FITS"), answer
