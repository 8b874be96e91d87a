"""Defines the command line of `shardctl diff`."""

from typing import Annotated

from shardctl.cli import arguments, streams
from shardctl.cli.signature import OmittedOptions
from shardctl.options import SourceOptions
from shardctl.options.declaration import CommandOption, HelpPanel, PathAccess
from shardctl.options.reshard_options import Threads

COMMON = ("--write", "--all", "--json")
"""What -h and --help show."""
PAGE = "docs/guide.md"
"""Where it is explained."""

EXAMPLES = """
Examples:
  shardctl diff ./llama ./llama-tp4
  shardctl diff ./step-1000 ./step-2000 --json
  shardctl diff ./step-1000 ./step-2000 --write ./weight_v000001
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
    write: Annotated[
        str | None,
        CommandOption(
            HelpPanel.WRITING,
            "Write the weight delta from A to B, which SGLang and --apply read, to this new directory.",
            brief="Write the weight delta from A to B there",
            metavar="DELTA",
            access=PathAccess.REPLACED,
        ),
    ] = None,
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
        found = verb(a, b, source_options_a=source_options, source_options_b=source_options, effort=work, write=write)
    streams.print_warnings(found.warnings)
    if json:
        streams.print_document(documents.build_diff_document(found))
    else:
        streams.print_view(render_difference(found, everything=everything))
    return 0 if found.equal_all or found.delta is not None else 3
