"""Matches patterns against dotted tensor names, by whole parts and never by substrings."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_NAME_COMPONENT_REGEX: Final = r"[^.]+"


class PatternList:
    """Patterns in order, of which the first that matches a name wins.

    `*` is one part, `**` any number of parts, also none.

    >>> patterns = PatternList(["layers.*.mlp.**", "**.bias"])
    >>> [patterns.first(n) for n in ("layers.0.mlp.up.bias", "norm.bias", "norm.bias2", "layers.0.mlp2.up")]
    [0, 1, None, None]
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        """Raise UsageError for a pattern with an empty part or a `*` within a part."""
        self._any: re.Pattern[str] | None = None
        if patterns:
            self._any = re.compile("|".join(f"({_build_expression(p)})" for p in patterns))

    def first(self, name: str) -> int | None:
        """Return the position of the first pattern that matches the whole name."""
        found = self._any.fullmatch(f".{name}") if self._any else None
        return found.lastindex - 1 if found and found.lastindex else None


def list_name_patterns(names: Iterable[str]) -> list[str]:
    """List the names with every number replaced by `*`, each once: patterns for a rule file.

    >>> list_name_patterns(["embed.weight", "layers.0.up.weight", "layers.1.up.weight"])
    ['embed.weight', 'layers.*.up.weight']
    """
    return list(dict.fromkeys(".".join("*" if p.isdecimal() else p for p in name.split(".")) for name in names))


class LayerPattern:
    """A pattern whose only `*` counts layers, and that matches the names below it.

    >>> LayerPattern("model.layers.*").number("model.layers.12.mlp.up_proj.weight")
    12
    """

    def __init__(self, pattern: str) -> None:
        """Raise UsageError unless the pattern has exactly one `*`, for the layer's number."""
        parts = pattern.split(".")
        if parts.count("*") != 1 or "**" in parts:
            raise UsageError(f"the layer pattern {pattern!r} needs exactly one *, where the layer's number stands")
        _build_expression(pattern)
        self._below = re.compile(
            r"\.".join(r"(\d+)" if p == "*" else re.escape(p) for p in parts) + r"(?:\..*)?", re.DOTALL
        )

    def number(self, name: str) -> int | None:
        """Return the layer's number in the name, or None if it names no layer."""
        found = self._below.fullmatch(name)
        return int(found[1]) if found else None


class ExpertPattern:
    """A pattern whose last `*` counts experts, and that matches the names below each expert.

    >>> ExpertPattern("layers.*.experts.*").split("layers.3.experts.12.up.weight")
    ('layers.3.experts', 12)
    """

    def __init__(self, pattern: str) -> None:
        """Raise UsageError unless the pattern ends with the `*` that stands for an expert's number."""
        before, _, last = pattern.rpartition(".")
        if last != "*" or not before:
            raise UsageError(f"the pattern {pattern!r} does not end with .*, where the number of an expert stands")
        self._below = re.compile(rf"\.?({_build_expression(before)[2:]})\.(\d+)(?:\..*)?", re.DOTALL)

    def split(self, name: str) -> tuple[str, int] | None:
        """Return what stands before the expert's number, and the number; None if the name is no expert's."""
        found = self._below.fullmatch(name)
        return (found[1], int(found[2])) if found else None


def _build_expression(pattern: str) -> str:
    """Build a regular expression for the pattern, to be matched with a dot before the name: each part has one."""
    text = ""
    for part in pattern.split("."):
        if not part or ("*" in part and part not in ("*", "**")):
            raise UsageError(
                f"the name pattern {pattern!r} has the part {part!r}",
                hint="parts are between dots: write them out, or * for any one part and ** for any number",
            )
        text += (
            rf"(?:\.{_NAME_COMPONENT_REGEX})*"
            if part == "**"
            else rf"\.{_NAME_COMPONENT_REGEX if part == '*' else re.escape(part)}"
        )
    return text
