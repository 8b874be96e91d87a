"""Renders the result of `verify` as Markdown for a job's summary page."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.base.amounts import format_duration, format_file_size, format_rate
from shardctl.report.verification import (
    RANKS,
    SHOWN,
    build_engine_rows,
    build_forward_rows,
    build_loaded_row,
)
from shardctl.report.visible import escape_control_characters

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardctl.verify.level import LevelResult, VerifyResult

_MARKDOWN_SPECIAL_PATTERN: Final = re.compile(r"([\\`*_\[\]<>|#&])")


def format_summary(verified: VerifyResult) -> str:
    """Format the verdict, a table of levels, and a table of findings."""
    return "".join(f"{line}\n" for line in _list_lines(verified))


def _list_lines(verified: VerifyResult) -> Iterator[str]:
    yield f"### shardctl verify: {_escape_markdown(verified.verdict)}"
    yield ""
    yield f"Checkpoint: {_escape_markdown(verified.path)}" + (
        f", against {_escape_markdown(verified.against)}" if verified.against else ""
    )
    yield ""
    if verified.error:
        yield f"Error: {_escape_markdown(verified.error)}"
        return
    yield from _list_table_lines(
        ("level", "status", "tensors", "read", "time", "rate"),
        (
            (
                level.name,
                f"{level.status}: {level.reason}" if level.reason else level.status,
                f"{level.tensors:,}",
                format_file_size(level.nbytes),
                format_duration(level.seconds),
                format_rate(level.nbytes, level.seconds),
            )
            for level in verified.levels
        ),
    )
    for level in verified.levels:
        yield from _list_details(level)
    for text in verified.unchecked:
        yield ""
        yield f"Not checked: {_escape_markdown(text)}"
    findings = verified.findings
    if findings:
        yield ""
        rows = ((f.severity, f.check, f.message, f.file, f.tensor, f.box) for f in findings[:SHOWN])
        yield from _list_table_lines(("severity", "check", "what", "file", "tensor", "box"), rows)
    if len(findings) > SHOWN:
        yield ""
        yield f"And {len(findings) - SHOWN:,} more findings."
    if verified.digest:
        yield ""
        yield f"Digest: `{verified.digest}`"


def _list_details(level: LevelResult) -> Iterator[str]:
    """List what a level says besides its outcome."""
    if level.ranks:
        yield ""
        head = ("rank", "device", "read", "rate", "peak", "plan")
        yield from _list_table_lines(head, (build_loaded_row(loaded) for loaded in level.ranks[:RANKS]))
        if len(level.ranks) > RANKS:
            yield ""
            yield f"And {len(level.ranks) - RANKS:,} more ranks."
    forward = build_forward_rows(level.forward) if level.forward is not None else []
    engine = build_engine_rows(level.engine) if level.engine is not None else []
    for name, table in (("forward", forward), ("engine", engine)):
        if table:
            yield ""
            yield from _list_table_lines((name, ""), table)
    for line in level.describe_reading():
        yield ""
        yield f"Content {_escape_markdown(line)}"
    for note in level.notes:
        yield ""
        yield f"Note: {level.name}: {_escape_markdown(note)}"


def _list_table_lines(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    titles = list(head)
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for row in rows:
        yield f"| {' | '.join(_escape_markdown(cell) for cell in row)} |"


def _escape_markdown(text: str) -> str:
    return _MARKDOWN_SPECIAL_PATTERN.sub(r"\\\1", escape_control_characters(text))
