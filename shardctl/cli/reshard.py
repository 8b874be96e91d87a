"""`shardctl reshard`."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shardctl.cli import arguments, streams
from shardctl.cli.endings import finished
from shardctl.errors import UsageError
from shardctl.options import ReshardOptions, SourceOptions
from shardctl.options.declaration import flat_options

if TYPE_CHECKING:
    from shardctl.execute.worker import Worker
    from shardctl.verbs.plan_file import PlanFile

EXAMPLES = """
Examples:
  shardctl reshard ./llama ./llama-tp4 --tp 4
  shardctl reshard ./llama-tp4 ./llama-bf16 --to hf --dtype bf16
"""
_Way = tuple[Callable[..., Any], Callable[[Any, float], dict[str, Any]], Callable[[Any, float], Any]]
"""A verb that moves bytes, and what makes a document and a text of its result and the seconds that it took."""


def reshard(
    context: typer.Context,
    src: arguments.Source,
    dst: arguments.Destination = None,
    *,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Do what a plan file says, as shardctl plan wrote it; SRC is in it.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", metavar="", help="Check everything and print the plan; write nothing.")
    ] = (False),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", metavar="", help="Replace a checkpoint that shardctl wrote.")
    ] = False,
    no_resume: Annotated[
        bool, typer.Option("--no-resume", metavar="", help="Start anew where an earlier run stopped.")
    ] = False,
    checksums: Annotated[
        Literal["sha256"] | None, typer.Option("--hash", help="Write SHA256SUMS as well.", show_default=False)
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print JSON lines: progress, then the result.")
    ] = False,
    conversion: ReshardOptions,
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="Threads of this machine, or tasks of a Ray cluster.")
    ] = "local",
    worker: Annotated[
        str | None,
        typer.Option(
            metavar="I/N|auto",
            show_default=False,
            help="Write the part of one of N machines, I from 0; then shardctl finish DST.",
        ),
    ] = None,
    reading: SourceOptions,
) -> None:
    """Move the bytes into a new directory, in another layout; resumes where an earlier run stopped."""
    file = _followed(context, plan) if plan is not None else None
    if file is not None:
        conversion = file.with_effort(conversion, _given(context))
        reading = replace(
            file.reading,
            strict=reading.strict or file.reading.strict,
            allow_unverified=reading.allow_unverified or file.reading.allow_unverified,
        )
        src, dst = (src, dst) if dst is not None else (str(file.source), src)
    if dst is None:
        raise UsageError("missing argument 'DST'", hint="shardctl reshard --help shows what there is")
    crew = _worker(worker)
    if crew is not None and engine == "ray":
        raise UsageError(
            "--worker and --engine ray are both given", hint="Ray divides the work itself: leave --worker out"
        )
    if dry_run:
        _rehearse(src, dst, conversion, reading, file, overwrite=overwrite, json=json)
        return
    if engine == "ray":
        verb, document, view = _on_ray()
    else:
        verb, document, view = _as_worker(crew, launched=worker == "auto") if crew is not None else _on_this_machine()
    from shardctl.cli.progress import watching

    began = time.monotonic()
    with watching("reshard", json=json) as progress:
        done = verb(
            src,
            dst,
            conversion,
            reading=reading,
            overwrite=overwrite,
            resume=not no_resume,
            sha256=checksums == "sha256",
            progress=progress,
            plan=file,
        )
    with finished():
        seconds = time.monotonic() - began
        streams.warn(done.warnings)
        if json:
            streams.record(document(done, seconds))
        else:
            streams.show(view(done, seconds))


def _worker(text: str | None) -> "Worker | None":
    if text is None:
        return None
    from shardctl.execute.worker import Worker

    return Worker.parse(text, os.environ)


def _followed(context: typer.Context, path: Path) -> "PlanFile":
    """The plan to follow; raises UsageError for any other option that would shape the result."""
    from shardctl.verbs.plan_file import load

    declared = (*flat_options(ReshardOptions), *flat_options(SourceOptions))
    shaping = {each.name: each.flag for each, option in declared if option.shapes_result}
    for name in _given(context):
        if name in shaping:
            raise UsageError(
                f"--plan and {shaping[name]} are both given",
                hint="the plan says what is made: leave the option out, or make another plan",
            )
    return load(path)


def _given(context: typer.Context) -> tuple[str, ...]:
    """The parameters that the command line has, by the names of the options' fields."""
    names = (parameter.name or "" for parameter in context.command.params)
    sources = ((name, context.get_parameter_source(name)) for name in names)
    return tuple(name for name, source in sources if source is not None and source.name == "COMMANDLINE")


def _rehearse(
    src: str,
    dst: str,
    conversion: ReshardOptions,
    reading: SourceOptions,
    plan: "PlanFile | None",
    *,
    overwrite: bool,
    json: bool,
) -> None:
    from shardctl.report import plan_document
    from shardctl.report.planning import planning
    from shardctl.verbs.rehearse import rehearse

    planned = rehearse(src, dst, conversion, reading=reading, overwrite=overwrite, plan=plan)
    streams.warn(planned.warnings)
    if json:
        streams.record(plan_document.rehearsed(planned, dst))
    else:
        streams.show(planning(planned))
        streams.talk("dry run: nothing was written\n")


def _on_this_machine() -> _Way:
    from shardctl.report.conversion import conversion
    from shardctl.report.documents import resharded
    from shardctl.verbs.reshard import reshard as verb

    return verb, resharded, conversion


def _as_worker(worker: "Worker", *, launched: bool) -> _Way:
    """The part of one worker of several; `launched` if what started it told it which one it is."""
    from shardctl.execute.worker import job
    from shardctl.report.conversion import contribution
    from shardctl.report.documents import contributed
    from shardctl.verbs.contribute import contribute as verb

    return partial(verb, worker=worker, run=job(os.environ) if launched else ""), contributed, contribution


def _on_ray() -> _Way:
    from shardctl.report import documents
    from shardctl.report.conversion import finished
    from shardctl.verbs.on_ray import reshard_on_ray as verb

    return verb, partial(documents.finished, verb="reshard"), finished
