"""`shardctl plan`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from shardctl.cli import options, purpose, streams
from shardctl.errors import UsageError

_PAGES = (".html", ".htm")
"""What a report is called; a mistaken name would be that of a file that is dear."""

EXAMPLES = """
Examples:
  shardctl plan ./llama --tp 8 --gpu h100-80g --seq-len 32768
  shardctl plan ./llama/config.json --mesh pp=2,fsdp=2,tp=4 --recompute full
"""


def plan(
    src: options.Source,
    *,
    detail: Annotated[Literal["summary", "stage", "rank", "tensor"], typer.Option(help="How much to show.")] = "rank",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=options.written_file,
            show_default=False,
            help="Write the plan, for reshard --plan FILE.",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html",
            parser=options.written_file,
            show_default=False,
            help="Write a self-contained page, too.",
        ),
    ] = None,
    json: options.Json = False,
    tp: options.Tp = None,
    pp: options.Pp = None,
    dp: options.Dp = None,
    fsdp: options.Fsdp = None,
    cp: options.Cp = None,
    ep: options.Ep = None,
    etp: options.Etp = None,
    mesh: options.MeshText = None,
    use: purpose.For = None,
    seq_len: purpose.SeqLen = None,
    batch: purpose.Batch = None,
    kv_dtype: purpose.KvDtype = None,
    encoder_len: purpose.EncoderLen = None,
    batched_tokens: purpose.BatchedTokens = None,
    max_seqs: purpose.MaxSeqs = None,
    gpu: purpose.Gpu = None,
    gpus: purpose.Gpus = None,
    search: purpose.Search = False,
    optimizer: purpose.Optimizer = None,
    zero: purpose.Zero = None,
    profile: purpose.ProfileName = None,
    recompute: purpose.Recompute = None,
    microbatches: purpose.Microbatches = None,
    schedule: purpose.Schedule = None,
    vp: purpose.Vp = None,
    offload: purpose.Offload = None,
    offload_parameters: purpose.OffloadParameters = False,
    gradient_dtype: purpose.GradientDtype = None,
    no_sequence_parallel: purpose.NoSequenceParallel = False,
    attention: purpose.AttentionKind = None,
    calibrate: purpose.Calibrate = None,
    stages: options.Stages = None,
    to: options.To = None,
    names: options.Names = "transformers",
    experts: options.Experts = "keep",
    max_shard_size: options.MaxShardSize = None,
    vllm_profile: options.VllmProfile = None,
    trtllm_embedding: options.TrtllmEmbedding = None,
    megatron: options.Megatron = None,
    dtype: purpose.WhatIf = "keep",
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
    weights: options.Weights = None,
    true_vocab: options.TrueVocab = None,
    kv_heads: options.KvHeads = "error",
    prefer_index: options.PreferIndex = False,
    strict: options.Strict = False,
) -> int:
    """Say what each device will hold, whether it fits, and what the conversion will cost; moves nothing."""
    from shardctl.report import plan_document
    from shardctl.report.planning import planning
    from shardctl.verbs.plan import plan as verb

    if report is not None and report.suffix.lower() not in _PAGES:
        raise UsageError(f"--report writes a page of HTML, and {report} is not called so", hint="name it FILE.html")
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
        dtype="keep" if dtype in purpose.CODES else dtype,
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
    asked = purpose.purpose(
        gpu=gpu,
        kv_dtype=kv_dtype,
        encoder_len=encoder_len,
        batched_tokens=batched_tokens,
        max_seqs=max_seqs,
        use=use,
        seq_len=seq_len,
        batch=batch,
        microbatches=microbatches,
        profile=profile,
        optimizer=optimizer,
        zero=zero,
        recompute=recompute,
        schedule=schedule,
        virtual_stages=vp,
        offload=offload,
        offload_parameters=offload_parameters or None,
        gradient_dtype=gradient_dtype,
        sequence_parallel=False if no_sequence_parallel else None,
        flash=None if attention is None else attention == "fused",
        devices=gpus,
        narrower=dtype if dtype in purpose.CODES else None,
        calibration=calibrate,
        search=search,
    )
    planned = verb(src, wish, reading=reading, purpose=asked, out=out)
    streams.warn(planned.warnings)
    if report is not None:
        from shardctl.report.html import render_plan_page

        streams.save(report, render_plan_page(planned))
    if json:
        streams.document(plan_document.planned(planned))
    else:
        streams.show(planning(planned, detail, streams.columns()))
    return 0 if planned.fits else 3
