"""Defines the command line of `shardctl verify`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from shardctl.base.errors import ShardctlError, UsageError
from shardctl.cli import arguments, streams
from shardctl.cli.command_line import recall_command
from shardctl.options import SourceOptions, VerifyOptions
from shardctl.options.declaration import CommandOption, HelpPanel
from shardctl.options.reshard_options import Threads

if TYPE_CHECKING:
    from shardctl.verify.level import VerifyResult

COMMON = (
    "--level", "--against", "--for", "--load", "--forward", "--text", "--write-golden", "--golden", "--engine",
    "--attestation", "--policy", "--mesh", "--require", "--strict", "--junit", "--summary",
    "--newest-good", "--threads", "--json",
)  # fmt: skip
"""What -h and --help show."""
PAGE = "docs/verifying.md"
"""Where it is explained."""

EXAMPLES = """
Examples:
  shardctl verify ./llama-tp4 --level full --against ./llama
  shardctl verify ./llama-tp4 --forward --against ./llama
  shardctl verify ./llama --for vllm
"""


def verify(
    src: arguments.Source,
    *,
    newest_good: Annotated[
        bool,
        CommandOption(
            HelpPanel.GENERAL,
            "SRC is a run: print the name of its newest checkpoint that is whole, and exit with 3 if none is.",
            brief="Print the newest complete checkpoint of a run",
        ),
    ] = False,
    verify_options: VerifyOptions,
    junit: Annotated[
        Path | None, arguments.declare_report("Write the result as JUnit XML.", brief="Write the result as JUnit XML")
    ] = None,
    summary: Annotated[
        Path | None, arguments.declare_report("Write the result as Markdown.", brief="Write the result as Markdown")
    ] = None,
    report: arguments.Page = None,
    json: arguments.Json = False,
    threads: Threads = None,
    source_options: arguments.StoredSource,
) -> int:
    """Check that a checkpoint is complete, equals its source, loads and computes. Exits with 3 if not."""
    if newest_good:
        if junit or summary or report:
            hint = "leave --junit, --summary and --report out, or use --json"
            raise UsageError("--newest-good has no report", hint=hint)
        return _find_newest(src, verify_options, source_options, threads, json=json)
    from shardctl.cli.progress import watch_effort
    from shardctl.report import documents
    from shardctl.report.failure import describe_failure
    from shardctl.report.verification import render_verification
    from shardctl.verbs.verify import verify as verb

    for old in filter(None, (junit, summary, report)):
        if old.is_file() and not old.is_symlink():
            old.unlink()
    try:
        with watch_effort("verify", threads) as work:
            found = verb(src, verify_options, source_options=source_options, effort=work)
    except (ShardctlError, MemoryError) as error:
        failed = describe_failure(error)
        text = f"{failed.message}; {failed.hint}" if getattr(error, "hint", None) else failed.message
        _write_reports(_build_unread_result(src, text), junit, summary, report)
        raise
    _write_reports(found, junit, summary, report)
    if json:
        streams.print_document(documents.build_verify_document(found))
    else:
        streams.print_view(render_verification(found))
    if found.trouble is not None:
        streams.print_message(describe_failure(found.trouble).lines())
    return found.exit_code


def _build_unread_result(src: str, error: str) -> "VerifyResult":
    from shardctl.report.visible import hide_passwords
    from shardctl.verify.level import VerifyResult

    return VerifyResult(hide_passwords(src), "", "", (), error=error)


def _write_reports(found: "VerifyResult", junit: Path | None, summary: Path | None, report: Path | None) -> None:
    if junit:
        from shardctl.report.junit import build_junit_report

        streams.write_report(junit, build_junit_report(found))
    if summary:
        from shardctl.report.summary import format_summary

        streams.write_report(summary, format_summary(found))
    if report:
        from shardctl.report.pages.verify_page import render_verify_page

        streams.write_report(report, render_verify_page(found, recall_command()))
    if os.environ.get("GITHUB_ACTIONS"):
        from shardctl.report.annotations import format_github_annotations

        streams.print_annotations(format_github_annotations(found))


def _find_newest(
    run: str, verify_options: VerifyOptions, source_options: SourceOptions, threads: int | None, *, json: bool
) -> int:
    from shardctl.cli.progress import watch_effort
    from shardctl.report.several import build_newest_document
    from shardctl.verbs.find_newest import find_newest as verb

    with watch_effort("verify", threads) as work:
        found = verb(run, verify_options, source_options=source_options, effort=work)
    streams.print_warnings(f"{each.name} is passed over: {each.reasons[0]}" for each in found.passed)
    if json:
        streams.print_document(build_newest_document(found))
    elif found.name:
        streams.print_text(f"{found.name}\n")
    return 0 if found.name else 3
