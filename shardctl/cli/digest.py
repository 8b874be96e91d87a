"""Defines the command line of `shardctl digest`."""

from typing import Annotated

from shardctl.cli import arguments, streams
from shardctl.options.declaration import CommandOption, HelpPanel
from shardctl.options.reshard_options import Threads

EXAMPLES = """
Examples:
  shardctl digest ./llama
  shardctl digest ./llama-tp4 --tensors
"""


def digest(
    src: arguments.Source,
    *,
    tensors: Annotated[bool, CommandOption(HelpPanel.GENERAL, "Print the digest of every tensor as well.")] = False,
    json: arguments.Json = False,
    threads: Threads = None,
    source_options: arguments.StoredSource,
) -> None:
    """Print the digest of a checkpoint, which is the same for every layout of the same tensors."""
    from shardctl.cli.progress import watch_effort
    from shardctl.report import documents
    from shardctl.report.digests import render_digests
    from shardctl.verbs.digest import digest as verb

    with watch_effort("digest", threads) as work:
        found = verb(src, source_options=source_options, effort=work)
    streams.print_warnings((*found.warnings, *found.unverified))
    if json:
        streams.print_document(documents.build_digest_document(found, tensors=tensors))
    else:
        streams.print_view(render_digests(found, tensors=tensors))
