"""Shows what `plan` found as one self-contained HTML page: no script, no network, readable on paper.

The page is the template `plan_page.html.jinja` beside this file, which escapes whatever it is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardctl.amounts import format_count, format_file_size, format_memory_size, format_plural
from shardctl.estimate.term import CATEGORIES, Category, MemorySum, sum_terms
from shardctl.mesh import build_holding_key
from shardctl.report.memory_bars import format_amount, format_number, list_heaviest_ranks
from shardctl.report.planning import (
    format_beyond_positions,
    format_plan_verdict,
    format_room,
    format_workload,
    list_adapter_lines,
    list_offload_lines,
)
from shardctl.report.search_table import build_candidate_row
from shardctl.report.step_moments import list_areas
from shardctl.report.strategies import format_fewest_by_type
from shardctl.report.visible import escape_control_characters
from shardctl.version import __version__

if TYPE_CHECKING:
    from shardctl.estimate.rank_estimate import MeshEstimate, RankEstimate
    from shardctl.estimate.term import MemoryTerm
    from shardctl.mesh import Mesh
    from shardctl.planning.plan_result import PlanResult

_TEMPLATE: Final = "plan_page.html.jinja"
_COLOURS: Final[dict[Category, str]] = {
    "weights": "#3b6fb6",
    "gradients": "#4aa5b5",
    "optimizer": "#8a5fb0",
    "activations": "#d9a441",
    "kv cache": "#5a9e58",
    "workspace": "#c45b4d",
    "runtime": "#8c8c8c",
}
_DRAWN: Final = 512
"""Ranks in the picture of the mesh; beyond, one line says how many more there are."""
_WIDE: Final = 16
"""Ranks of one line of it."""


def render_plan_page(planned: PlanResult) -> str:
    """Return the whole page as HTML."""
    from jinja2 import Environment, FileSystemLoader

    templates = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, finalize=_escape_controls)
    templates.filters |= {
        "amount": format_amount,
        "file_size": format_file_size,
        "formula": _describe_formula,
        "memory_size": format_memory_size,
        "plural": format_plural,
        "thousands": lambda number: f"{number:,}",
    }
    return templates.get_template(_TEMPLATE).render(_collect_facts(planned)) + "\n"


def _escape_controls(value: object) -> object:
    """Write characters that steer a terminal or a browser as escapes; Jinja escapes the markup."""
    return escape_control_characters(value) if type(value) is str else value


def _collect_facts(planned: PlanResult) -> dict[str, Any]:
    """Collect everything that the template names, but for what it reads off the plan itself."""
    seen, mesh = planned.forecast, planned.mesh
    estimate, strategies = seen.estimate, seen.strategies
    world = f"{mesh} = {format_plural(mesh.world, 'rank')}" if mesh.world > 1 else "one device"
    parameters = f"{format_count(planned.parameters)} parameters"
    shown = [c for c in CATEGORIES if any(sum_terms(r.terms, category=c).nbytes for r in estimate.distinct)]
    moments = estimate.binding.timeline.list_moments() if estimate.binding.timeline is not None else ()
    found = planned.explored.found if planned.explored is not None else None
    return {
        "planned": planned,
        "estimate": estimate,
        "version": __version__,
        "facts": [
            fact for fact in (planned.architecture, parameters, format_memory_size(planned.weight_bytes), world) if fact
        ],
        "workload": format_workload(planned) + format_beyond_positions(seen) if seen.work is not None else "",
        "room": format_room(seen) if seen.work is not None and seen.device is not None else "",
        "verdict": format_plan_verdict(planned) if seen.work is not None or seen.device is not None else "",
        "remarks": _list_remarks(planned),
        "categories": shown,
        "colours": _COLOURS,
        "full": max([estimate.budget or 0, *(rank.total().high for rank in estimate.distinct)], default=0) or 1,
        "groups": [_summarise_group(ranks, shown) for ranks in _group_ranks(estimate)],
        "columns": min(next((degree for _, degree in reversed(mesh.axes) if degree > 1), 1), _WIDE),
        "cells": _list_cells(mesh, estimate),
        "undrawn": max(mesh.world - _DRAWN, 0),
        "types": format_fewest_by_type(planned.counsel.types) if planned.counsel.types else "",
        "strategies": [
            (
                one.name,
                format_memory_size(one.nbytes),
                f"{one.reduction:.2f}",
                format_file_size(one.sent_bytes),
                one.formula,
            )
            for one in strategies
        ],
        "strategies_source": strategies[0].source if strategies else "",
        "devices": format_plural(int(strategies[0].inputs["N"]), "device") if strategies else "",
        "found": found,
        "alternatives": [build_candidate_row(one) for one in found.ranked] if found is not None else (),
        "rejections": [(one.what, one.reason) for one in found.rejected] if found is not None else (),
        "heaviest": list_heaviest_ranks(estimate),
        "areas": list_areas(moments),
        "largest": max(moments, key=lambda moment: moment.nbytes) if moments else None,
    }


def _list_remarks(planned: PlanResult) -> list[str]:
    seen = planned.forecast
    about = list_adapter_lines(planned)
    if seen.work is None:
        return [*about, f"Memory besides weights is not modelled: {seen.unmodelled}"]
    return [
        *about,
        *list_offload_lines(seen),
        *([f"Activations are not modelled: {seen.unmodelled}"] if seen.estimate.partial else ()),
    ]


@dataclass(frozen=True, slots=True)
class _RankGroup:
    """The ranks of one stage that need the same of everything."""

    title: str
    parts: list[tuple[Category, int]]
    """Bytes by category."""
    whole: MemorySum


def _summarise_group(ranks: list[RankEstimate], shown: list[Category]) -> _RankGroup:
    first, holding = ranks[0], ranks[0].holding
    held = format_plural(sum(rank.holding.ranks for rank in ranks), "rank")
    what = f"layers {holding.layers.start}-{holding.layers.stop - 1}"
    if len(holding.layers) < 2:  # noqa: PLR2004 - a range of layers has two ends
        what = f"layer {holding.layers.start}" if holding.layers else "no layers"
    return _RankGroup(
        title=f"stage {holding.stage}, {what}: {held}, from rank {holding.rank} ({holding.label}) on",
        parts=[(category, sum_terms(first.terms, category=category).nbytes) for category in shown],
        whole=first.total(),
    )


def _group_ranks(estimate: MeshEstimate) -> list[list[RankEstimate]]:
    """Return ranks of one stage that need the same of everything."""
    groups: dict[tuple[object, ...], list[RankEstimate]] = {}
    for rank in estimate.ranks:
        key = (rank.holding.stage, *((term.name, term.nbytes) for term in rank.terms))
        groups.setdefault(key, []).append(rank)
    return list(groups.values())


def _list_cells(mesh: Mesh, estimate: MeshEstimate) -> list[tuple[int, str, int]]:
    """List number, label and bytes of each rank that is drawn."""
    needs = {build_holding_key(r.holding.coordinate): r.total().nbytes for r in estimate.ranks}
    ranks = range(min(mesh.world, _DRAWN)) if mesh.world > 1 else ()
    coordinates = ((rank, mesh.coordinate(rank)) for rank in ranks)
    return [(rank, mesh.label(rank), needs[build_holding_key(at)]) for rank, at in coordinates]


def _describe_formula(term: MemoryTerm) -> str:
    given = ", ".join(f"{name} = {format_number(value)}" for name, value in term.inputs.items())
    return "; ".join(filter(None, (term.formula, given))) or "from headers"
