"""Shows the moments of a training step, of the rank that needs most: as text, in JSON, and as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.text import Text

from shardctl.base.amounts import format_memory_size
from shardctl.estimate.term import CATEGORIES
from shardctl.report.grid import render_line, render_table
from shardctl.report.memory_bars import FILLS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from shardctl.estimate.rank_estimate import RankEstimate
    from shardctl.estimate.term import Category
    from shardctl.estimate.training.timeline import StepEvent
    from shardctl.report.documents import Document

_MAX_BAR_CHARACTERS: Final = 40
"""Characters of the bar of the largest moment."""
_PICTURE_SIZE_UNITS: Final = 1000
"""Size of the picture both ways; it is stretched."""


def render_moments(rank: RankEstimate) -> list[RenderableType]:
    """Render each moment with its bytes and a bar; nothing for what is not training."""
    if rank.timeline is None:
        return []
    moments = rank.timeline.list_moments()
    full = max(moment.nbytes for moment in moments)
    title = f"  moments of a step on rank {rank.holding.rank}, without the runtime; the largest decides"
    rows = [
        (
            moment.name,
            format_memory_size(moment.nbytes),
            _render_moment_bar(moment, full),
            "<" * (moment.nbytes == full),
        )
        for moment in moments
    ]
    return [render_line(title), render_table(rows, right=frozenset({1}), indent=2)]


def _render_moment_bar(moment: StepEvent, full: int) -> Text:
    """Render a bar, each category rounded where it ends."""
    bar, ends, place = Text(), 0, 0
    for category in CATEGORIES:
        ends += moment.parts.get(category, 0)
        until = round(_MAX_BAR_CHARACTERS * ends / full) if full else 0
        bar.append(FILLS[category][0] * (until - place), style=FILLS[category][1])
        place = until
    return bar


def build_moments_document(rank: RankEstimate) -> Document | None:
    """Build the moments of a step for the JSON document; None for what is not training."""
    if rank.timeline is None:
        return None
    moments = rank.timeline.list_moments()
    return {
        "rank": rank.holding.rank,
        "largest": max(moments, key=lambda moment: moment.nbytes).name,
        "moments": [
            {
                "name": moment.name,
                "allocated_bytes": moment.nbytes,
                "parts": [{"category": category, "part_bytes": n} for category, n in moment.parts.items()],
            }
            for moment in moments
        ],
    }


def list_areas(
    moments: Sequence[StepEvent], full: float, runtime: int = 0
) -> list[tuple[Category, list[tuple[float, float]]]]:
    """List the stacked areas of a picture, each a category and the corners of its polygon, from 0 to 1000 both ways.

    `full` are the bytes at the top. The bytes of the runtime are the same at all moments.
    """
    step = _PICTURE_SIZE_UNITS / max(1, len(moments) - 1)
    below = [0] * len(moments)
    found: list[tuple[Category, list[tuple[float, float]]]] = []
    for category in CATEGORIES:
        sizes = [moment.parts.get(category, 0) + runtime * (category == "runtime") for moment in moments]
        if not any(sizes):
            continue
        above = [base + size for base, size in zip(below, sizes, strict=True)]
        corners = [
            *((place, height) for place, height in enumerate(above)),
            *((place, below[place]) for place in reversed(range(len(moments)))),
        ]
        found.append(
            (
                category,
                [
                    (place * step, _PICTURE_SIZE_UNITS - _PICTURE_SIZE_UNITS * height / full)
                    for place, height in corners
                ],
            )
        )
        below = above
    return found
