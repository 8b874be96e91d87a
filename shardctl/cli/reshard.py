"""`shardctl reshard`."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shardctl.cli import options, streams
from shardctl.cli.endings import finished
from shardctl.errors import UsageError

if TYPE_CHECKING:
    from shardctl.execute.worker import Worker
    from shardctl.verbs.drafting import Wish
    from shardctl.verbs.opening import Reading
    from shardctl.verbs.plan_file import PlanFile

EXAMPLES = """
Examples:
  shardctl reshard ./llama ./llama-tp4 --tp 4
  shardctl reshard ./llama-tp4 ./llama-bf16 --to hf --dtype bf16
"""
_BESIDE_A_PLAN = frozenset(
    {"src", "dst", "plan", "dry_run", "overwrite", "no_resume", "checksums", "json", "memory", "threads", "strict"}
    | {"worker", "engine"}
)
"""What may be given with `--plan`: places, effort, and what shapes no byte."""
_Way = tuple[Callable[..., Any], Callable[[Any, float], dict[str, Any]], Callable[[Any, float], Any]]
"""A verb that moves bytes, and what makes a document and a text of its result and the seconds that it took."""


def reshard(
    context: typer.Context,
    src: options.Source,
    dst: options.Destination = None,
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
    tp: options.Tp = None,
    pp: options.Pp = None,
    dp: options.Dp = None,
    fsdp: options.Fsdp = None,
    cp: options.Cp = None,
    ep: options.Ep = None,
    etp: options.Etp = None,
    mesh: options.MeshText = None,
    stages: options.Stages = None,
    to: options.To = None,
    names: options.Names = "transformers",
    experts: options.Experts = "keep",
    max_shard_size: options.MaxShardSize = None,
    vllm_profile: options.VllmProfile = None,
    trtllm_embedding: options.TrtllmEmbedding = None,
    megatron: options.Megatron = None,
    dtype: options.Dtype = "keep",
    keep_fp32: options.KeepFp32 = None,
    include: options.Include = None,
    exclude: options.Exclude = None,
    optimizer_states: options.OptimizerStates = None,
    memory: options.Memory = None,
    threads: options.Threads = None,
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
    config: options.Config = None,
    rules: options.Rules = None,
    rules_from: options.RulesFrom = None,
    container: options.From = None,
    weights: options.Weights = None,
    true_vocab: options.TrueVocab = None,
    kv_heads: options.KvHeads = "error",
    prefer_index: options.PreferIndex = False,
    strict: options.Strict = False,
) -> None:
    """Move the bytes into a new directory, in another layout; resumes where an earlier run stopped."""
    wish = options.wish(
        to=to,
        mesh=options.mesh(mesh, tp=tp, pp=pp, dp=dp, fsdp=fsdp, cp=cp, ep=ep, etp=etp),
        stages=stages,
        names=names,
        experts=experts,
        max_shard_size=max_shard_size,
        vllm_profile=vllm_profile,
        trtllm_embedding=trtllm_embedding,
        megatron=megatron,
        dtype=dtype,
        keep_fp32=keep_fp32,
        include=include,
        exclude=exclude,
        optimizer_states=optimizer_states,
        memory=memory,
        threads=threads,
    )
    reading = options.reading(
        config,
        rules,
        container,
        weights=weights,
        true_vocab=true_vocab,
        prefer_index=prefer_index,
        strict=strict,
        kv_heads=kv_heads,
        rules_from=rules_from,
    )
    file = _followed(context, plan) if plan is not None else None
    if file is not None:
        planned = file.wish
        wish = replace(planned, memory=memory or planned.memory, threads=threads or planned.threads)
        reading = replace(file.reading, strict=strict or file.reading.strict)
        src, dst = (src, dst) if dst is not None else (str(file.source), src)
    if dst is None:
        raise UsageError("missing argument 'DST'", hint="shardctl reshard --help shows what there is")
    crew = _worker(worker)
    if crew is not None and engine == "ray":
        raise UsageError(
            "--worker and --engine ray are both given", hint="Ray divides the work itself: leave --worker out"
        )
    if dry_run:
        _rehearse(src, dst, wish, reading, file, overwrite=overwrite, json=json)
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
            wish,
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

    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name not in _BESIDE_A_PLAN and source is not None and source.name == "COMMANDLINE":
            raise UsageError(
                f"--plan and {parameter.opts[0]} are both given",
                hint="the plan says what is made: leave the option out, or make another plan",
            )
    return load(path)


def _rehearse(
    src: str, dst: str, wish: "Wish", reading: "Reading", plan: "PlanFile | None", *, overwrite: bool, json: bool
) -> None:
    from shardctl.report import plan_document
    from shardctl.report.planning import planning
    from shardctl.verbs.rehearse import rehearse

    planned = rehearse(src, dst, wish, reading=reading, overwrite=overwrite, plan=plan)
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
