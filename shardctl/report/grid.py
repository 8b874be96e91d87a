"""Formats lines and aligned columns, for views in text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from shardctl.report.visible import escape_control_characters

if TYPE_CHECKING:
    from collections.abc import Iterable


def render_line(text: object, style: str = "") -> Text:
    """Render one line, however wide the terminal is: a path that is copied must come out whole."""
    return Text(escape_control_characters(str(text)), style=style)


def render_table(rows: Iterable[Iterable[object]], *, right: frozenset[int] = frozenset(), indent: int = 0) -> Table:
    """Render aligned columns without lines.

    Those of `right` are aligned to the right; a cell may be such a line itself.
    """
    cells = [[cell if isinstance(cell, Text) else render_line(cell) for cell in row] for row in rows]
    grid = Table.grid(padding=(0, 2, 0, 0))
    if indent:
        grid.add_column(width=indent - 2, min_width=indent - 2)
    for column in range(max((len(row) for row in cells), default=0)):
        grid.add_column(justify="right" if column in right else "left", no_wrap=True)
    for row in cells:
        grid.add_row(*([""] if indent else []), *row)
    return grid
