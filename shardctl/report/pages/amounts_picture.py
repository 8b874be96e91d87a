"""Draws named amounts as bars, one below the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from shardctl.report.pages.svg import draw_box, draw_picture, draw_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from markupsafe import Markup

_ROW_HEIGHT_PIXELS: Final = 34
_MAX_ROWS_SHOWN: Final = 24


class NamedAmount(NamedTuple):
    """One bar."""

    name: str
    amount: float
    text: str
    """The amount in words."""
    look: str = "weights"


def draw_amounts(rows: Sequence[NamedAmount], *, label: str) -> Markup | None:
    """Draw the first rows, and how many more there are; None for none."""
    if not rows:
        return None
    most = max(row.amount for row in rows) or 1
    parts: list[str] = []
    for number, row in enumerate(rows[:_MAX_ROWS_SHOWN]):
        top = number * _ROW_HEIGHT_PIXELS
        parts.append(draw_text(0, top + 13, row.name, look="name"))
        parts.append(draw_text(100, top + 13, row.text, look="tick", anchor="end"))
        parts.append(draw_box(0, top + 18, 100, 10, look="track"))
        parts.append(draw_box(0, top + 18, 100 * row.amount / most, 10, look=row.look, title=f"{row.name}: {row.text}"))
    height = min(len(rows), _MAX_ROWS_SHOWN) * _ROW_HEIGHT_PIXELS
    if len(rows) > _MAX_ROWS_SHOWN:
        parts.append(draw_text(0, height + 13, f"and {len(rows) - _MAX_ROWS_SHOWN:,} more", look="tick"))
        height += 20
    said = "; ".join(f"{row.name}: {row.text}" for row in rows[:_MAX_ROWS_SHOWN])
    return draw_picture(parts, height=height, label=f"{label}. {said}")
