"""Defines what the engine reports to whoever watches it."""

from __future__ import annotations

from typing import Protocol


class CopyProgress(Protocol):
    """Called from several threads; must not raise."""

    def begin(self, total_bytes: int, files: int) -> None:
        """Work of this many output bytes in this many files starts."""

    def advance(self, nbytes: int, *, kept: bool = False) -> None:
        """Note that so many output bytes are in place; `kept` if an earlier run had written them."""

    def file_done(self, path: str) -> None:
        """Note that a file is complete and on stable storage."""


class SilentProgress:
    """Nobody watches."""

    def begin(self, total_bytes: int, files: int) -> None:
        """Ignore."""

    def advance(self, nbytes: int, *, kept: bool = False) -> None:
        """Ignore."""

    def file_done(self, path: str) -> None:
        """Ignore."""
