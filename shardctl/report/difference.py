"""Renders the result of `diff` as text: one line per tensor, setting or file that differs, and a summary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Group

from shardctl.base.amounts import format_file_size, format_plural
from shardctl.report.grid import render_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shardctl.verbs.diff import DiffResult, TensorChange

_STYLES: Final = {"only_in_a": "red", "only_in_b": "green"}
_SIGNS: Final = {"only_in_a": "-", "only_in_b": "+", "content": "~"}


def render_difference(diffed: DiffResult) -> RenderableType:
    """Render ``-`` only in the first, ``+`` only in the second, ``~`` in both and not the same."""
    return Group(
        *(render_line(_format_change(change), _STYLES.get(change.kind, "")) for change in diffed.changes),
        *(render_line(f"~ {each.file} {each.key}  {each.a} -> {each.b}") for each in diffed.config_changes),
        *(render_line(f"{_SIGNS[each.kind]} {each.file}", _STYLES.get(each.kind, "")) for each in diffed.file_changes),
        render_line(_format_summary(diffed)),
    )


def _format_change(change: TensorChange) -> str:
    if change.kind == "only_in_a":
        return f"- {change.tensor}  {change.a}"
    if change.kind == "only_in_b":
        return f"+ {change.tensor}  {change.b}"
    if change.kind == "values":
        what = f"{change.count:,} of {format_plural(change.size, 'element')} differ, first at {change.first}"
        return f"~ {change.tensor}  {change.a}  {what}{_format_distance(change)}"
    if change.cast:
        differ = f"{change.count:,} of {format_plural(change.size, 'element')} differ, first at {change.first}"
        what = f"{differ}{_format_distance(change)}" if change.count else "equal"
        return f"~ {change.tensor}  {change.a} -> {change.b}, as {change.cast} {what}"
    return f"~ {change.tensor}  {change.a} -> {change.b}"


def _format_distance(change: TensorChange) -> str:
    return f", {change.distance}" if change.distance is not None else ""


def _format_summary(diffed: DiffResult) -> str:
    compared = f"{format_file_size(diffed.nbytes)} compared"
    others = [
        format_plural(len(changes), what)
        for changes, what in ((diffed.config_changes, "setting"), (diffed.file_changes, "side file"))
        if changes
    ]
    if not diffed.changes:
        rest = f"; not the same: {' and '.join(others)}" if others else ""
        return f"equal: {format_plural(diffed.equal, 'tensor')}, {compared}{rest}"
    changed = [format_plural(len(diffed.changes), "tensor"), *others]
    return f"{', '.join(changed)} not the same, {format_plural(diffed.equal, 'tensor')} equal, {compared}"
