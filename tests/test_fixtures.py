"""The fixtures themselves: each folder says where it came from, and no file lies there twice without a reason."""

import ast
import re
from collections import defaultdict
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FIXTURES = ROOT / "fixtures"
FOLDERS = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir() and path.name != "__pycache__")
MADE = [name for name in FOLDERS if not name.startswith("configs")]
WRITTEN_ALIKE = (
    "meta/llama4/*/params.json",  # which says nothing of how many ranks there are
    "deepseek_mp/bf16/*/tokenizer_config.json",  # DeepSeek's converter copies it
    "deepspeed/*/latest",  # the name of the newest step
    "deepspeed/universal-z*/latest_universal",
    "deepspeed/*/*_model_states.pt",  # DeepSpeed's converter copies them
    "deepspeed/universal-z1/universal/zero/*/step.pt",
    "fsdp_dtensor/*/latest_checkpointed_iteration.txt",
    "megatron/*/latest_checkpointed_iteration.txt",
    "orbax/*",  # the same arrays in three ways of storing
    "quanto/*/config.json",  # the quantization is in a file of its own
    "rank_states/distributed/losses.json",  # of the same model as another trainer's
    "fsdp_dtensor/moe/losses.json",
    "rank_states/*/latest_checkpointed_iteration.txt",
    "torch_dist/*/iter/metadata.json",  # the name and version of the format
    "torch_dist/per_layer/iter/*.distcp",  # the keys differ from those of singleton, and they are in `.metadata`
    "torch_dist/singleton/iter/*.distcp",
    "torch_dist/stacked/iter/*.distcp",  # megatron-core 0.12 and 0.16 differ in `.metadata` and `common.pt`
    "torch_dist/core_0_12/iter/*.distcp",
    "vllm/*/*/config.json",  # vLLM's example copies whatever is no weight
    "vllm/llama/*/vocab.txt",
)
"""Below `fixtures`: what the owner of a format writes alike into several directories, kept as it leaves them."""


def duplicates() -> list[list[str]]:
    """The files that have the same bytes, by their paths below `fixtures`; empty files say nothing."""
    found = defaultdict(list)
    for path in sorted(FIXTURES.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and (content := path.read_bytes()):
            found[sha256(content).digest()].append(path.relative_to(FIXTURES).as_posix())
    return [paths for paths in found.values() if len(paths) > 1]


def listed(path: str) -> bool:
    return any(fnmatch(path, pattern) for pattern in WRITTEN_ALIKE)


def test_no_file_lies_twice_unless_a_library_writes_it_alike():
    unlisted = [paths for paths in duplicates() if not all(map(listed, paths))]
    assert unlisted == []


def test_every_reason_for_two_files_alike_is_needed():
    alike = [path for paths in duplicates() for path in paths]
    assert [pattern for pattern in WRITTEN_ALIKE if not any(fnmatch(path, pattern) for path in alike)] == []


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_says_what_it_is_and_stands_in_the_table(name):
    said = (FIXTURES / name / "README.md").read_text()
    assert said.startswith("# ")
    assert f"[`{name}`]({name}/README.md)" in (FIXTURES / "README.md").read_text()


@pytest.mark.parametrize("name", MADE)
def test_a_folder_has_its_maker_and_says_the_command_and_the_versions(name):
    said = (FIXTURES / name / "README.md").read_text()
    assert f"python -m fixtures.{name}.make" in said
    assert re.search(r"\d+\.\d+\.\d+", said)
    programs = sorted(path.stem for path in (FIXTURES / name).glob("*.py"))
    assert "make" in programs
    for program in set(programs) - {"make", "__init__"}:
        assert program in said


@pytest.mark.parametrize("path", sorted(FIXTURES.rglob("*.py")), ids=lambda path: path.relative_to(FIXTURES).as_posix())
def test_what_a_program_imports_of_other_programs_is_there(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fixtures"):
            folder = ROOT.joinpath(*node.module.split("."))
            assert folder.with_suffix(".py").is_file() or all((folder / f"{x.name}.py").is_file() for x in node.names)


def test_programs_lie_above_the_cases():
    """What a directory holds tells its format, and files that are no weights travel into what is made of it."""
    inside = [path for name in ("*.py", "README.md") for path in FIXTURES.glob(f"*/*/**/{name}")]
    assert inside == []
