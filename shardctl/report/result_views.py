"""Renders results outside of the command line: as its text, as its JSON, and as HTML inside of a notebook."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console, RenderableType

from shardctl.base.result_view import ResultView
from shardctl.conversion.engine_sums import EngineSums
from shardctl.conversion.worker_part import ContributeResult
from shardctl.models.derived import format_rule_file
from shardctl.planning.plan_result import PlanResult
from shardctl.report import documents
from shardctl.report.conversion import render_contribution, render_conversion, render_finished
from shardctl.report.difference import render_difference
from shardctl.report.digests import render_attestation, render_digests, render_engine_sums
from shardctl.report.inspection import list_inspection_facts, render_inspection
from shardctl.report.plan_document import build_plan_document, build_rehearsal_document
from shardctl.report.planning import render_plan, render_rehearsal
from shardctl.report.verification import render_verification
from shardctl.report.visible import escape_control_characters
from shardctl.verbs.attest import AttestResult
from shardctl.verbs.diff import DiffResult
from shardctl.verbs.digest import DigestResult
from shardctl.verbs.dry_run import RehearsalResult
from shardctl.verbs.finish import FinishResult
from shardctl.verbs.inspect import InspectResult
from shardctl.verbs.reshard import ReshardResult
from shardctl.verify.level import VerifyResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardctl.report.documents import Document

_FRAME_HEIGHT_PIXELS: Final = 640
"""Pixels of the frame, which scrolls."""
_LEFT_ALIGN_STYLE: Final = 'style="text-align:left"'
_CONSOLE_WIDTH_COLUMNS: Final = 1 << 20
"""Columns that views are laid out on: their lines are as long as they are."""


def _render_inspect_text(found: InspectResult) -> RenderableType:
    """Render what `inspect` prints: derived rules are a rule file."""
    if found.derivation is not None and not found.show_tensors:
        return format_rule_file(found.derivation)
    return render_inspection(found, tensors=found.show_tensors, rules=found.show_rules)


_TEXT_RENDERERS: Final[dict[type, Callable[[Any], RenderableType]]] = {
    PlanResult: lambda planned: render_plan(planned, planned.detail),
    RehearsalResult: lambda rehearsed: render_rehearsal(rehearsed.plan, rehearsed.destination),
    ReshardResult: lambda done: render_conversion(done, done.seconds),
    ContributeResult: lambda done: render_contribution(done, done.seconds),
    FinishResult: lambda done: render_finished(done, done.seconds),
    VerifyResult: render_verification,
    InspectResult: _render_inspect_text,
    DiffResult: lambda found: render_difference(found, everything=found.show_all),
    DigestResult: lambda found: render_digests(found, tensors=found.show_tensors, expected=found.expected),
    EngineSums: render_engine_sums,
    AttestResult: render_attestation,
}
"""What the command of each result prints."""
_DOCUMENT_BUILDERS: Final[dict[type, Callable[[Any], Document]]] = {
    PlanResult: build_plan_document,
    RehearsalResult: lambda rehearsed: build_rehearsal_document(rehearsed.plan, rehearsed.destination),
    ReshardResult: lambda done: documents.build_reshard_document(done, done.seconds),
    ContributeResult: lambda done: documents.build_contribution_document(done, done.seconds),
    FinishResult: lambda done: documents.build_finish_document(done, done.seconds),
    VerifyResult: documents.build_verify_document,
    InspectResult: lambda found: documents.build_inspect_document(
        found, tensors=found.show_tensors, rules=found.show_rules
    ),
    DiffResult: documents.build_diff_document,
    DigestResult: lambda found: documents.build_digest_document(
        found, tensors=found.show_tensors, expected=found.expected
    ),
    EngineSums: lambda found: documents.build_engine_sums_document(found.path, found),
    AttestResult: documents.build_attest_document,
}
"""What the command of each result prints with `--json`."""


def render_result_text(result: object) -> str:
    """Render the text that the command of a result prints, without colours and the end of the last line."""
    view = _TEXT_RENDERERS[type(result)](result)
    if isinstance(view, str):
        return view.rstrip("\n")
    console = Console(width=_CONSOLE_WIDTH_COLUMNS, color_system=None, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(view)
    return "\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n"))


def build_result_document(result: object) -> Document:
    """Build the document that the command of a result prints with `--json`."""
    return _DOCUMENT_BUILDERS[type(result)](result)


def render_notebook_view(result: object) -> str:
    """Render a result as HTML: a plan's page in a frame, what was inspected as a table, others as their text."""
    if isinstance(result, PlanResult):
        from shardctl.report.pages.plan_page import render_plan_page

        page = escape(render_plan_page(result, ()))
        title = escape(f"Plan of {escape_control_characters(result.path)}")
        style = f"width:100%;height:{_FRAME_HEIGHT_PIXELS}px;border:0"
        return f'<iframe title="{title}" srcdoc="{page}" sandbox="" style="{style}"></iframe>'
    if isinstance(result, InspectResult):
        facts = list_inspection_facts(result)
        row = f'<tr><th scope="row" {_LEFT_ALIGN_STYLE}>%s</th><td {_LEFT_ALIGN_STYLE}>%s</td></tr>'
        rows = "".join(row % (_show(name), _show(fact)) for name, fact in facts)
        return f"<table><caption {_LEFT_ALIGN_STYLE}>{_show(result.path)}</caption>{rows}</table>"
    if isinstance(result, ResultView):
        lines = str(result).split("\n")
        return f"<pre>{'&#10;'.join(map(_show, lines))}</pre>"
    raise TypeError(f"a {type(result).__name__} has no view in a notebook")


def _show(text: str) -> str:
    return escape(escape_control_characters(text))
