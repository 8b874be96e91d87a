"""`shardctl verify`."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from shardctl.cli import options, streams
from shardctl.cli.sizes import parse_size

EXAMPLES = """
Examples:
  shardctl verify ./llama-tp4 --level full --against ./llama
  shardctl verify ./llama-tp4 --forward --against ./llama
"""
_DEVICES = "On devices"
_REPORTS = "Reports"
LevelName = Literal["quick", "full", "load", "forward"]


def verify(
    src: options.Source,
    *,
    level: Annotated[
        LevelName,
        typer.Option(help="Headers; every element too; loaded onto devices too; the model run too."),
    ] = "quick",
    against: Annotated[
        str | None,
        typer.Option(metavar="SRC", help="Compare every element with this checkpoint, in whatever layout it is."),
    ] = None,
    require: Annotated[
        LevelName | None,
        typer.Option(help="Run this level too, and exit with 3 if it has to be skipped."),
    ] = None,
    load: Annotated[
        Literal["cpu", "cuda", "auto"] | None,
        typer.Option(rich_help_panel=_DEVICES, help="Load every rank there: --level load."),
    ] = None,
    device_memory: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE", parser=parse_size, rich_help_panel=_DEVICES, help="What a rank may take of its device."
        ),
    ] = None,
    forward: Annotated[
        bool, typer.Option("--forward", metavar="", rich_help_panel=_DEVICES, help="Run the model: --level forward.")
    ] = False,
    dtype: Annotated[
        Literal["fp32", "bf16"], typer.Option(rich_help_panel=_DEVICES, help="What the model computes in.")
    ] = "fp32",
    prompt: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", rich_help_panel=_DEVICES, help="Show how source and shards continue it: --level forward."
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(metavar="N", min=1, rich_help_panel=_DEVICES, help="How many tokens of it.")
    ] = 16,
    processes: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, rich_help_panel=_DEVICES, help="At most so many processes, one a rank."),
    ] = None,
    virtual: Annotated[
        bool, typer.Option("--virtual", metavar="", rich_help_panel=_DEVICES, help="All ranks in one process.")
    ] = False,
    second_opinion: Annotated[
        bool,
        typer.Option(
            "--second-opinion", metavar="", rich_help_panel=_DEVICES, help="Ask transformers' tensor parallelism too."
        ),
    ] = False,
    junit: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=options.written_file,
            rich_help_panel=_REPORTS,
            help="Write the outcome as JUnit XML.",
        ),
    ] = None,
    summary: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", parser=options.written_file, rich_help_panel=_REPORTS, help="Write the outcome as Markdown."
        ),
    ] = None,
    json: options.Json = False,
    threads: options.Threads = None,
    config: options.Config = None,
    rules: options.Rules = None,
    container: options.From = None,
    weights: options.Weights = None,
    true_vocab: options.TrueVocab = None,
    prefer_index: options.PreferIndex = False,
    strict: options.Strict = False,
) -> int:
    """Prove a checkpoint: structure, content, that it equals its source, loads and computes. Exit code 3 if not."""
    from shardctl.cli.progress import effort
    from shardctl.report import documents
    from shardctl.report import junit as junit_xml
    from shardctl.report import summary as markdown
    from shardctl.report.annotations import github
    from shardctl.report.verification import verification
    from shardctl.verbs.on_devices import Trial
    from shardctl.verbs.verify import LEVELS
    from shardctl.verbs.verify import verify as verb

    asked: list[LevelName] = [level]
    if load is not None:
        asked.append("load")
    if forward or prompt is not None or second_opinion:
        asked.append("forward")
    trial = Trial(load or "auto", device_memory, dtype, prompt or "", tokens, processes, virtual, second_opinion)
    with effort("verify", threads) as work:
        found = verb(
            src,
            level=max(asked, key=list(LEVELS).index),
            against=against,
            require=require,
            trial=trial,
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
    if junit:
        streams.save(junit, junit_xml.junit(found))
    if summary:
        streams.save(summary, markdown.summary(found))
    if json:
        streams.document(documents.verified(found))
    else:
        streams.show(verification(found))
    if os.environ.get("GITHUB_ACTIONS"):
        streams.talk(github(found))
    return 0 if found.ok else 3
