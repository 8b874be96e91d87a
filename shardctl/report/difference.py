"""Renders the result of `diff` as text: the verdict, then one line per tensor, setting or file that differs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Group

from shardctl.base.amounts import format_plural
from shardctl.report.grid import render_line, render_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from shardctl.verbs.diff import DiffResult, TensorChange
    from shardctl.verify.content import LayerChange

SHOWN_CHANGES: Final = 20
"""Differences in full; `--all` prints the rest, and `--json` has them all."""
_STYLES_BY_CHANGE: Final = {"only_in_a": "red", "only_in_b": "green"}
_SIGNS_BY_CHANGE: Final = {"only_in_a": "-", "only_in_b": "+", "content": "~"}


def render_difference(diffed: DiffResult, *, everything: bool = False) -> RenderableType:
    """Render the verdict, then ``-`` only in the first, ``+`` only in the second, ``~`` in both and not the same.

    Tensors that are equal after a cast come last, because a short list must not hide one whose values differ.
    """
    changes = sorted(diffed.changes, key=lambda change: change.kind == "dtype" and not change.count)
    lines = [
        *(render_line(_format_change(change), _STYLES_BY_CHANGE.get(change.kind, "")) for change in changes),
        *(render_line(f"~ {each.file} {each.key}  {each.a} -> {each.b}") for each in diffed.config_changes),
        *(
            render_line(f"{_SIGNS_BY_CHANGE[each.kind]} {each.file}", _STYLES_BY_CHANGE.get(each.kind, ""))
            for each in diffed.file_changes
        ),
    ]
    shown = lines if everything else lines[:SHOWN_CHANGES]
    more = len(lines) - len(shown)
    written = [render_line(diffed.delta.describe(), "bold green")] if diffed.delta is not None else []
    return Group(
        *written,
        render_line(diffed.verdict, "bold green" if diffed.equal_all else "bold red"),
        *shown,
        *([render_line(f"and {more:,} more; --all prints them")] if more else []),
        *_render_layers(diffed, everything=everything),
    )


def _render_layers(diffed: DiffResult, *, everything: bool) -> Iterator[RenderableType]:
    """Render by how much each layer changed, the one that changed most first."""
    if not diffed.layers:
        return
    shown = diffed.layers if everything else diffed.layers[:SHOWN_CHANGES]
    yield render_line("change by layer, as a share of the norm of the first:")
    rows = (
        (_format_share(each), f"{each.changed:,} of {format_plural(each.tensors, 'tensor')}", each.layer)
        for each in shown
    )
    yield render_table(rows, right=frozenset({0, 1}), indent=2)
    if len(shown) < len(diffed.layers):
        yield render_line(f"and {len(diffed.layers) - len(shown):,} more layers; --all prints them")


def _format_share(layer: LayerChange) -> str:
    """Format by how much a layer changed; the share leaves out what is not finite, which is therefore said instead."""
    return f"{layer.not_finite:,} not finite" if layer.not_finite else f"{layer.relative:.3%}"


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
