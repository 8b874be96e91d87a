"""`shardctl digest`."""

from typing import Annotated

import typer

from shardctl.cli import options, streams

EXAMPLES = """
Examples:
  shardctl digest ./llama
  shardctl digest ./llama-tp4 --tensors
"""


def digest(
    src: options.Source,
    *,
    tensors: Annotated[
        bool, typer.Option("--tensors", metavar="", help="Print the digest of every tensor as well.")
    ] = False,
    json: options.Json = False,
    threads: options.Threads = None,
    config: options.Config = None,
    rules: options.Rules = None,
    container: options.From = None,
    weights: options.Weights = None,
    true_vocab: options.TrueVocab = None,
    prefer_index: options.PreferIndex = False,
    strict: options.Strict = False,
) -> None:
    """Print the digest of a checkpoint's elements: the same for every layout of the same tensors."""
    from shardctl.cli.progress import effort
    from shardctl.report import documents
    from shardctl.report.digests import digests
    from shardctl.verbs.digest import digest as verb

    with effort("digest", threads) as work:
        found = verb(
            src,
            reading=options.reading(
                config,
                rules,
                container,
                weights=weights,
                true_vocab=true_vocab,
                prefer_index=prefer_index,
                strict=strict,
            ),
            effort=work,
        )
    streams.warn(found.warnings)
    if json:
        streams.document(documents.digested(found, tensors=tensors))
    else:
        streams.show(digests(found, tensors=tensors))
