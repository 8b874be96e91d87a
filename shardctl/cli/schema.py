"""Defines the command line of `shardctl schema`."""

import json
from typing import Annotated, Literal

import typer

from shardctl.cli import streams

EXAMPLES = """
Examples:
  shardctl schema verify
  shardctl schema plan > plan.schema.json
"""


def schema(
    verb: Annotated[
        Literal["plan", "reshard", "finish", "verify", "attest", "inspect", "diff", "digest", "settings"],
        typer.Argument(metavar="VERB", show_default=False, help="The verb whose documents it describes."),
    ],
) -> None:
    """Print the JSON Schema of what a verb prints with --json."""
    from shardctl.report.schemas import build_schema

    streams.print_text(json.dumps(build_schema(verb), indent=2) + "\n")
