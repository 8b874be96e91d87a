"""Shells complete verbs, options, and what options take; bash, zsh and fish are run where they are installed."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time

import pytest

from shardctl.cli.completion import FILES

ESCAPE = re.compile(r"\x1b\[[?0-9;]*[a-zA-Z]")
"""What moves the cursor of a terminal, or changes its colours."""
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))  # noqa: PTH120 - a string for a shell


def words(said):
    return [line.partition("\t")[0] for line in said.out.splitlines()]


@pytest.fixture
def asked(say):
    """What the words up to the cursor are answered with."""

    def ask(*line, dialect="zsh"):
        found = say("_complete", dialect, *line)
        assert (found.code, found.err) == (0, "")
        return words(found)

    return ask


def test_verbs_come_first(asked):
    assert asked("ver") == ["verify"]
    assert {"inspect", "plan", "reshard", "finish", "verify", "diff", "digest", "help", "completion"} <= {*asked("")}
    assert asked("--v") == ["--version"]
    assert asked("help", "di") == ["diff", "digest"]
    assert asked("completion", "") == ["bash", "zsh", "fish"]


def test_options_come_with_the_first_sentence_of_their_help(say, asked):
    assert asked("verify", "model", "--aga") == ["--against"]
    assert "--help-all" in asked("plan", "--help")
    assert asked("settings", "--j") == ["--json"]
    assert (
        say("_complete", "zsh", "plan", "--fs").out
        == "--fsdp\tNumber of ranks that share the first dim of each tensor\n"
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["verify", "x", "--level", "f"], ["full", "forward"]),
        (["reshard", "x", "y", "--to", "ra"], ["ranks"]),
        (["reshard", "x", "y", "--to", "torch"], ["torch_dist"]),
        (["inspect", "x", "--from", "safe"], ["safetensors"]),
        (["reshard", "x", "y", "--dtype", "b"], ["bf16"]),
        (["reshard", "x", "y", "--quantize", "nv"], ["nvfp4"]),
        (["verify", "x", "--load", "c"], ["cpu", "cuda"]),
        (["plan", "x", "--optimizer", "adafac"], ["adafactor"]),
        (["plan", "x", "--gpu", "h100-8"], ["h100-80g"]),
        (["plan", "x", "--recompute=fu"], ["--recompute=full"]),
        (["plan", "x", "--tp", ""], []),
    ],
)
def test_what_an_option_takes(asked, line, expected):
    assert asked(*line) == expected


@pytest.mark.parametrize(
    "line",
    [
        ["verify", ""],
        ["verify", "x", "--against", ""],
        ["verify", "x", "--junit", ""],
        ["reshard", "x", "y", "--merge", "a"],
        ["diff", "a", ""],
        ["verify", "x", "--against=mo"],
        ["verify", "--", "--x"],
    ],
)
def test_paths_are_for_the_shell_to_list(asked, line):
    assert asked(*line) == [FILES]


def test_bash_takes_an_option_with_an_equals_sign_for_three_words(asked):
    assert asked("reshard", "x", "--to", "=", "ra", dialect="bash") == ["ranks"]
    assert "ranks" in asked("reshard", "x", "--to", "=", dialect="bash")


@pytest.fixture
def home(tmp_path):
    """A folder with the program on its path, and one checkpoint to find."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "shardctl"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {ROOT!r})\nfrom shardctl.cli import main\nmain()\n"
    )
    program.chmod(0o755)
    (tmp_path / "my-model").mkdir()
    for shell in ("bash", "zsh", "fish"):
        script = subprocess.run([program, "completion", shell], capture_output=True, text=True, check=True).stdout
        (tmp_path / f"script.{shell}").write_text(script)
    return tmp_path


def environment(home):
    path = f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {
        "PATH": path,
        "HOME": str(home),
        "TERM": "xterm",
        "LC_ALL": "C.UTF-8",
        "PS1": "ready> ",
        "PROMPT": "ready> ",
    }


def type_in(home, program, start, typed, wanted):
    """What a terminal shows of a shell in which something is typed, once it shows what is wanted."""
    child, terminal = pty.fork()
    if not child:
        os.chdir(home)
        os.execvpe(program[0], program, environment(home))  # noqa: S606 - it is a shell
    shown = ""

    def wait_for(text):
        nonlocal shown
        stop = time.monotonic() + 30
        while text not in ESCAPE.sub("", shown) and time.monotonic() < stop:
            if select.select([terminal], [], [], 0.2)[0]:
                shown += os.read(terminal, 4096).decode("utf-8", "replace")
        return text in ESCAPE.sub("", shown)

    try:
        assert wait_for("ready> "), shown
        shown = ""
        os.write(terminal, f"{start}; echo loa''ded\n".encode())
        assert wait_for("loaded"), shown
        shown = ""
        os.write(terminal, typed.encode())
        assert wait_for(wanted), repr(shown)
    finally:
        os.close(terminal)
        os.kill(child, 9)
        os.waitpid(child, 0)


TYPED = [
    ("shardctl ver\t", "shardctl verify "),
    ("shardctl verify my\t", "my-model/"),
    ("shardctl verify my-model --agai\t", "--against "),
    ("shardctl verify my-model --level for\t", "forward "),
    ("shardctl reshard a b --to torch\t", "torch_dist "),
    ("shardctl reshard a b --to=torch\t", "--to=torch_dist "),
    ("shardctl verify my-model --against=my\t", "--against=my-model/"),
    ("shardctl plan my-model --gpu rtx-pro-6000\t", "rtx-pro-6000"),
]


@pytest.mark.parametrize(("typed", "wanted"), TYPED)
def test_bash_completes_what_is_typed(home, typed, wanted):
    type_in(home, ["bash", "--norc", "-i"], "source script.bash", typed, wanted)


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")
@pytest.mark.parametrize(("typed", "wanted"), TYPED)
def test_zsh_completes_what_is_typed(home, typed, wanted):
    start = "autoload -U compinit && compinit -u -D && source script.zsh"
    type_in(home, ["zsh", "-f", "-i"], start, typed, wanted)


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("shardctl ver", ["verify"]),
        ("shardctl verify my", ["my-model/"]),
        ("shardctl verify my-model --agai", ["--against"]),
        ("shardctl verify my-model --level f", ["forward", "full"]),
        ("shardctl reshard a b --to torch", ["torch_dist"]),
        ("shardctl reshard a b --to=torch", ["--to=torch_dist"]),
        ("shardctl plan x --tp ", []),
    ],
)
def test_fish_completes_what_is_typed(home, typed, wanted):
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"source script.fish; complete -C {typed!r}"],
        cwd=home, env=environment(home), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert sorted(line.partition("\t")[0] for line in done.stdout.splitlines()) == wanted
