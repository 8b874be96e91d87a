import resource
import subprocess
import sys

import pytest
from cli_checkpoints import CONFIGS, environment

HEAVY = {"numpy", "torch", "ml_dtypes", "huggingface_hub", "transformers", "safetensors"}


def loaded(*args):
    """Which heavy libraries a command line loads."""
    program = (
        "import sys\n"
        "from shardctl.cli.program import run\n"
        "code = run(sys.argv[1:])\n"
        f"print(code, *sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, args)], capture_output=True, text=True, env=environment(), check=True
    )
    code, *modules = done.stderr.splitlines()[-1].split()
    assert code == "0", done.stderr
    return set(modules)


@pytest.mark.parametrize("args", [["--version"], ["--help"], ["plan", "--help"], ["reshard", "--help"]])
def test_help_and_version_load_nothing_heavy(args):
    assert loaded(*args) == set()


def test_headers_are_read_without_numpy_and_torch(source):
    assert loaded("inspect", source, "--tensors", "--show-rules") == set()
    assert loaded("plan", source, "--tp", 2, "--pp", 2) == set()


@pytest.mark.parametrize("name", ["llama-3.1-405b", "deepseek-v3"])
def test_models_that_are_not_here_are_planned_without_numpy_and_torch(name):
    config = CONFIGS.parent / "configs_public" / f"{name}.json"
    assert loaded("inspect", config) == set()
    assert loaded("plan", config, "--pp", 2) == set()


def test_bytes_are_moved_and_compared_without_torch(source, tmp_path):
    assert "torch" not in loaded("reshard", source, tmp_path / "out", "--tp", 2)
    assert "torch" not in loaded("reshard", source, tmp_path / "cast", "--dtype", "bf16")
    assert "torch" not in loaded("verify", tmp_path / "out", "--level", "full", "--against", source)


def own_modules(*args):
    """How many of shardctl's own modules a command line loads, and whether it loads what typer and rich rarely need."""
    program = (
        "import sys\n"
        "from shardctl.cli.program import run\n"
        "run(sys.argv[1:])\n"
        "loaded = {'pydantic', 'rich.markdown', 'rich.console'} & set(sys.modules)\n"
        "print(sum(name.startswith('shardctl') for name in sys.modules), *sorted(loaded), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, args)], capture_output=True, text=True, env=environment(), check=True
    )
    number, *rare = done.stderr.splitlines()[-1].split()
    return int(number), rare


def test_few_modules_are_loaded(source):
    """Each is about half a millisecond of every run; who adds one to these counts has a reason."""
    for args, most, rare in (
        (["--help"], 56, []),
        (["plan", "--help"], 246, []),
        (["inspect", source], 226, ["rich.console"]),
        (["plan", source, "--tp", 2], 354, ["rich.console"]),
    ):
        number, found = own_modules(*args)
        assert number <= most, f"{args[0]} loads {number}"
        assert found == rare


def test_the_version_is_there_at_once():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "shardctl", "--version"], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2, "about 0.15 s on an idle machine"
