"""Defines the command line of `shardctl schema`."""

import json
from typing import Annotated, Final, Literal, get_args

import typer

from shardctl.cli import streams

EXAMPLES = """
Examples:
  shardctl schema verify
  shardctl schema plan > plan.schema.json
"""


SchemaVerb = Literal["plan", "reshard", "finish", "verify", "attest", "inspect", "diff", "digest", "settings"]
SCHEMA_VERBS: Final[tuple[str, ...]] = get_args(SchemaVerb)
"""Verbs whose documents have a schema."""


def schema(
    verb: Annotated[
        SchemaVerb,
        typer.Argument(metavar="VERB", show_default=False, help="The verb whose documents it describes."),
    ],
) -> None:
    """Print the JSON Schema of what a verb prints with --json."""
    from shardctl.report.schemas import build_schema

    streams.print_text(json.dumps(build_schema(verb), indent=2) + "\n")
