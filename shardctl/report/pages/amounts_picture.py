"""Draws named amounts as bars, one below the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from shardctl.report.pages.svg import draw_box, draw_picture, draw_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from markupsafe import Markup

_ROW: Final = 34
_SHOWN: Final = 24


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
    for number, row in enumerate(rows[:_SHOWN]):
        top = number * _ROW
        parts.append(draw_text(0, top + 13, row.name, look="name"))
        parts.append(draw_text(100, top + 13, row.text, look="tick", anchor="end"))
        parts.append(draw_box(0, top + 18, 100, 10, look="track"))
        parts.append(draw_box(0, top + 18, 100 * row.amount / most, 10, look=row.look, title=f"{row.name}: {row.text}"))
    height = min(len(rows), _SHOWN) * _ROW
    if len(rows) > _SHOWN:
        parts.append(draw_text(0, height + 13, f"and {len(rows) - _SHOWN:,} more", look="tick"))
        height += 20
    said = "; ".join(f"{row.name}: {row.text}" for row in rows[:_SHOWN])
    return draw_picture(parts, height=height, label=f"{label}. {said}")
