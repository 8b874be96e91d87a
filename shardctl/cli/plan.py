"""`shardctl plan`."""

from typing import Annotated, Literal

import typer

from shardctl.cli import options, streams

EXAMPLES = """
Examples:
  shardctl plan ./llama --tp 8
  shardctl plan ./llama --mesh pp=2,fsdp=2,tp=4 --detail stage
"""


def plan(
    src: options.Source,
    *,
    detail: Annotated[Literal["summary", "stage", "rank"], typer.Option(help="How much to show.")] = "rank",
    json: options.Json = False,
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
    memory: options.Memory = None,
    threads: options.Threads = None,
    config: options.Config = None,
    rules: options.Rules = None,
    rules_from: options.RulesFrom = None,
    container: options.From = None,
    kv_heads: options.KvHeads = "error",
    strict: options.Strict = False,
) -> int:
    """Say what each rank will hold, and what the conversion will cost; moves nothing."""
    from shardctl.report import documents
    from shardctl.report.planning import planning
    from shardctl.verbs.plan import plan as verb

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
        memory=memory,
        threads=threads,
    )
    reading = options.reading(config, rules, container, strict=strict, kv_heads=kv_heads, rules_from=rules_from)
    planned = verb(src, wish, reading=reading)
    streams.warn(planned.warnings)
    if json:
        streams.document(documents.planned(planned))
    else:
        streams.show(planning(planned, detail))
    return 0 if planned.fits else 3
