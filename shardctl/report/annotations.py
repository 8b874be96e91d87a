"""Renders the findings of `verify` as annotations of a GitHub workflow.

GitHub shows at most ten errors and ten warnings of a step, and drops the rest
(docs.github.com/en/actions, "Workflow commands" and "Limitations of annotations").
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.report.visible import escape_ci_commands, escape_control_characters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.verify.finding import CheckFinding
    from shardctl.verify.level import VerifyResult

MOST: Final = 10


def format_github_annotations(verified: VerifyResult) -> str:
    """Format at most ten lines, errors first; the last of ten says how many more there are."""
    lines = list(_list_lines(verified))
    if len(lines) > MOST:
        rest = len(lines) - MOST + 1
        said = f"{verified.verdict}; {rest:,} more findings"
        lines[MOST - 1 :] = [_format_command("error", verified.path, "shardctl verify", said)]
    return "".join(f"{line}\n" for line in lines)


def _list_lines(verified: VerifyResult) -> Iterator[str]:
    if verified.error:
        yield _format_command("error", verified.path, "shardctl verify", verified.error)
    for level in verified.unfinished:
        yield _format_command("error", verified.path, f"shardctl {level.name}", level.reason)
    for level in verified.unmet:
        message = f"{level.name} is required and was skipped: {level.reason}"
        yield _format_command("error", verified.path, f"shardctl {level.name}", message)
    for finding in verified.findings:
        yield _format_command(
            finding.severity, _join_path(verified.path, finding), f"shardctl {finding.check}", finding.message
        )


def _join_path(checkpoint: str, finding: CheckFinding) -> str:
    return f"{checkpoint.rstrip('/')}/{finding.file}" if finding.file else checkpoint


def _format_command(kind: str, file: str, title: str, message: str) -> str:
    return (
        f"::{kind} "
        f"file={_escape_property(file)},title={_escape_property(title)}::{_escape_data(escape_control_characters(message))}"
    )


def _escape_data(text: str) -> str:
    return escape_ci_commands(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape_data(escape_control_characters(text)).replace(":", "%3A").replace(",", "%2C")
