"""`shardctl inspect`."""

from typing import Annotated

import typer

from shardctl.cli import arguments, streams
from shardctl.cli.signature import OmittedOptions
from shardctl.options import SourceOptions

EXAMPLES = """
Examples:
  shardctl inspect ./llama
  shardctl inspect ./model.safetensors --tensors --json
"""


def inspect(
    src: arguments.Source,
    *,
    tensors: Annotated[bool, typer.Option("--tensors", metavar="", help="List every tensor.")] = False,
    show_rules: Annotated[bool, typer.Option("--show-rules", metavar="", help="List the rules in force.")] = False,
    json: arguments.Json = False,
    reading: Annotated[SourceOptions, OmittedOptions({"kv_heads"})],
) -> None:
    """Say what a checkpoint is: format, layout, model, types, ties; from its headers only."""
    from shardctl.report import documents
    from shardctl.report.inspection import render_inspection
    from shardctl.verbs.inspect import inspect as verb

    found = verb(src, reading=reading)
    streams.print_warnings(found.warnings)
    if json:
        streams.print_document(documents.build_inspect_document(found, tensors=tensors, rules=show_rules))
    else:
        streams.print_view(render_inspection(found, tensors=tensors, rules=show_rules))
