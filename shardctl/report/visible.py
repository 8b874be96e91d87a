"""Names from files made safe for terminals: a checkpoint must not move the cursor or reorder a line."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING, Final

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable

_UNSAFE: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
"""Unicode categories that steer rather than show; `Cf` has the marks that reverse a line."""


def visible(text: str) -> str:
    r"""The text with every character that steers a terminal, line ends included, written as an escape.

    >>> print(visible("weight\x1b[2J\nüçé"))
    weight\x1b[2J\nüçé
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char.encode("unicode_escape").decode() if unicodedata.category(char) in _UNSAFE else char for char in text
    )


def line(text: object, style: str = "") -> Text:
    """One line, however wide the terminal is: a path that is copied must come out whole."""
    return Text(visible(str(text)), style=style)


def table(rows: Iterable[Iterable[object]], *, right: frozenset[int] = frozenset(), indent: int = 0) -> Table:
    """Aligned columns without lines; those of `right` are aligned to the right; a cell may be a `line` of its own."""
    cells = [[cell if isinstance(cell, Text) else line(cell) for cell in row] for row in rows]
    grid = Table.grid(padding=(0, 2, 0, 0))
    if indent:
        grid.add_column(width=indent - 2, min_width=indent - 2)
    for column in range(max((len(row) for row in cells), default=0)):
        grid.add_column(justify="right" if column in right else "left", no_wrap=True)
    for row in cells:
        grid.add_row(*([""] if indent else []), *row)
    return grid


def some(names: Iterable[str], most: int = 8) -> str:
    """The first names, and how many more there are.

    >>> some(["a", "b", "c"], 2), some([])
    ('a, b and 1 more', 'none')
    """
    listed = list(names)
    shown = ", ".join(listed[:most]) or "none"
    return shown if len(listed) <= most else f"{shown} and {len(listed) - most:,} more"
