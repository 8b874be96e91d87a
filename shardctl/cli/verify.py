"""`shardctl verify`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from shardctl.cli import options, streams

EXAMPLES = """
Examples:
  shardctl verify ./llama-tp4
  shardctl verify ./llama-tp4 --level full --against ./llama
"""


def verify(
    src: options.Source,
    *,
    level: Annotated[
        Literal["quick", "full"], typer.Option(help="quick reads headers; full reads every element as well.")
    ] = "quick",
    against: Annotated[
        str | None,
        typer.Option(metavar="SRC", help="Compare every element with this checkpoint, in whatever layout it is."),
    ] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the outcome as JUnit XML.")] = None,
    summary: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the outcome as Markdown.")] = None,
    json: options.Json = False,
    threads: options.Threads = None,
    config: options.Config = None,
    rules: options.Rules = None,
    container: options.From = None,
    strict: options.Strict = False,
) -> int:
    """Prove a checkpoint: its structure, its content, and that it equals its source. Exit code 3 if it does not."""
    from shardctl.cli.progress import effort
    from shardctl.report import documents
    from shardctl.report import junit as junit_xml
    from shardctl.report import summary as markdown
    from shardctl.report.verification import verification
    from shardctl.verbs.verify import verify as verb

    with effort("verify", threads) as work:
        found = verb(
            src,
            level=level,
            against=against,
            reading=options.reading(config, rules, container, strict=strict),
            effort=work,
        )
    if junit:
        streams.save(junit, junit_xml.junit(found))
    if summary:
        streams.save(summary, markdown.summary(found).encode())
    if json:
        streams.document(documents.verified(found))
    else:
        streams.show(verification(found))
    return 0 if found.ok else 3
