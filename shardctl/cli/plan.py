"""Defines the command line of `shardctl plan`."""

from typing import Annotated, Literal

from shardctl.cli import arguments, streams
from shardctl.cli.command_line import recall_command
from shardctl.options import PlanOptions, SourceOptions
from shardctl.options.declaration import CommandOption, HelpPanel

COMMON = (
    "--tp", "--pp", "--ep", "--fsdp", "--dp", "--cp", "--mesh", "--for", "--gpu", "--gpus", "--search", "--seq-len",
    "--batch", "--kv-dtype", "--utilization", "--profile", "--zero", "--recompute", "--optimizer", "--dtype", "--to",
    "--detail", "--report", "--json",
)  # fmt: skip
"""What -h and --help show."""
PAGE = "docs/planning.md"
"""Where it is explained."""

EXAMPLES = """
Examples:
  shardctl plan ./llama --tp 8 --gpu h100-80g --seq-len 32768
  shardctl plan ./llama/config.json --mesh pp=2,fsdp=2,tp=4 --recompute full
"""


def plan(
    src: arguments.Source,
    *,
    detail: Annotated[
        Literal["summary", "stage", "rank", "tensor", "time", "zero"],
        CommandOption(
            HelpPanel.GENERAL,
            "How much detail to show: time has the peaks of a training step, zero the stages of ZeRO.",
            brief="stage, rank, tensor, time or zero",
        ),
    ] = "summary",
    conversion: arguments.PlannedConversionOptions,
    options: PlanOptions,
    report: arguments.Page = None,
    json: arguments.Json = False,
    source_options: SourceOptions,
) -> int:
    """Estimate what each device will hold, whether it fits, and what the conversion will cost. Moves nothing."""
    from shardctl.report import plan_document
    from shardctl.report.planning import render_plan
    from shardctl.verbs.plan import plan as verb

    planned = verb(src, conversion, source_options=source_options, plan_options=options)
    streams.print_warnings(planned.warnings)
    if report is not None:
        from shardctl.report.pages.plan_page import render_plan_page

        streams.write_report(report, render_plan_page(planned, recall_command()))
    if json:
        streams.print_document(plan_document.build_plan_document(planned))
    else:
        streams.print_view(render_plan(planned, detail, streams.count_columns()))
    return 0 if planned.fits else 3
