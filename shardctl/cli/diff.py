"""Defines the command line of `shardctl diff`."""

from typing import Annotated

from shardctl.cli import arguments, streams
from shardctl.cli.signature import OmittedOptions
from shardctl.options import SourceOptions
from shardctl.options.declaration import CommandOption, HelpPanel
from shardctl.options.reshard_options import Threads

COMMON = ("--all", "--json")
"""What -h and --help show."""
PAGE = "docs/guide.md"
"""Where it is explained."""

EXAMPLES = """
Examples:
  shardctl diff ./llama ./llama-tp4
  shardctl diff ./step-1000 ./step-2000 --json
"""


def diff(
    a: Annotated[str, arguments.declare_place("A", "One checkpoint.")],
    b: Annotated[str, arguments.declare_place("B", "The other checkpoint.")],
    *,
    everything: Annotated[
        bool,
        CommandOption(
            HelpPanel.GENERAL,
            "Print every difference, not only the first 20.",
            brief="Print every difference, not only the first 20",
            flag="--all",
        ),
    ] = False,
    json: arguments.Json = False,
    threads: Threads = None,
    source_options: Annotated[SourceOptions, OmittedOptions({"container", "rules_from", "kv_heads"})],
) -> int:
    """List the tensors, settings and side files that differ between two checkpoints. Exits with 3 if any do."""
    from shardctl.cli.progress import watch_effort
    from shardctl.report import documents
    from shardctl.report.difference import render_difference
    from shardctl.verbs.diff import diff as verb

    with watch_effort("diff", threads) as work:
        found = verb(a, b, source_options_a=source_options, source_options_b=source_options, effort=work)
    streams.print_warnings(found.warnings)
    if json:
        streams.print_document(documents.build_diff_document(found))
    else:
        streams.print_view(render_difference(found, everything=everything))
    return 0 if found.equal_all else 3
