"""The documentation is executed: every command of the guide, in order, on a real model."""

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


def test_the_transcripts_of_the_tutorial_are_what_the_program_says(minilm, tmp_path):
    (tmp_path / "all-MiniLM-L6-v2").symlink_to(minilm)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    sessions = "".join(blocks(ROOT / "docs/tutorial.md", "console")).split("$ ")[1:]
    assert len(sessions) > 5
    for session in sessions:
        command, *expected = session.rstrip("\n").split("\n")
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env={**os.environ, "PATH": path},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        said = [line for line in done.stdout.splitlines() if not PROGRESS.match(line)]
        assert [masked(line) for line in said] == [masked(line) for line in expected], command


def test_the_list_of_models_is_that_of_the_code():
    done = subprocess.run([sys.executable, ROOT / "docs/models.py"], capture_output=True, text=True, check=True)
    assert (ROOT / "docs/models.md").read_text() == done.stdout


def test_which_format_goes_to_which_is_what_happens():
    """A hundred conversions, each with its digest compared; slow, and the only proof of the table."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import pairs
    finally:
        sys.path.pop(0)
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
