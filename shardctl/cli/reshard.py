"""Defines the command line of `shardctl reshard`."""

import os
import shlex
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shardctl.base.errors import UsageError
from shardctl.cli import arguments, streams
from shardctl.cli.command_line import recall_command
from shardctl.cli.endings import raise_when_finished
from shardctl.options import DestinationOptions, ReshardOptions, SourceOptions
from shardctl.options.declaration import CommandOption, HelpPanel, PathAccess
from shardctl.options.sum_options import requests_sum

if TYPE_CHECKING:
    from shardctl.conversion.engine.worker import WorkerId
    from shardctl.conversion.plan_file import PlanFile
    from shardctl.verbs.reshard import ReshardResult

COMMON = (
    "--to", "--for", "--tp", "--pp", "--ep", "--fsdp", "--mesh", "--dtype", "--quantize", "--merge",
    "--average-with", "--memory", "--max-shard-size", "--worker", "--prove", "--dry-run", "--overwrite", "--create",
    "--from", "--apply", "--json",
)  # fmt: skip
"""What -h and --help show."""
PAGE = "docs/guide.md"
"""Where it is explained."""

EXAMPLES = """
Examples:
  shardctl reshard ./llama ./llama-tp4 --tp 4
  shardctl reshard ./llama-tp4 ./llama-fp8 --to hf --quantize fp8-block
  shardctl reshard ./fsdp-run ./llama --for vllm --config ./config.json
"""
_OTHER_INPUTS = frozenset({"vocab.json", "vocab.txt", "preprocessor_config.json", "tekken.json"})
"""Files that say how a model's input is made, besides those with `token` in their names."""
_Way = tuple[Callable[..., Any], Callable[[Any, float], dict[str, Any]], Callable[[Any, float], Any]]
"""A verb that moves bytes, and two functions that render its result and seconds as a document and as text."""


