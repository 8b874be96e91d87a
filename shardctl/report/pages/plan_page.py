"""Shows what `plan` found as a page: pictures of memory, schedule, search and conversion, and every term."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.amounts import format_count, format_file_size, format_memory_size, format_plural
from shardctl.conversion.file_flows import count_file_flows
from shardctl.estimate.training.schedule import compute_bubble
from shardctl.estimate.workload import ServingWorkload, TrainingWorkload
from shardctl.planning.needs_table import tabulate_needs
from shardctl.report.memory_bars import format_number, list_heaviest_ranks
from shardctl.report.pages.bars import list_categories, list_rank_groups, name_look
from shardctl.report.pages.flow import draw_flows
from shardctl.report.pages.page import render_page
from shardctl.report.pages.pipeline import draw_pipeline
from shardctl.report.pages.scatter import draw_memory_axis, draw_search
from shardctl.report.pages.svg import draw_line, draw_picture, draw_polygon, draw_shapes, draw_text
from shardctl.report.pages.treemap import draw_parameters, list_looks
from shardctl.report.planning import (
    STYLES,
    format_beyond_positions,
    format_room,
    format_workload,
    list_adapter_lines,
    list_offload_lines,
)
from shardctl.report.search_table import build_candidate_row
from shardctl.report.step_moments import list_areas
from shardctl.report.strategies import format_fewest_by_type
from shardctl.tensors.mesh import build_holding_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from markupsafe import Markup

    from shardctl.estimate.rank_estimate import MeshEstimate
    from shardctl.estimate.term import MemoryTerm
    from shardctl.estimate.training.timeline import StepEvent
    from shardctl.planning.needs_table import NeedsTable
    from shardctl.planning.plan_result import PlanResult
    from shardctl.tensors.mesh import Mesh

_MAX_RANKS_DRAWN: Final = 512
"""Ranks in the picture of the mesh; beyond, one line says how many more there are."""
_MAX_RANKS_PER_LINE: Final = 16
"""Ranks of one line of it."""
_AREA_CHART_HEIGHT_PIXELS: Final = 300
"""Pixels of the picture of moments, with its axes."""
_AREA_TOP_PIXELS: Final = 24
_AREA_BOTTOM_PIXELS: Final = 244
_AREA_LEFT_PERCENT: Final = 16.0


_CSS_CLASSES_BY_STYLE: Final = {"bold green": "yes", "bold yellow": "tight", "bold red": "no", "bold": ""}
"""The class of the answer's paragraph by its style in text."""


def render_plan_page(planned: PlanResult, command: Sequence[str]) -> str:
    """Return the whole page as HTML; `command` made it, and is empty where a program did."""
    return render_page("plan.html.jinja", _collect_facts(planned, command) | _collect_pictures(planned), command)


def _collect_facts(planned: PlanResult, command: Sequence[str]) -> dict[str, Any]:
    """Collect the texts and tables that the template names, but for what it reads off the plan itself."""
    seen, mesh = planned.forecast, planned.mesh
    estimate, strategies = seen.estimate, seen.strategies
    world = f"{mesh} = {format_plural(mesh.world, 'rank')}" if mesh.world > 1 else "one device"
    parameters = f"{format_count(planned.parameters)} parameters"
    found = planned.explored.found if planned.explored is not None else None
    return {
        "title": f"{planned.architecture or 'checkpoint'} on {mesh}",
        "planned": planned,
        "estimate": estimate,
        "facts": [
            fact for fact in (planned.architecture, parameters, format_memory_size(planned.weight_bytes), world) if fact
        ],
        "workload": format_workload(planned) + format_beyond_positions(seen) if seen.work is not None else "",
        "room": format_room(seen) if seen.work is not None and seen.device is not None else "",
        "verdict": planned.verdict,
        "verdict_look": _CSS_CLASSES_BY_STYLE[STYLES[planned.answer]],
        "remarks": _list_remarks(planned),
        "categories": [(category, name_look(category)) for category in list_categories(estimate)],
        "columns": min(next((degree for _, degree in reversed(mesh.axes) if degree > 1), 1), _MAX_RANKS_PER_LINE),
        "cells": _list_cells(mesh, estimate),
        "undrawn": max(mesh.world - _MAX_RANKS_DRAWN, 0),
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
        "alternatives": [(n, *build_candidate_row(one)) for n, one in enumerate(found.ranked, 1)] if found else (),
        "rejections": [(one.what, one.reason) for one in found.rejected] if found is not None else (),
        "heaviest": list_heaviest_ranks(estimate),
        "describe_formula": _describe_formula,
        "further": _list_next_steps(planned, command),
    }


