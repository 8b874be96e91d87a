"""What the tests of the command line share."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest
from cli_checkpoints import llama

from shardctl.cli.program import run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Said(NamedTuple):
    """What a command line came to."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("cli") / "tiny-llama")


@pytest.fixture
def say(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Said]:
    """The program in this process: quick, and with the same code as in one of its own."""
    for name in ("NO_COLOR", "FORCE_COLOR", "GITHUB_ACTIONS", "SHARDCTL_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*args: object) -> Said:
        capfd.readouterr()
        code = run([str(arg) for arg in args])
        return Said(code, *capfd.readouterr())

    return call
