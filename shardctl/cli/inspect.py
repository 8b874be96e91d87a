"""`shardctl inspect`."""

from typing import Annotated

import typer

from shardctl.cli import options, streams

EXAMPLES = """
Examples:
  shardctl inspect ./llama
  shardctl inspect ./model.safetensors --tensors --json
"""


def inspect(
    src: options.Source,
    *,
    tensors: Annotated[bool, typer.Option("--tensors", metavar="", help="List every tensor.")] = False,
    show_rules: Annotated[bool, typer.Option("--show-rules", metavar="", help="List the rules in force.")] = False,
    json: options.Json = False,
    config: options.Config = None,
    rules: options.Rules = None,
    rules_from: options.RulesFrom = None,
    container: options.From = None,
    weights: options.Weights = None,
    true_vocab: options.TrueVocab = None,
    prefer_index: options.PreferIndex = False,
    strict: options.Strict = False,
) -> None:
    """Say what a checkpoint is: format, layout, model, types, ties; from its headers only."""
    from shardctl.report import documents
    from shardctl.report.inspection import inspection
    from shardctl.verbs.inspect import inspect as verb

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
            rules_from=rules_from,
        ),
    )
    streams.warn(found.warnings)
    if json:
        streams.document(documents.inspected(found, tensors=tensors, rules=show_rules))
    else:
        streams.show(inspection(found, tensors=tensors, rules=show_rules))