def _collect_pictures(planned: PlanResult) -> dict[str, Any]:
    estimate = planned.forecast.estimate
    moments = estimate.binding.timeline.list_moments() if estimate.binding.timeline is not None else ()
    explored, table = planned.explored, tabulate_needs(planned)
    flows = count_file_flows(planned.copy_plan) if planned.copy_plan is not None else None
    return {
        "groups": list_rank_groups(estimate),
        "moments": _draw_moments(planned) if moments else None,
        "largest": max(moments, key=lambda moment: moment.nbytes) if moments else None,
        "pipeline": _draw_schedule(planned),
        "scatter": draw_search(explored.found.ranked, estimate.budget) if explored is not None else None,
        "needs": _build_needs_rows(table, planned) if table is not None else (),
        "needs_head": table.batches if table is not None else (),
        "needs_asked": _describe_sizes(planned),
        "parameters": draw_parameters(planned.model.inventory) if planned.model is not None else None,
        "parameter_looks": list_looks(planned.model.inventory) if planned.model is not None else (),
        "flows": draw_flows(flows) if flows else None,
    }


def _draw_moments(planned: PlanResult) -> Markup:
    """Draw the memory of a step over its moments, the runtime on top, and a line at the limit of the device."""
    estimate = planned.forecast.estimate
    binding, budget = estimate.binding, estimate.budget
    moments = binding.timeline.list_moments() if binding.timeline is not None else ()
    peak = binding.total().nbytes
    runtime = peak - max(moment.nbytes for moment in moments)
    full = max(peak, budget or 0) * 1.05

    def down(nbytes: float) -> float:
        return _AREA_BOTTOM_PIXELS - (_AREA_BOTTOM_PIXELS - _AREA_TOP_PIXELS) * nbytes / full

    shapes = [
        draw_polygon(corners, look=name_look(category), title=category)
        for category, corners in list_areas(moments, full, runtime)
    ]
    width, height = 100 - _AREA_LEFT_PERCENT, _AREA_BOTTOM_PIXELS - _AREA_TOP_PIXELS
    parts = [
        *draw_memory_axis(_AREA_LEFT_PERCENT, full, down),
        draw_text(0, 12, "memory", look="tick"),
        draw_shapes(_AREA_LEFT_PERCENT, _AREA_TOP_PIXELS, width, height, shapes),
        draw_line(_AREA_LEFT_PERCENT, _AREA_TOP_PIXELS, _AREA_LEFT_PERCENT, _AREA_BOTTOM_PIXELS, look="axis"),
        *_draw_moment_names(moments),
    ]
    if budget:
        said = f"limit of the device: {format_memory_size(budget)}"
        parts.append(draw_line(_AREA_LEFT_PERCENT, down(budget), 100, down(budget), look="limit"))
        parts.append(draw_text(100, down(budget) - 5, said, look="tick", anchor="end"))
    limit = f", of {format_memory_size(budget)}" if budget else ""
    label = (
        f"bytes of each category in each moment of a step on rank {binding.holding.rank}; "
        f"the peak is {format_memory_size(peak)}{limit}"
    )
    return draw_picture(parts, height=_AREA_CHART_HEIGHT_PIXELS, label=label)


def _draw_moment_names(moments: Sequence[StepEvent]) -> list[str]:
    """Write the first and the last moment below the axis, and below them the one with the peak, at its place."""
    most = max(range(len(moments)), key=lambda place: moments[place].nbytes)
    share = most / max(1, len(moments) - 1)
    at = _AREA_LEFT_PERCENT + (100 - _AREA_LEFT_PERCENT) * share
    anchor = "start" if share < 1 / 3 else "end" if share > 2 / 3 else "middle"
    top = _AREA_BOTTOM_PIXELS
    return [
        draw_line(at, top, at, top + 6, look="axis"),
        draw_text(at, top + 36, f"peak: {moments[most].name}", look="tick", anchor=anchor),
        draw_text(_AREA_LEFT_PERCENT + 1, top + 18, "start of the step", look="tick"),
        draw_text(100, top + 18, "end", look="tick", anchor="end"),
        draw_text(100, top + 52, "moments of a step, in order of time", look="tick", anchor="end"),
    ]


