"""`shardctl digest`."""

from typing import Annotated

import typer

from shardctl.cli import arguments, streams
from shardctl.options.reshard_options import Threads

EXAMPLES = """
Examples:
  shardctl digest ./llama
  shardctl digest ./llama-tp4 --tensors
"""


def digest(
    src: arguments.Source,
    *,
    tensors: Annotated[
        bool, typer.Option("--tensors", metavar="", help="Print the digest of every tensor as well.")
    ] = False,
    json: arguments.Json = False,
    threads: Threads = None,
    reading: arguments.StoredSource,
) -> None:
    """Print the digest of a checkpoint's elements: the same for every layout of the same tensors."""
    from shardctl.cli.progress import effort
    from shardctl.report import documents
    from shardctl.report.digests import digests
    from shardctl.verbs.digest import digest as verb

    with effort("digest", threads) as work:
        found = verb(src, reading=reading, effort=work)
    streams.warn((*found.warnings, *found.unverified))
    if json:
        streams.document(documents.digested(found, tensors=tensors))
    else:
        streams.show(digests(found, tensors=tensors))
