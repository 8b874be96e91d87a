"""Draws what groups of equal ranks need: a bar by category, the interval to be expected, and the limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.amounts import format_memory_size, format_plural
from shardctl.base.value import value_class
from shardctl.estimate.term import CATEGORIES, Category, MemorySum, sum_terms
from shardctl.planning.plan_result import format_amount
from shardctl.report.pages.svg import draw_box, draw_line, draw_picture

if TYPE_CHECKING:
    from collections.abc import Sequence

    from markupsafe import Markup

    from shardctl.estimate.rank_estimate import MeshEstimate, RankEstimate

_PICTURE_HEIGHT_PIXELS: Final = 34
_BAR_TOP_PIXELS: Final = 7
_BAR_THICKNESS_PIXELS: Final = 20
_INTERVAL_CAP_PIXELS: Final = 5


@value_class
class RankGroup:
    """The ranks of one stage that need the same of everything."""

    title: str
    parts: list[tuple[Category, int]]
    """Bytes by category."""
    whole: MemorySum
    picture: Markup


def list_rank_groups(estimate: MeshEstimate) -> list[RankGroup]:
    """List the groups, each with its bar; all bars have one scale."""
    groups = _group_ranks(estimate)
    most = max((ranks[0].total().high for ranks in groups), default=0)
    full = max(most, estimate.budget or 0) * 1.01 or 1
    return [_summarise_group(ranks, full, estimate.budget) for ranks in groups]


def list_categories(estimate: MeshEstimate) -> list[Category]:
    """List the categories of which some rank needs anything."""
    return [c for c in CATEGORIES if any(sum_terms(r.terms, category=c).nbytes for r in estimate.distinct)]


def _group_ranks(estimate: MeshEstimate) -> list[list[RankEstimate]]:
    groups: dict[tuple[object, ...], list[RankEstimate]] = {}
    for rank in estimate.ranks:
        key = (rank.holding.stage, *((term.name, term.nbytes) for term in rank.terms))
        groups.setdefault(key, []).append(rank)
    return list(groups.values())


def _summarise_group(ranks: Sequence[RankEstimate], full: float, budget: int | None) -> RankGroup:
    first, holding = ranks[0], ranks[0].holding
    held = format_plural(sum(rank.holding.ranks for rank in ranks), "rank")
    what = f"layers {holding.layers.start}-{holding.layers.stop - 1}"
    if len(holding.layers) < 2:  # noqa: PLR2004 - a range of layers has two ends
        what = f"layer {holding.layers.start}" if holding.layers else "no layers"
    place = "the device" if holding.label == "only" else f"from rank {holding.rank} ({holding.label}) on"
    title = f"stage {holding.stage}, {what}: {held}, {place}"
    parts = [(category, sum_terms(first.terms, category=category).nbytes) for category in CATEGORIES]
    held_parts = [(category, nbytes) for category, nbytes in parts if nbytes]
    return RankGroup(title, held_parts, first.total(), _draw_bar(title, held_parts, first.total(), full, budget))


def _draw_bar(
    title: str, parts: Sequence[tuple[Category, int]], whole: MemorySum, full: float, budget: int | None
) -> Markup:
    """Draw one bar: boxes by category, a whisker from the least to the most to be expected, a line at the limit."""
    drawn, left = [draw_box(0, _BAR_TOP_PIXELS, 100, _BAR_THICKNESS_PIXELS, look="track")], 0.0
    for category, nbytes in parts:
        width = 100 * nbytes / full
        about = f"{category}: {format_memory_size(nbytes)}"
        drawn.append(
            draw_box(left, _BAR_TOP_PIXELS, width, _BAR_THICKNESS_PIXELS, look=name_look(category), title=about)
        )
        left += width
    middle = _BAR_TOP_PIXELS + _BAR_THICKNESS_PIXELS / 2
    if not whole.exact:
        low, high = 100 * whole.low / full, 100 * whole.high / full
        for look in ("whisker halo", "whisker"):
            drawn.append(draw_line(low, middle, high, middle, look=look))
            drawn += [
                draw_line(at, middle - _INTERVAL_CAP_PIXELS, at, middle + _INTERVAL_CAP_PIXELS, look=look)
                for at in (low, high)
            ]
    if budget:
        at = 100 * budget / full
        drawn.append(draw_line(at, 0, at, _PICTURE_HEIGHT_PIXELS, look="limit"))
    limit = f", of {format_memory_size(budget)}" if budget else ""
    return draw_picture(drawn, height=_PICTURE_HEIGHT_PIXELS, label=f"{title}: {format_amount(whole)}{limit}")


def name_look(category: Category) -> str:
    """Name the class of the style sheet that has the colour of a category."""
    return category.replace(" ", "-")
