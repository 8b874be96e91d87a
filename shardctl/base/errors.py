"""Defines every error that shardctl raises on purpose, each with its exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def format_first_few(things: Iterable[object], most: int = 3) -> str:
    """Format the first of some names, and how many more there are: messages stay readable, whatever they are about.

    >>> format_first_few(["a", "b", "c", "d"]), format_first_few([1, 2])
    ('a, b, c and 1 more', '1, 2')
    """
    listed = list(things)
    more = f" and {len(listed) - most:,} more" if len(listed) > most else ""
    return ", ".join(map(str, listed[:most])) + more


class ShardctlError(Exception):
    """An error a user can act on: one sentence of what happened, and optionally one of what to do.

    The message names where (file, tensor, box), what was found and what was expected; it has no final period.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")  # which a traceback shows


class UsageError(ShardctlError):
    """The command line, a rule file or a mesh asks for something that does not exist or cannot be."""

    exit_code = 2


class PartitionError(UsageError):
    """A tensor cannot be cut as the mesh asks; the hint lists the degrees that work."""


class Mismatch(ShardctlError):  # noqa: N818 - an answer, not a fault
    """The work was done and the answer is no: a difference, a hole, a budget that does not hold."""

    exit_code = 3


class SourceError(ShardctlError):
    """The source is missing, unreadable or malformed."""

    exit_code = 4


class HostileError(SourceError):
    """The source tries to run code, to leave its directory or to exhaust the reader."""


class UnsupportedError(SourceError):
    """The source is understood, and of a kind that shardctl does not convert."""


class CoverageError(SourceError):
    """Elements that the target wants are stored nowhere in the source."""


class TwoModelsError(SourceError):
    """A directory holds two models in different formats, which may differ."""


class MissingTensorsError(SourceError):
    """The source lacks tensors of the class in its config."""


class ChangedError(SourceError):
    """The source changed while it was read."""


class AccessError(ShardctlError):
    """Permission, token or gate."""

    exit_code = 5


class DestinationError(ShardctlError):
    """The destination was not written by shardctl, has no space, or cannot be written."""

    exit_code = 6


class OccupiedDestinationError(DestinationError):
    """The destination has a record: nobody said that its checkpoint may be replaced, or the record cannot be read."""


class MemoryBudgetError(UsageError):
    """The memory limit cannot hold even the smallest unit of work; `needed` bytes can."""

    def __init__(self, message: str, *, needed: int = 0, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.needed = needed


class TransientError(ShardctlError):
    """Passing trouble after all retries; the same command resumes."""

    exit_code = 7


class MachineError(TransientError):
    """The machine lacked memory, a device or a process for the work: it says nothing of the checkpoint."""


class Interrupted(ShardctlError):  # noqa: N818 - named for what happened; it is not a fault
    """SIGINT or SIGTERM arrived; the state was kept."""

    def __init__(self, message: str, *, signal: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = 128 + signal
