"""What `diff` found, as text: a line per tensor that is not the same, and a summary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Group

from shardctl.amounts import file_size, plural
from shardctl.report.grid import line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shardctl.verbs.diff import Change, Diffed

_STYLES: Final = {"only_in_a": "red", "only_in_b": "green"}


def difference(diffed: Diffed) -> RenderableType:
    """``-`` only in the first, ``+`` only in the second, ``~`` in both and not the same."""
    return Group(
        *(line(_text(change), _STYLES.get(change.kind, "")) for change in diffed.changes), line(_summary(diffed))
    )


def _text(change: Change) -> str:
    if change.kind == "only_in_a":
        return f"- {change.tensor}  {change.a}"
    if change.kind == "only_in_b":
        return f"+ {change.tensor}  {change.b}"
    if change.kind == "values":
        what = f"{change.count:,} of {plural(change.size, 'element')} differ, first at {change.first}"
        return f"~ {change.tensor}  {change.a}  {what}"
    return f"~ {change.tensor}  {change.a} -> {change.b}"


def _summary(diffed: Diffed) -> str:
    compared = f"{file_size(diffed.nbytes)} compared"
    if not diffed.changes:
        return f"equal: {plural(diffed.equal, 'tensor')}, {compared}"
    return f"{plural(len(diffed.changes), 'tensor')} not the same, {diffed.equal:,} equal, {compared}"
