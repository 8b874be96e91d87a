"""Defines the command line of `shardctl inspect`."""

from typing import Annotated

from shardctl.cli import arguments, streams
from shardctl.cli.command_line import recall_command
from shardctl.cli.signature import OmittedOptions
from shardctl.options import InspectOptions, SourceOptions
from shardctl.options.declaration import CommandOption, HelpPanel

COMMON = ("--tensors", "--show-rules", "--stats", "--report", "--json", "--from", "--config", "--rules")
"""What -h and --help show."""
PAGE = "docs/guide.md"
"""Where it is explained."""

EXAMPLES = """
Examples:
  shardctl inspect ./llama
  shardctl inspect ./model.safetensors --tensors --json
  shardctl inspect ./llama --stats --memory 256MiB --report llama.html
"""


def inspect(
    src: arguments.Source,
    *,
    tensors: Annotated[bool, CommandOption(HelpPanel.GENERAL, "List every tensor.", brief="List every tensor")] = False,
    inspect_options: InspectOptions,
    json: arguments.Json = False,
    report: arguments.Page = None,
    source_options: Annotated[SourceOptions, OmittedOptions({"kv_heads"})],
) -> None:
    """Show the format, layout, model, types and ties of a checkpoint. Reads headers only, unless --stats is given."""
    from shardctl.report import documents
    from shardctl.report.inspection import render_inspection
    from shardctl.verbs.inspect import inspect as verb

    rules = inspect_options.show_rules
    if inspect_options.stats:
        from shardctl.cli.progress import watch_effort

        with watch_effort("inspect", inspect_options.threads) as work:
            found = verb(src, inspect_options, source_options=source_options, effort=work)
    else:
        found = verb(src, inspect_options, source_options=source_options)
    streams.print_warnings(found.warnings)
    if report:
        from shardctl.report.pages.inspect_page import render_inspect_page

        streams.write_report(report, render_inspect_page(found, recall_command()))
    if json:
        streams.print_document(documents.build_inspect_document(found, tensors=tensors, rules=rules))
    elif found.derivation is not None and not tensors and found.statistics is None:
        from shardctl.models.derived import format_rule_file

        streams.print_text(format_rule_file(found.derivation))
    else:
        streams.print_view(render_inspection(found, tensors=tensors, rules=rules))
