"""Describes what a check found, where, and how serious it is."""

from __future__ import annotations

from typing import Literal

from shardctl.base.value import value_class

Severity = Literal["error", "warning"]


@value_class
class CheckFinding:
    """One thing that is wrong (`error`) or odd (`warning`), with its place."""

    severity: Severity
    check: str
    """Which check found it, such as `coverage` or `digest`."""
    message: str
    """A sentence that names the place."""
    tensor: str = ""
    file: str = ""
    box: str = ""
    """The elements concerned, as ``[a:b, c:d]``."""
