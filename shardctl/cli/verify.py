"""Defines the command line of `shardctl verify`."""

import os
from pathlib import Path
from typing import Annotated

from shardctl.cli import arguments, streams
from shardctl.options import VerifyOptions
from shardctl.options.reshard_options import Threads

EXAMPLES = """
Examples:
  shardctl verify ./llama-tp4 --level full --against ./llama
  shardctl verify ./llama-tp4 --forward --against ./llama
"""


def verify(
    src: arguments.Source,
    *,
    verify_options: VerifyOptions,
    junit: Annotated[Path | None, arguments.declare_report("Write the result as JUnit XML.")] = None,
    summary: Annotated[Path | None, arguments.declare_report("Write the result as Markdown.")] = None,
    json: arguments.Json = False,
    threads: Threads = None,
    source_options: arguments.StoredSource,
) -> int:
    """Check that a checkpoint is complete, equals its source, loads and computes. Exits with 3 if not."""
    from shardctl.cli.progress import watch_effort
    from shardctl.report import documents
    from shardctl.report import junit as junit_xml
    from shardctl.report import summary as markdown
    from shardctl.report.annotations import format_github_annotations
    from shardctl.report.verification import render_verification
    from shardctl.verbs.verify import verify as verb

    with watch_effort("verify", threads) as work:
        found = verb(src, verify_options, source_options=source_options, effort=work)
    if junit:
        streams.write_report(junit, junit_xml.build_junit_report(found))
    if summary:
        streams.write_report(summary, markdown.format_summary(found))
    if json:
        streams.print_document(documents.build_verify_document(found))
    else:
        streams.print_view(render_verification(found))
    if os.environ.get("GITHUB_ACTIONS"):
        streams.print_message(format_github_annotations(found))
    return 0 if found.ok else 3
