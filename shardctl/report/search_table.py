"""Renders the meshes that a search compared as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.amounts import format_memory_size, format_plural
from shardctl.report.grid import render_line, render_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from shardctl.estimate.search.cost import MeshCost
    from shardctl.estimate.search.mesh_comparison import MeshCandidate, MeshRejection, SmallestCluster
    from shardctl.planning.forecast import WorkloadEstimate
    from shardctl.planning.mesh_search import MeshExploration
    from shardctl.planning.settings_search import SettingsCandidate

_MAX_MESHES_SHOWN: Final = 8
_MAX_REJECTIONS_SHOWN: Final = 6
"""Lines that a person reads; `--detail tensor` and `--json` have them all."""


def render_ranking(explored: MeshExploration, *, everything: bool = False) -> list[RenderableType]:
    """Render the meshes that fit, the cheapest first, with what their time is spent on; and why others do not."""
    found = explored.found
    most = None if everything else _MAX_MESHES_SHOWN
    parts: list[RenderableType] = []
    if found.ranked:
        head = f"{format_plural(len(found.ranked), 'mesh')} of {format_plural(found.devices, 'device')}".replace(
            "meshs", "meshes"
        )
        cost = found.ranked[0].cost
        by = f", by device-seconds per token on {cost.device} (modelled)" if cost else ", by memory"
        step = f", {explored.sequences:,} sequences a step" if explored.sequences else ""
        parts.append(render_line(head + by + step, "bold"))
        best = found.ranked[:most]
        rows: list[Sequence[str]] = [_TABLE_HEADINGS, *map(build_candidate_row, best)]
        varied = any(one.settings for one in best)
        if varied:  # the settings follow the mesh that they were chosen for
            added = ("with", *(one.settings for one in best))
            rows = [(row[0], more, *row[1:]) for row, more in zip(rows, added, strict=True)]
        right = frozenset(number + varied for number in (1, 2, 3, 4))
        parts.append(render_table(rows, right=right, indent=2))
        if most is not None and len(found.ranked) > most:
            parts.append(render_line(f"  and {len(found.ranked) - most} more", "dim"))
    else:
        parts.append(render_line(f"no mesh of {format_plural(found.devices, 'device')} fits", "bold red"))
        parts += _render_settings(explored)
    if explored.fewest is not None and explored.fewest.devices != found.devices:
        given = " with the settings given" if explored.changes else ""
        parts.append(render_line(f"the fewest that fit{given}: {_format_fewest(explored.fewest)}"))
    shown = found.rejected if everything else _select_rejections(found.rejected, _MAX_REJECTIONS_SHOWN)
    if shown:
        parts.append(render_line(f"not possible, or too large: {len(found.rejected):,}"))
        parts.append(render_table([(one.what, one.reason) for one in shown], indent=2))
    return parts


def _format_fewest(few: SmallestCluster) -> str:
    """Format the fewest devices, and what is known of fewer where not every number was tried."""
    if few.devices == 1:
        return "one device"
    known = f"{few.devices:,}, as {few.candidate.mesh}"
    if few.every:
        return known
    least = f", on fewer than {few.least:,} none can" if few.least > 1 else ""
    return f"{known}; on {few.refused:,} no mesh does{least}, and not every number between was tried"


def _render_settings(explored: MeshExploration) -> list[RenderableType]:
    """Render the settings with which something would fit, each with its cheapest mesh; or how many devices would."""
    few = explored.recomputed
    if few is not None:
        text = f"nor with the settings that were tried; --recompute full fits {few.mesh.world:,} devices, as {few.mesh}"
        return [render_line(text)]
    if not explored.settings:
        return []
    head = f"what would make it fit on {format_plural(explored.found.devices, 'device')}, the cheapest first (modelled)"
    rows = [(one.options, *build_candidate_row(one.candidate)[:-1], _format_remarks(one)) for one in explored.settings]
    table = render_table([("add", *_TABLE_HEADINGS[:-1], ""), *rows], right=frozenset({2, 3, 4, 5}), indent=2)
    return [render_line(head, "bold"), table]


def _format_remarks(one: SettingsCandidate) -> str:
    other = [] if one.exact else ["computes other numbers"]
    away = f"{format_memory_size(one.host_bytes)} a rank on the host, whose update is not timed"
    return ", ".join([*other, *([] if one.timed else [away])])


def format_cost(cost: MeshCost, *, training: bool) -> str:
    """Format the time of one mesh, and what it is spent on."""
    what = "a step" if training else "a token of every sequence"
    rate = cost.tokens / cost.seconds / cost.ranks if cost.seconds else 0.0
    of = f"{rate:,.0f} tokens a second and device on {cost.device} (modelled)"
    if cost.utilization is not None:
        of += f", {cost.rate:,.0f} of all {cost.ranks:,}" * (cost.ranks > 1) + f", MFU {cost.utilization:.1%}"
    return f"time: {format_time(cost.seconds)} for {what}, {of}: {_format_shares(cost)}"


def format_first_token(cost: MeshCost, context: int) -> str:
    """Format the time until the first token of a prompt of `context` tokens; empty if it is not known."""
    if cost.first_token_seconds is None:
        return ""
    return f"first token: {format_time(cost.first_token_seconds)} after a prompt of {context:,} tokens (modelled)"


def format_run(seen: WorkloadEstimate) -> str:
    """Format the days and the price of a whole run, or of a million tokens; empty if neither was asked for."""
    found = []
    if seen.run_tokens is not None and seen.run_days is not None:
        found.append(f"{seen.run_tokens:,} tokens take {seen.run_days:,.1f} days without interruptions")
    if seen.run_price is not None:
        found.append(f"and cost {seen.run_price:,.0f}")
    if seen.million_price is not None:
        found.append(f"a million tokens cost {seen.million_price:,.4g} at {seen.price:g} for a device and hour")
    return f"run: {', '.join(found)} (modelled)" if found else ""


def _select_rejections(rejected: Sequence[MeshRejection], most: int) -> Sequence[MeshRejection]:
    """Select the first of what is not possible and of what is too large, at least half of `most` of each."""
    large = [one for one in rejected if one.why == "memory"]
    others = [one for one in rejected if one.why != "memory"][: max(most // 2, most - len(large))]
    return [*others, *large[: most - len(others)]]


_TABLE_HEADINGS: Final = ("mesh", "memory", "to spare", "time", "per token", "of which")


def build_candidate_row(one: MeshCandidate) -> Sequence[str]:
    """Build a mesh: what its heaviest rank needs and has to spare, its time, and what that is spent on."""
    spare = format_memory_size(one.slack) if one.estimate.budget is not None else ""
    if one.cost is None:
        return str(one.mesh), format_memory_size(one.peak), spare, "", "", ""
    return (
        str(one.mesh),
        format_memory_size(one.peak),
        spare,
        format_time(one.cost.seconds),
        format_time(one.cost.score),
        _format_shares(one.cost),
    )


def _format_shares(cost: MeshCost) -> str:
    """Format what takes a percent of the time or more, the most first."""
    names = dict.fromkeys(share.name for share in cost.shares)
    whole = cost.seconds or 1.0
    rows = sorted(((100 * cost.share(name) / whole, name) for name in names), reverse=True)
    return ", ".join(f"{name} {part:.0f} %" for part, name in rows if part >= 1)


def format_time(seconds: float) -> str:
    """Format a span from microseconds to days.

    >>> format_time(0.0000123), format_time(0.0456), format_time(3.2)
    ('12.3 us', '45.6 ms', '3.20 s')
    """
    if seconds < 1e-3:  # noqa: PLR2004
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
