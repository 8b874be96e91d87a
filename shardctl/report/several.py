"""Renders what became of several checkpoints: of each, and of all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardctl.base.amounts import format_plural
from shardctl.report.documents import build_document_head, format_schema_name
from shardctl.report.failure import describe_failure
from shardctl.report.grid import render_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shardctl.verbs.find_newest import NewestCheckpoint
    from shardctl.verbs.reshard_each import EachOutcome, ReshardEachResult


def render_outcome(outcome: EachOutcome) -> RenderableType:
    """Render a line of one checkpoint: what became of it, and its digest or why it failed."""
    if outcome.error is not None:
        failure = describe_failure(outcome.error)
        return render_line(f"failed     {outcome.source}: {failure.message} ({failure.hint})", "red")
    told = outcome.result.record.digest if outcome.result is not None else "an earlier run had converted it"
    return render_line(f"{outcome.status:<9}  {outcome.destination}  {told}")


def render_each(done: ReshardEachResult) -> RenderableType:
    """Render how many were converted, kept and failed."""
    counts = _count_outcomes(done)
    parts = [f"{count} {status}" for status, count in counts.items() if count]
    return render_line(
        f"{format_plural(len(done.outcomes) + len(done.untried), 'checkpoint')}: {', '.join(parts)}",
        "bold red" if done.exit_code else "bold green",
    )


def build_outcome_document(outcome: EachOutcome) -> dict[str, Any]:
    """Build what became of one checkpoint; a record that is not the last."""
    record = outcome.result.record if outcome.result is not None else None
    failure = describe_failure(outcome.error) if outcome.error is not None else None
    return {
        "schema": format_schema_name("reshard"),
        "status": outcome.status,
        "source": str(outcome.source),
        "destination": str(outcome.destination),
        "digest": record.digest if record is not None else None,
        "warnings": list(outcome.result.warnings) if outcome.result is not None else [],
        "error": failure.message if failure is not None else None,
        "hint": failure.hint if failure is not None else None,
    }


def build_each_document(done: ReshardEachResult) -> dict[str, Any]:
    """Build what became of all checkpoints; the last record."""
    return build_document_head("reshard") | {
        "status": "ok" if done.exit_code == 0 else "error",
        "exit_code": done.exit_code,
        **_count_outcomes(done),
        "each": [build_outcome_document(each) for each in done.outcomes],
        "not_tried": list(map(str, done.untried)),
    }


def build_newest_document(found: NewestCheckpoint) -> dict[str, Any]:
    """Build which checkpoint of a run is the newest that is whole, and why newer ones are not."""
    return build_document_head("verify", answer=bool(found.name)) | {
        "path": found.path,
        "newest": found.name or None,
        "order": found.order,
        "passed_over": [{"name": each.name, "reasons": list(each.reasons)} for each in found.passed],
    }


def _count_outcomes(done: ReshardEachResult) -> dict[str, int]:
    counts = dict.fromkeys(("converted", "kept", "failed"), 0)
    for each in done.outcomes:
        counts[each.status] += 1
    return {**counts, "untried": len(done.untried)}
