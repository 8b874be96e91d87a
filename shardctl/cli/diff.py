"""`shardctl diff`."""

from typing import Annotated

import typer

from shardctl.cli import options, streams

EXAMPLES = """
Examples:
  shardctl diff ./llama ./llama-tp4
  shardctl diff ./step-1000 ./step-2000 --json
"""


def diff(
    a: Annotated[str, typer.Argument(metavar="A", parser=options.place, show_default=False, help="A checkpoint.")],
    b: Annotated[str, typer.Argument(metavar="B", parser=options.place, show_default=False, help="Another.")],
    *,
    json: options.Json = False,
    threads: options.Threads = None,
    config: options.Config = None,
    rules: options.Rules = None,
    weights: options.Weights = None,
    true_vocab: options.TrueVocab = None,
    prefer_index: options.PreferIndex = False,
    strict: options.Strict = False,
) -> int:
    """Say which tensors of two checkpoints differ, in whatever layouts the two are. Exit code 3 if any does."""
    from shardctl.cli.progress import effort
    from shardctl.report import documents
    from shardctl.report.difference import difference
    from shardctl.verbs.diff import diff as verb

    reading = options.reading(
        config, rules, strict=strict, weights=weights, true_vocab=true_vocab, prefer_index=prefer_index
    )
    with effort("diff", threads) as work:
        found = verb(a, b, reading_a=reading, reading_b=reading, effort=work)
    streams.warn(found.warnings)
    if json:
        streams.document(documents.diffed(found))
    else:
        streams.show(difference(found))
    return 3 if found.changes else 0
