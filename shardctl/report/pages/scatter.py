"""Draws the meshes that a search compared: what the heaviest rank needs against what a token costs."""

from __future__ import annotations

from itertools import pairwise
from math import ceil, floor, log10
from typing import TYPE_CHECKING, Final

from shardctl.base.amounts import format_memory_size
from shardctl.report.pages.svg import draw_dot, draw_line, draw_picture, draw_text
from shardctl.report.search_table import format_time

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from markupsafe import Markup

    from shardctl.estimate.search.mesh_comparison import MeshCandidate

_PICTURE_HEIGHT_PIXELS: Final = 300
_PLOT_BOTTOM_PIXELS: Final = 252
_PLOT_TOP_PIXELS: Final = 12
_PLOT_LEFT_PERCENT: Final = 16.0
_PLOT_RIGHT_PERCENT: Final = 97.0
_MAX_NUMBERED_POINTS: Final = 5
_TARGET_TICK_COUNT: Final = 5
_ROUND_TICK_VALUES: Final = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)


def draw_search(ranked: Sequence[MeshCandidate], budget: int | None) -> Markup | None:
    """Draw each mesh as a dot, the frontier as a line; None where fewer than two have a cost."""
    priced = [(one, one.cost.score) for one in ranked if one.cost is not None and one.cost.score > 0]
    if len(priced) < 2:  # noqa: PLR2004
        return None
    across = _make_log_scale([score for _, score in priced], _PLOT_LEFT_PERCENT, _PLOT_RIGHT_PERCENT)
    most = max([budget or 0, *(one.peak for one, _ in priced)]) * 1.05

    def down(nbytes: float) -> float:
        return _PLOT_BOTTOM_PIXELS - (_PLOT_BOTTOM_PIXELS - _PLOT_TOP_PIXELS) * nbytes / most

    parts = _draw_axes([score for _, score in priced], across, most, down)
    if budget:
        parts.append(draw_line(_PLOT_LEFT_PERCENT, down(budget), 100, down(budget), look="limit"))
        parts.append(draw_text(100, down(budget) - 4, "limit", look="tick", anchor="end"))
    front = select_frontier([(score, one.peak) for one, score in priced])
    corners = [(across(priced[n][1]), down(priced[n][0].peak)) for n in front]
    for (x1, y1), (x2, y2) in pairwise(corners):
        parts.append(draw_line(x1, y1, x2, y2, look="frontier"))
    for number, (one, score) in reversed(list(enumerate(priced))):
        look = "dot best" if number in front else "dot"
        about = f"{number + 1}. {one.mesh}: {format_memory_size(one.peak)}, {format_time(score)} a token"
        parts.append(draw_dot(across(score), down(one.peak), 5 if number in front else 3.5, look=look, title=about))
    parts += _draw_numbers(
        [(across(priced[n][1]), down(priced[n][0].peak), n + 1) for n in front[:_MAX_NUMBERED_POINTS]]
    )
    label = (
        f"{len(priced)} meshes: memory of the heaviest rank against device-seconds per token; the table below has all"
    )
    return draw_picture(parts, height=_PICTURE_HEIGHT_PIXELS, label=label)


def select_frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Select the positions of the points that no other beats in both numbers, by the first number.

    >>> select_frontier([(1.0, 9.0), (2.0, 5.0), (3.0, 7.0), (4.0, 1.0)])
    [0, 1, 3]
    """
    found: list[int] = []
    for number in sorted(range(len(points)), key=points.__getitem__):
        if not found or points[number][1] < points[found[-1]][1]:
            found.append(number)
    return found


def _make_log_scale(values: Sequence[float], left: float, right: float) -> Callable[[float], float]:
    low, high = log10(min(values)), log10(max(values))
    span = max(high - low, 0.05)
    return lambda value: left + 2 + (right - left - 4) * (log10(value) - low) / span


def _draw_axes(
    scores: Sequence[float], across: Callable[[float], float], most: float, down: Callable[[float], float]
) -> list[str]:
    parts = draw_memory_axis(_PLOT_LEFT_PERCENT, most, down)
    last = -100.0
    for value in _list_round_values(min(scores), max(scores)):
        if across(value) - last > 14 and across(value) <= _PLOT_RIGHT_PERCENT:  # noqa: PLR2004 - percent that a label takes
            last = across(value)
            parts.append(draw_line(last, _PLOT_BOTTOM_PIXELS, last, _PLOT_BOTTOM_PIXELS + 4, look="axis"))
            parts.append(draw_text(last, _PLOT_BOTTOM_PIXELS + 18, format_time(value), look="tick", anchor="middle"))
    parts.append(
        draw_text(
            (_PLOT_LEFT_PERCENT + 100) / 2,
            _PICTURE_HEIGHT_PIXELS - 6,
            "device-seconds per token",
            look="tick",
            anchor="middle",
        )
    )
    return parts


def draw_memory_axis(left: float, most: float, down: Callable[[float], float]) -> list[str]:
    """Draw the axis of 0 at the bottom, and a line and a size at each step up to `most` bytes; `left` is in percent."""
    step = _round_step(most / _TARGET_TICK_COUNT)
    parts = [draw_line(left, down(0), 100, down(0), look="axis")]
    for number in range(floor(most / step) + 1):
        at = down(number * step)
        parts.append(draw_line(left, at, 100, at, look="grid"))
        size = format_memory_size(int(number * step)) if number else "0"
        parts.append(draw_text(left - 1, at + 4, size, look="tick", anchor="end"))
    return parts


def _round_step(step: float) -> float:
    """Round a step up to a power of two, as sizes of memory are."""
    power = 1.0
    while power < step:
        power *= 2
    return power


def _list_round_values(low: float, high: float) -> list[float]:
    decades = range(floor(log10(low)), ceil(log10(high)) + 1)
    return [n * 10.0**d for d in decades for n in _ROUND_TICK_VALUES if low <= n * 10.0**d <= high] or [low]


def _draw_numbers(places: Sequence[tuple[float, float, int]]) -> list[str]:
    """Write the number of some dots beside them, where the one before leaves room."""
    parts, last = list[str](), (-100.0, -100.0)
    for left, top, number in places:
        if abs(left - last[0]) > 3 or abs(top - last[1]) > 14:  # noqa: PLR2004 - a number's width and height
            parts.append(draw_text(left + 1.2, top - 6, str(number), look="name"))
            last = left, top
    return parts
