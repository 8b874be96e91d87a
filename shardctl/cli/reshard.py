"""`shardctl reshard`."""

import time
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shardctl.cli import options, streams

if TYPE_CHECKING:
    from shardctl.verbs.drafting import Wish
    from shardctl.verbs.opening import Reading

EXAMPLES = """
Examples:
  shardctl reshard ./llama ./llama-tp4 --tp 4
  shardctl reshard ./llama-tp4 ./llama-bf16 --to hf --dtype bf16
"""


def reshard(
    src: options.Source,
    dst: options.Destination,
    *,
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
    dtype: options.Dtype = "keep",
    keep_fp32: options.KeepFp32 = None,
    include: options.Include = None,
    exclude: options.Exclude = None,
    optimizer_states: options.OptimizerStates = None,
    memory: options.Memory = None,
    threads: options.Threads = None,
    config: options.Config = None,
    rules: options.Rules = None,
    rules_from: options.RulesFrom = None,
    container: options.From = None,
    kv_heads: options.KvHeads = "error",
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
        dtype=dtype,
        keep_fp32=keep_fp32,
        include=include,
        exclude=exclude,
        optimizer_states=optimizer_states,
        memory=memory,
        threads=threads,
    )
    reading = options.reading(config, rules, container, strict=strict, kv_heads=kv_heads, rules_from=rules_from)
    if dry_run:
        _rehearse(src, dst, wish, reading, overwrite=overwrite, json=json)
    else:
        _reshard(src, dst, wish, reading, overwrite=overwrite, resume=not no_resume, checksums=checksums, json=json)


def _rehearse(src: str, dst: str, wish: "Wish", reading: "Reading", *, overwrite: bool, json: bool) -> None:
    from shardctl.report import plan_document
    from shardctl.report.planning import planning
    from shardctl.verbs.rehearse import rehearse

    planned = rehearse(src, dst, wish, reading=reading, overwrite=overwrite)
    streams.warn(planned.warnings)
    if json:
        streams.record(plan_document.rehearsed(planned, dst))
    else:
        streams.show(planning(planned))
        streams.talk("dry run: nothing was written\n")


def _reshard(
    src: str,
    dst: str,
    wish: "Wish",
    reading: "Reading",
    *,
    overwrite: bool,
    resume: bool,
    checksums: str | None,
    json: bool,
) -> None:
    from shardctl.cli.progress import watching
    from shardctl.report import documents
    from shardctl.report.conversion import conversion
    from shardctl.verbs.reshard import reshard as verb

    began = time.monotonic()
    with watching("reshard", json=json) as progress:
        done = verb(
            src,
            dst,
            wish,
            reading=reading,
            overwrite=overwrite,
            resume=resume,
            sha256=checksums == "sha256",
            progress=progress,
        )
    seconds = time.monotonic() - began
    streams.warn(done.warnings)
    if json:
        streams.record(documents.resharded(done, seconds))
    else:
        streams.show(conversion(done, seconds))