def _draw_schedule(planned: PlanResult) -> dict[str, Any] | None:
    """Draw the pipeline of a training step; None where there is none."""
    work, stages = planned.forecast.work, planned.mesh.degree("pp")
    if not isinstance(work, TrainingWorkload) or stages == 1:
        return None
    microbatches = work.count_passes(stages)
    bubble = compute_bubble(stages, microbatches, work.schedule, work.virtual_stages)
    chunks = f", {work.virtual_stages} chunks a stage" if work.schedule == "interleaved" else ""
    return {
        "picture": draw_pipeline(stages, microbatches, work.schedule, work.virtual_stages),
        "title": f"{work.schedule}, {format_plural(stages, 'stage')}, {microbatches} microbatches{chunks}",
        "waits": f"{100 * bubble / (1 + bubble):.1f} %",
        "bubble": f"{100 * bubble:.1f} %",
    }


def _build_needs_rows(table: NeedsTable, planned: PlanResult) -> list[tuple[int, list[tuple[str, str]]]]:
    """Build a row for each context: of each cell its text and its look."""
    budget = planned.forecast.estimate.budget
    asked = _read_sizes(planned)
    rows = []
    for context, needs in zip(table.contexts, table.rows, strict=True):
        cells = []
        for batch, nbytes in zip(table.batches, needs, strict=True):
            look = _rate_need(nbytes, budget) + (" asked" if (context, batch) == asked else "")
            cells.append(("not possible" if nbytes is None else format_memory_size(nbytes), look))
        rows.append((context, cells))
    return rows


def _rate_need(nbytes: int | None, budget: int | None) -> str:
    if nbytes is None or budget is None:
        return "plain"
    return "over" if nbytes > budget else "tight" if nbytes > 0.9 * budget else "room"


def _read_sizes(planned: PlanResult) -> tuple[int, int]:
    work = planned.forecast.work
    if isinstance(work, ServingWorkload):
        return work.context, work.batch
    return (work.sequence, work.micro_batch) if work is not None else (0, 0)


def _describe_sizes(planned: PlanResult) -> str:
    served = isinstance(planned.forecast.work, ServingWorkload)
    return "sequences served at once" if served else "sequences of one forward pass"


def _list_next_steps(planned: PlanResult, command: Sequence[str]) -> list[tuple[str, str]]:
    """List what to do next, each with a command."""
    path = shlex.quote(planned.path)
    if planned.forecast.estimate.fits is False:
        tried = [(f"It fits with: {one.change}", one.options) for one in planned.counsel.advice if one.fits]
        if tried:
            return tried[:3]
        device = planned.forecast.device.name if planned.forecast.device is not None else "DEVICE"
        search = f"shardctl plan {path} --search --gpus N --gpu {shlex.quote(device)}"
        return [("Look for a mesh of more devices", search)]
    steps = []
    if planned.conversion is not None and command:
        steps.append(("Keep this plan in a file", f"{shlex.join(command)} --out plan.json"))
        steps.append(("Convert as it says", "shardctl reshard OUT --plan plan.json"))
        steps.append(("Prove it", f"shardctl verify OUT --level full --against {path}"))
    if planned.forecast.device is None:
        steps.append(("See whether it fits a device", f"shardctl plan {path} --gpu NAME"))
    elif planned.explored is None:
        steps.append(("Compare all meshes", f"shardctl plan {path} --search --gpus {planned.mesh.world} --gpu NAME"))
    return steps


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


def _list_cells(mesh: Mesh, estimate: MeshEstimate) -> list[tuple[int, str, int]]:
    """List number, label and bytes of each rank that is drawn."""
    needs = {build_holding_key(r.holding.coordinate): r.total().nbytes for r in estimate.ranks}
    ranks = range(min(mesh.world, _MAX_RANKS_DRAWN)) if mesh.world > 1 else ()
    coordinates = ((rank, mesh.coordinate(rank)) for rank in ranks)
    return [(rank, mesh.label(rank), needs[build_holding_key(at)]) for rank, at in coordinates]


def _describe_formula(term: MemoryTerm) -> str:
    given = ", ".join(f"{name} = {format_number(value)}" for name, value in term.inputs.items())
    return "; ".join(filter(None, (term.formula, given))) or "from headers"