def reshard(
    context: typer.Context,
    src: arguments.Source,
    dst: arguments.Destination = None,
    *,
    plan: Annotated[
        Path | None,
        CommandOption(
            HelpPanel.GENERAL,
            "Follow a plan that shardctl plan --out wrote; SRC may be left out.",
            metavar="FILE",
            access=PathAccess.READ,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        CommandOption(
            HelpPanel.GENERAL,
            "Check everything and print the plan, but write nothing.",
            brief="Check everything, print the plan, write nothing",
        ),
    ] = False,
    destination_options: DestinationOptions,
    each: Annotated[
        bool,
        CommandOption(HelpPanel.GENERAL, "Convert every checkpoint that the pattern SRC matches, into DST/<its name>."),
    ] = False,
    fail_fast: Annotated[bool, CommandOption(HelpPanel.GENERAL, "Let --each end at the first failure.")] = False,
    json: Annotated[
        bool,
        CommandOption(
            HelpPanel.GENERAL,
            "Print JSON lines: progress, then the result.",
            brief="Print JSON lines: progress, then the result",
        ),
    ] = False,
    report: arguments.Page = None,
    conversion: ReshardOptions,
    engine: Annotated[
        Literal["local", "ray"],
        CommandOption(HelpPanel.GENERAL, "Run threads on this machine, or tasks on a Ray cluster."),
    ] = "local",
    worker: Annotated[
        str | None,
        CommandOption(
            HelpPanel.GENERAL,
            "Write the part of worker I of N, counted from 0. When all are done, run shardctl finish DST.",
            brief="Write part I of N, counted from 0; then finish",
            metavar="I/N|auto",
        ),
    ] = None,
    source_options: SourceOptions,
) -> int:
    """Convert a checkpoint to another layout in a new directory. Resumes an interrupted run."""
    file = None
    if plan is not None:
        from shardctl.conversion.plan_file import read_plan_file

        file = read_plan_file(plan)
        given = _list_given_parameters(context)
        conversion, source_options = file.apply_run_options(conversion, source_options, given)
        src, dst = (src, dst) if dst is not None else (str(file.source), src)
    if dst is None:
        raise UsageError("missing argument 'DST'", hint="shardctl reshard --help lists the arguments")
    crew = _parse_worker(worker)
    _refuse_combinations(
        each=each,
        fail_fast=fail_fast,
        followed=file is not None,
        shared=crew is not None,
        on_ray=engine == "ray",
        dry_run=dry_run,
        page=report is not None,
    )
    if each:
        return _convert_each(src, dst, conversion, source_options, destination_options, fail_fast=fail_fast, json=json)
    if dry_run:
        _rehearse_conversion(src, dst, conversion, source_options, destination_options, file, json=json)
        return 0
    if engine == "ray":
        verb, document, view = _build_ray_way()
    else:
        verb, document, view = (
            _build_worker_way(crew, launched=worker == "auto") if crew is not None else _build_local_way()
        )
    from shardctl.cli.progress import watch_progress

    began, said = time.monotonic(), set[str]()
    _note_local_destination(dst)
    with watch_progress("reshard", json=json, said=said) as progress:
        done = verb(
            src,
            dst,
            conversion,
            source_options=source_options,
            destination_options=destination_options,
            progress=progress,
            plan=file,
        )
    with raise_when_finished():
        seconds = time.monotonic() - began
        streams.print_warnings(warning for warning in done.warnings if warning not in said)
        if report is not None:
            _write_page(report, done, src, seconds)
        if json:
            streams.print_record(document(done, seconds))
        else:
            streams.print_view(view(done, seconds))
            streams.print_warnings(_list_missing_files(done))
            changed = bool(conversion.merge) or requests_sum(conversion) or source_options != SourceOptions()
            _suggest_verification(dst, src, done, comparable=not changed)
    return 0


def _note_local_destination(dst: str) -> None:
    """Say that a destination that looks like a model of the Hub is a folder here, unless its parent is one already."""
    from shardctl.storage.addresses import is_hub_name

    if is_hub_name(Path(dst)) and not Path(dst).parent.exists():
        streams.print_progress(f"note: {dst} is a local folder; hf://{dst} writes to the Hub\n")


def _list_missing_files(done: object) -> list[str]:
    """List what a result in the layout `hf` lacks that programs load it with."""
    from shardctl.verbs.reshard import ReshardResult

    if not isinstance(done, ReshardResult) or done.record.layout != "hf" or "adapter_config.json" in done.record.files:
        return []
    files = set(done.record.files)
    lacking = [] if "config.json" in files else ["config.json (--config PATH adds it)"]
    if not any("token" in name or name in _OTHER_INPUTS for name in files):
        lacking.append("tokenizer")
    return [f"{done.target} has no {' and no '.join(lacking)}: engines need them"] if lacking else []


def _suggest_verification(dst: str, src: str, done: object, *, comparable: bool) -> None:
    """Say how to prove the result; the source is named where it is `comparable` without further options of verify.

    A part of a result is whole only after `shardctl finish`, which is named once all parts are written.
    """
    from shardctl.conversion.worker_part import ContributeResult
    from shardctl.verbs.finish import FinishResult
    from shardctl.verbs.reshard import ReshardResult

    if isinstance(done, ContributeResult) and not done.missing and not done.finished:
        streams.print_progress(f"next: shardctl finish {shlex.quote(dst)}\n")
    if not isinstance(done, ReshardResult | FinishResult):
        return
    against = f" --against {shlex.quote(src)}" if comparable and isinstance(done, ReshardResult) else ""
    streams.print_progress(f"next: shardctl verify {shlex.quote(dst)} --level full{against}\n")


def _write_page(report: Path, done: "ReshardResult", src: str, seconds: float) -> None:
    from shardctl.report.pages.reshard_page import render_reshard_page

    streams.write_report(report, render_reshard_page(done, src, seconds, recall_command()))


def _refuse_combinations(
    *, each: bool, fail_fast: bool, followed: bool, shared: bool, on_ray: bool, dry_run: bool, page: bool
) -> None:
    """Raise UsageError for ways of converting that exclude each other."""
    if fail_fast and not each:
        raise UsageError("--fail-fast is for several checkpoints", hint="add --each, or leave it out")
    if each and (followed or shared or on_ray or dry_run):
        raise UsageError(
            "--each is for conversions that one process does, without a plan file",
            hint="leave --plan, --worker, --engine ray and --dry-run out",
        )
    if page and (each or shared or on_ray or dry_run):
        raise UsageError(
            "--report shows one conversion that one process has done",
            hint="leave --each, --dry-run, --worker and --engine ray out, or use --json",
        )
    if shared and on_ray:
        raise UsageError(
            "--worker and --engine ray are both given", hint="Ray divides the work itself: leave --worker out"
        )


def _convert_each(
    pattern: str,
    dst: str,
    conversion: ReshardOptions,
    source_options: SourceOptions,
    destination_options: DestinationOptions,
    *,
    fail_fast: bool,
    json: bool,
) -> int:
    from shardctl.cli.progress import watch_progress
    from shardctl.report.several import build_each_document, build_outcome_document, render_each, render_outcome
    from shardctl.verbs.reshard_each import EachOutcome
    from shardctl.verbs.reshard_each import reshard_each as verb

    said = set[str]()

    def tell(outcome: EachOutcome) -> None:
        warnings = outcome.result.warnings if outcome.result is not None else ()
        streams.print_warnings(warning for warning in warnings if warning not in said)
        said.clear()
        if json:
            streams.print_record(build_outcome_document(outcome))
        else:
            streams.print_view(render_outcome(outcome))

    done = verb(
        pattern,
        dst,
        conversion,
        source_options=source_options,
        destination_options=destination_options,
        fail_fast=fail_fast,
        watch=partial(watch_progress, "reshard", json=json, said=said),
        tell=tell,
    )
    with raise_when_finished():
        if json:
            streams.print_record(build_each_document(done))
        else:
            streams.print_view(render_each(done))
    return done.exit_code


def _parse_worker(text: str | None) -> "WorkerId | None":
    if text is None:
        return None
    from shardctl.conversion.engine.worker import WorkerId

    return WorkerId.parse(text, os.environ)


def _list_given_parameters(context: typer.Context) -> tuple[str, ...]:
    """List the parameters given on the command line or by settings, by the names of the options' fields."""
    names = (parameter.name or "" for parameter in context.command.params)
    sources = ((name, context.get_parameter_source(name)) for name in names)
    return tuple(
        name for name, source in sources if source is not None and source.name in {"COMMANDLINE", "DEFAULT_MAP"}
    )


def _rehearse_conversion(
    src: str,
    dst: str,
    conversion: ReshardOptions,
    source_options: SourceOptions,
    destination_options: DestinationOptions,
    plan: "PlanFile | None",
    *,
    json: bool,
) -> None:
    from shardctl.report import plan_document
    from shardctl.report.planning import render_rehearsal
    from shardctl.verbs.dry_run import rehearse_reshard

    planned = rehearse_reshard(
        src, dst, conversion, source_options=source_options, destination_options=destination_options, plan=plan
    )
    streams.print_warnings(planned.warnings)
    if json:
        streams.print_record(plan_document.build_rehearsal_document(planned, dst))
    else:
        streams.print_view(render_rehearsal(planned, dst))
        streams.print_message("dry run: nothing was written\n")


def _build_local_way() -> _Way:
    from shardctl.report.conversion import render_conversion
    from shardctl.report.documents import build_reshard_document
    from shardctl.verbs.reshard import reshard as verb

    return verb, build_reshard_document, render_conversion


def _build_worker_way(worker: "WorkerId", *, launched: bool) -> _Way:
    """Choose the verb for one worker of several; `launched` says that a launcher told it which one it is."""
    from shardctl.conversion.engine.worker import find_job_name
    from shardctl.conversion.worker_part import contribute as verb
    from shardctl.report.conversion import render_contribution
    from shardctl.report.documents import build_contribution_document

    return (
        partial(verb, worker=worker, run=find_job_name(os.environ) if launched else ""),
        build_contribution_document,
        render_contribution,
    )


def _build_ray_way() -> _Way:
    from shardctl.report import documents
    from shardctl.report.conversion import render_finished
    from shardctl.verbs.reshard_on_ray import reshard_on_ray as verb

    return verb, partial(documents.build_finish_document, verb="reshard"), render_finished
