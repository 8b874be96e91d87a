"""Shows what `reshard` did as a page: what was written, what went where, and what was left behind."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from shardctl.base.amounts import format_file_size
from shardctl.conversion.file_flows import count_file_flows
from shardctl.report.conversion import list_conversion_facts
from shardctl.report.pages.amounts_picture import NamedAmount, draw_amounts
from shardctl.report.pages.flow import draw_flows
from shardctl.report.pages.page import render_page

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardctl.verbs.reshard import ReshardResult


def render_reshard_page(done: ReshardResult, source: str, seconds: float, command: Sequence[str]) -> str:
    """Return the whole page as HTML; `command` made it."""
    flows = count_file_flows(done.copy_plan) if done.copy_plan is not None else None
    files = [NamedAmount(name, size, format_file_size(size)) for name, size in done.record.files.items()]
    into = shlex.quote(str(done.destination))
    facts = {
        "title": f"{source} to {done.destination}",
        "source": source,
        "done": done,
        "facts": list(list_conversion_facts(done, seconds)),
        "flows": draw_flows(flows) if flows else None,
        "files": draw_amounts(sorted(files, key=lambda one: -one.amount), label="the files of the result"),
        "further": [("Prove it", f"shardctl verify {into} --level full --against {shlex.quote(source)}")],
    }
    return render_page("reshard.html.jinja", facts, command)
