"""Keeps the command line that is being run, for reports that say how they were made."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

from shardctl.report.visible import hide_passwords

if TYPE_CHECKING:
    from collections.abc import Sequence

_CURRENT_COMMAND_ARGS: ContextVar[tuple[str, ...]] = ContextVar("command", default=())


def remember_command(args: Sequence[str]) -> None:
    """Remember what follows the name of the program."""
    _CURRENT_COMMAND_ARGS.set(tuple(args))


def recall_command() -> tuple[str, ...]:
    """Return the whole command line, with the name of the program and without passwords in addresses."""
    return ("shardctl", *map(hide_passwords, _CURRENT_COMMAND_ARGS.get()))
