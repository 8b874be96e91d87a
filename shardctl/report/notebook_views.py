"""Renders results as HTML inside of a notebook: the page of a plan in a frame, what was inspected as a table."""

from __future__ import annotations

from html import escape
from typing import Final

from shardctl.planning.plan_result import PlanResult
from shardctl.report.inspection import list_inspection_facts
from shardctl.report.pages.plan_page import render_plan_page
from shardctl.report.visible import escape_control_characters
from shardctl.verbs.inspect import InspectResult

_HEIGHT: Final = 640
"""Pixels of the frame, which scrolls."""
_LEFT: Final = 'style="text-align:left"'


def render_notebook_view(result: object) -> str:
    """Render a plan or what was inspected; raises TypeError for anything else."""
    if isinstance(result, PlanResult):
        page = escape(render_plan_page(result, ()))
        title = escape(f"Plan of {escape_control_characters(result.path)}")
        style = f"width:100%;height:{_HEIGHT}px;border:0"
        return f'<iframe title="{title}" srcdoc="{page}" sandbox="" style="{style}"></iframe>'
    if isinstance(result, InspectResult):
        facts = list_inspection_facts(result)
        row = f'<tr><th scope="row" {_LEFT}>%s</th><td {_LEFT}>%s</td></tr>'
        rows = "".join(row % (_show(name), _show(fact)) for name, fact in facts)
        return f"<table><caption {_LEFT}>{_show(result.path)}</caption>{rows}</table>"
    raise TypeError(f"a {type(result).__name__} has no view in a notebook")


def _show(text: str) -> str:
    return escape(escape_control_characters(text))
