"""Renders the result of `diff` as text: one line per tensor that differs, and a summary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Group

from shardctl.amounts import format_file_size, format_plural
from shardctl.report.grid import render_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shardctl.verbs.diff import DiffResult, TensorChange

_STYLES: Final = {"only_in_a": "red", "only_in_b": "green"}


def render_difference(diffed: DiffResult) -> RenderableType:
    """Render ``-`` only in the first, ``+`` only in the second, ``~`` in both and not the same."""
    return Group(
        *(render_line(_format_change(change), _STYLES.get(change.kind, "")) for change in diffed.changes),
        render_line(_format_summary(diffed)),
    )


def _format_change(change: TensorChange) -> str:
    if change.kind == "only_in_a":
        return f"- {change.tensor}  {change.a}"
    if change.kind == "only_in_b":
        return f"+ {change.tensor}  {change.b}"
    if change.kind == "values":
        what = f"{change.count:,} of {format_plural(change.size, 'element')} differ, first at {change.first}"
        return f"~ {change.tensor}  {change.a}  {what}"
    return f"~ {change.tensor}  {change.a} -> {change.b}"


def _format_summary(diffed: DiffResult) -> str:
    compared = f"{format_file_size(diffed.nbytes)} compared"
    if not diffed.changes:
        return f"equal: {format_plural(diffed.equal, 'tensor')}, {compared}"
    return f"{format_plural(len(diffed.changes), 'tensor')} not the same, {diffed.equal:,} equal, {compared}"
