"""Renders the result of `plan` as text."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Final, Literal

from rich.console import Group

from shardctl.base.amounts import format_count, format_duration, format_file_size, format_memory_size, format_plural
from shardctl.estimate.model.allowed_degrees import format_degrees
from shardctl.estimate.term import COUNTERS, MemorySum
from shardctl.estimate.workload import ServingWorkload, TrainingWorkload
from shardctl.hardware.devices import GB, TERA
from shardctl.planning.forecast import BUSY
from shardctl.planning.plan_result import PlanAnswer, format_amount
from shardctl.report.grid import render_line, render_table
from shardctl.report.memory_bars import render_bars, render_kinds, render_mesh_picture, render_terms
from shardctl.report.search_table import format_cost, format_first_token, format_run, render_ranking
from shardctl.report.step_moments import render_moments
from shardctl.report.strategies import render_advice, render_calibration, render_comparison

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from shardctl.estimate.rank_estimate import RankEstimate
    from shardctl.planning.forecast import WorkloadEstimate
    from shardctl.planning.plan_result import ConversionCost, PlanResult, RankPlan, StagePlan

Detail = Literal["summary", "stage", "rank", "tensor", "time", "zero"]

_MAX_RANGES_SHOWN: Final = 3
"""Runs of numbers that a line names; beyond, their count says as much."""
_FULL_BAR_CHARACTERS: Final = 24
"""Characters of a full bar."""


def render_plan(planned: PlanResult, detail: Detail = "summary", columns: int | None = None) -> RenderableType:
    """Render the answer, the meshes that were compared, the workload and what to change, then details.

    `columns` are those of a terminal; without, bars and pictures are as wide as they are.
    """
    parts: list[RenderableType] = [render_line(planned.verdict, STYLES[planned.answer])]
    if planned.explored is not None:
        parts += render_ranking(planned.explored, everything=detail == "tensor")
    return Group(*parts, *_render_details(planned, detail, columns))


def render_rehearsal(planned: PlanResult, destination: str) -> RenderableType:
    """Render what `reshard --dry-run` says: what it would write, and what that costs."""
    return Group(render_line(planned.describe_writing(destination), "bold"), *_render_details(planned, "rank", None))


def _render_details(planned: PlanResult, detail: Detail, columns: int | None) -> list[RenderableType]:
    """Render the checkpoint and its mesh in one line, then the workload, stages, ranks, and the conversion's cost."""
    seen = planned.forecast
    parts: list[RenderableType] = [render_line(_format_header(planned))]
    if seen.work is not None:
        parts.append(render_line(format_workload(planned) + format_beyond_positions(seen)))
    if text := format_server_answer(planned):
        parts.append(render_line(text))
    if seen.work is not None and seen.device is not None and (text := format_room(seen)):
        parts.append(render_line(text))
    if text := format_cache_room(seen):
        parts.append(render_line(text))
    parts += render_advice(planned.counsel)
    parts += [render_line(text) for text in list_adapter_lines(planned)]
    if detail not in {"summary", "zero"} and len(planned.stages) > 1:
        parts.append(
            render_table([_build_stage_row(stage, planned) for stage in planned.stages], right=frozenset({2}), indent=2)
        )
    if detail in {"rank", "tensor"}:
        parts.append(_render_ranks(planned))
    parts += _render_needs(planned, detail, columns)
    if detail == "zero" and seen.strategies and seen.strategies[0].inputs["N"] > 1:
        parts += render_comparison(seen.strategies)
    if seen.calibration is not None:
        parts += render_calibration(seen.calibration)
    return [*parts, *(render_line(text) for text in _list_last_lines(planned) if text)]


def _render_needs(planned: PlanResult, detail: Detail, columns: int | None) -> list[RenderableType]:
    """Render what the ranks need for the purpose, and what is not modelled of it."""
    seen = planned.forecast
    if seen.work is None:
        why = f"memory besides weights is not modelled: {seen.unmodelled}" if seen.unmodelled else ""
        return [render_line(why, "dim")] if why else []
    parts: list[RenderableType] = []
    if detail not in {"summary", "time", "zero"}:
        parts += render_mesh_picture(planned.mesh, seen.estimate, columns)
    parts += render_bars(seen.estimate, columns)
    if detail == "tensor":
        parts += [render_terms(seen.estimate.binding), render_kinds(seen.estimate.binding)]
    if detail == "time":
        parts += render_moments(seen.estimate.binding)
    if isinstance(seen.work, TrainingWorkload):
        parts.append(render_line(format_counters(seen.estimate.binding)))
    if seen.cost is not None:
        parts.append(render_line(format_cost(seen.cost, training=isinstance(seen.work, TrainingWorkload))))
        first = "" if isinstance(seen.work, TrainingWorkload) else format_first_token(seen.cost, seen.work.context)
        parts += [render_line(first)] if first else []
    if text := format_run(seen):
        parts.append(render_line(text))
    parts += [render_line(text) for text in list_offload_lines(seen)]
    if seen.estimate.partial:
        parts.append(render_line(f"activations are not modelled: {seen.unmodelled}", "dim"))
    return parts


def list_adapter_lines(planned: PlanResult) -> list[str]:
    """List what is counted of an adapter's base, and what is not."""
    found = planned.adapter
    if found is None:
        return []
    counted = []
    if found.base_bytes is not None and found.base_rank_bytes is not None:
        each = f", {format_memory_size(found.base_rank_bytes)} of them on a rank" if planned.mesh.world > 1 else ""
        kept = f"base: {found.base}, {format_memory_size(found.base_bytes)} of weights that are not trained{each}"
        counted.append(kept)
    return [*counted, *(f"not counted: {each}" for each in found.uncounted)]


STYLES: Final[dict[PlanAnswer, str]] = {
    "FITS": "bold green",
    "FITS, BUT TIGHT": "bold yellow",
    "DOES NOT FIT": "bold red",
    "DOES NOT FIT, THOUGH CLOSE": "bold red",
    "NOT KNOWN": "bold red",
    "NO ROOM TO CONVERT": "bold red",
    "NEEDS": "bold",
}
"""The colour of each answer."""


def format_beyond_positions(seen: WorkloadEstimate) -> str:
    """Format a remark where sequences are longer than those that the model was made for; else empty."""
    asked = seen.work.context if isinstance(seen.work, ServingWorkload) else seen.work.sequence if seen.work else 0
    return f" (the model was made for {seen.positions:,})" if seen.positions and asked > seen.positions else ""


def format_room(seen: WorkloadEstimate) -> str:
    """Format what would fit instead, in serving; empty where nothing would."""
    work, length, batch = seen.work, seen.longest_context, seen.largest_batch
    if not isinstance(work, ServingWorkload) or (length is None and batch is None):
        return ""
    found = []
    if batch != 0:
        many = "any number of sequences" if batch is None else format_plural(batch, "sequence")
        found.append(f"{many} of {work.context:,} tokens")
    if length != 0:
        long = "any length" if length is None else format_plural(length, "token")
        more = length is not None and seen.positions is not None and length > seen.positions >= work.context
        made = f" (the model was made for {seen.positions:,})" if more else ""
        found.append(f"{format_plural(work.batch, 'sequence')} of {long}{made}")
    return f"room for {', or '.join(found)}" if found else ""


def format_server_answer(planned: PlanResult) -> str:
    """Format whether an engine starts, and how many requests of this length it holds at once; empty without one."""
    seen, work = planned.forecast, planned.forecast.work
    if not isinstance(work, ServingWorkload) or work.budget is None or seen.device is None or seen.estimate.partial:
        return ""
    low, high = seen.batch_interval
    if seen.largest_batch == 0:
        doubt = " by the estimate, though it may" if high else ""
        return f"{work.budget.engine} does not start{doubt}: one request of {work.context:,} tokens has no room"
    doubt = " by the estimate, though not for certain" if low == 0 else ""
    starts = f"{work.budget.engine} starts{doubt}: one request of {work.context:,} tokens fits"
    if seen.largest_batch is None:
        return f"{starts}, and memory does not limit how many it holds at once"
    asked = f", fewer than the {work.batch:,} of --users" if seen.largest_batch < work.batch else ""
    return f"{starts}, and it holds {seen.largest_batch:,} at once{asked}"


def format_cache_room(seen: WorkloadEstimate) -> str:
    """Format what an engine has for its cache, in bytes, tokens and sequences, as its log counts them."""
    work, room = seen.work, seen.room
    if not isinstance(work, ServingWorkload) or work.budget is None or room is None or room.nbytes <= 0:
        return ""
    tokens, least, most = room.count_tokens()
    size = format_amount(MemorySum(room.nbytes, max(0, room.low), room.high, exact=False))
    said = f"cache: {size} for {tokens:,} tokens ({least:,} to {most:,})"
    low, high = seen.batch_interval
    if seen.largest_batch is not None and low is not None and high is not None:
        said += f", {format_plural(seen.largest_batch, 'sequence')} at once ({low:,} to {high:,})"
    if work.budget.engine == "vllm":
        said += f"; vLLM's log says maximum concurrency {room.concurrency:.2f}x"
    return said


def format_counters(rank: RankEstimate) -> str:
    """Format what of a rank's device three counters see."""
    allocated, reserved, whole = (format_memory_size(rank.total(counter=counter).nbytes) for counter in COUNTERS)
    counted = f"rank {rank.holding.rank} as counted: {allocated} allocated, {reserved} reserved, {whole} of the device"
    spared = sum(term.nbytes for term in rank.terms if term.spared)
    return counted + f", {format_memory_size(spared)} of it free if memory runs out" * bool(spared)


def list_offload_lines(seen: WorkloadEstimate) -> list[str]:
    """List what training has offloaded, and how fast that must move."""
    found = [f"offloaded to {tier}: {format_amount(some)} in a node" for tier, some in seen.nodes.items()]
    for need in seen.links:
        rate = f"{need.bandwidth / GB:,.1f} GB/s"
        each = f", {need.link / GB:,.1f} over its own link" if need.link < need.bandwidth else ""
        found.append(
            f"{need.what} move to and from {need.tier}: {rate} a device{each}, to compute {BUSY:.0%} of the time at "
            f"{seen.peak / TERA:,.0f} TFLOP/s"
        )
    return found


def _format_header(planned: PlanResult) -> str:
    name = PurePath(planned.path).name or planned.path
    model = f"{name} ({planned.architecture})" if planned.architecture else name
    world = planned.mesh.world
    mesh = f"{planned.mesh} = {format_plural(world, 'rank')}" if world > 1 else "one device"
    amounts = f"{format_count(planned.parameters)} parameters  {format_memory_size(planned.weight_bytes)}"
    types = ", ".join(planned.weight_types)
    layout = f" | layout {planned.layout}" if planned.layout else f" | a config, which says {types}"
    if planned.forecast.quantised:
        layout = f" | if it were quantized to {planned.forecast.quantised}"
    elif planned.forecast.dequantised:
        layout = " | as it is trained, not quantized"
    return f"{model}  {amounts} | {mesh}{layout}"


def _build_stage_row(stage: StagePlan, planned: PlanResult) -> tuple[str, str, str]:
    if stage.layers == 0:
        layers = "no layers"
    elif stage.layers == 1:
        layers = f"layer {stage.first_layer}"
    else:
        layers = f"layers {stage.first_layer}-{stage.first_layer + stage.layers - 1}"
    held = [rank for rank in planned.ranks if rank.coordinate.get("pp", 0) == stage.stage]
    copies = f" x {held[0].replicas} copies" if held and held[0].replicas > 1 else ""
    return (
        f"stage {stage.stage}",
        layers,
        f"{format_memory_size(stage.weight_bytes)} on {format_plural(len(held), 'rank')}{copies}",
    )


def _render_ranks(planned: PlanResult) -> RenderableType:
    heaviest = max((rank.weight_bytes for rank in planned.ranks), default=0)
    copies = planned.ranks[0].replicas > 1 if planned.ranks else False
    written = any(rank.files for rank in planned.ranks)
    files = ("files",) if written else ()
    rows = [
        (
            "ranks" if len(planned.ranks) > 1 else "rank",
            "place",
            *(("copies",) if copies else ()),
            "tensors",
            "weights",
            *files,
            "",
        )
    ]
    groups: dict[tuple[object, ...], list[RankPlan]] = {}
    for rank in planned.ranks:
        groups.setdefault(_build_rank_key(rank), []).append(rank)
    for ranks in groups.values():
        first = ranks[0]
        bar = "█" * round(_FULL_BAR_CHARACTERS * first.weight_bytes / heaviest) if heaviest else ""
        rows.append(
            (
                _format_rank_numbers([rank.rank for rank in ranks]),
                first.label if len(ranks) == 1 else f"{first.label} .. {ranks[-1].label}",
                *((f"x{first.replicas}",) if copies else ()),
                f"{first.tensors:,}",
                format_memory_size(first.weight_bytes),
                *((format_file_size(first.file_bytes),) if written else ()),
                bar,
            )
        )
    shift = int(copies)
    right = {0, 2 + shift, 3 + shift} | ({4 + shift} if written else set()) | ({2} if copies else set())
    return render_table(rows, right=frozenset(right), indent=2)


def _format_rank_numbers(numbers: Sequence[int]) -> str:
    """Format which ranks these are, in runs; if they lie far apart, how many.

    >>> _format_rank_numbers([3]), _format_rank_numbers([0, 1, 2, 8, 9]), _format_rank_numbers([0, 2, 4, 6])
    ('3', '0-2, 8-9', '4 ranks')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    if len(runs) > _MAX_RANGES_SHOWN:
        return format_plural(len(numbers), "rank")
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def _build_rank_key(rank: RankPlan) -> tuple[object, ...]:
    """Build what ranks of one line have in common, as it is shown; headers of files differ by a few bytes."""
    return rank.coordinate.get("pp", 0), rank.tensors, rank.weight_bytes, format_file_size(rank.file_bytes)


def _list_last_lines(planned: PlanResult) -> tuple[str, ...]:
    return _format_quantized_degrees(planned), _format_replication(planned), _format_conversion(planned)


def _format_quantized_degrees(planned: PlanResult) -> str:
    """Format which degrees leave the blocks of quantized weights whole; empty if no weights are quantized."""
    found = []
    for axis, degrees in planned.quantised_degrees.items():
        text = f"{axis} can be {format_degrees(degrees.allowed)}"
        if degrees.blocked:
            text += f" ({format_degrees(degrees.blocked)} would cut blocks of quantized weights)"
        found.append(text)
    return f"degrees: {'; '.join(found)}" if found else ""


def _format_replication(planned: PlanResult) -> str:
    distinct = len(planned.ranks)
    if planned.mesh.world == 1:
        return ""
    copies = planned.ranks[0].replicas
    hold = "holds" if distinct == 1 else "hold"
    text = f"replication: {format_plural(distinct, 'distinct rank')} {hold} {planned.replication:.3f} times the weights"
    return text + (f", each {copies} times (dp x cp)" if copies > 1 else "")


def _format_conversion(planned: PlanResult) -> str:
    cost = planned.conversion
    if cost is None:
        return ""
    return (
        f"conversion: read {format_file_size(cost.read_bytes)}, write {format_file_size(cost.write_bytes)} "
        f"in {format_plural(cost.files, 'file')}, peak host memory {format_memory_size(cost.peak_memory_bytes)}"
        f", {format_duration(cost.seconds)} at {_format_disk_rate(cost)}"
        + (f", free space {format_file_size(cost.free_bytes)}" if cost.free_bytes is not None else "")
    )


def _format_disk_rate(cost: ConversionCost) -> str:
    """Format the rate of a conversion, and where it is from."""
    origins = {"default": "the default of --disk-rate", "given": "--disk-rate", "measured": "measured by --probe"}
    return f"{format_file_size(cost.rate_bytes)}/s ({origins[cost.rate_source]})"


def format_workload(planned: PlanResult) -> str:
    """Format what the devices do, in one line; empty if only the weights are stated."""
    work = planned.forecast.work
    if work is None:
        return ""
    if isinstance(work, ServingWorkload):
        source = f" and {work.source:,} of the encoder" if work.source else ""
        kv = f", cache in {work.kv_dtype}" if work.kv_dtype else ""
        shared = f", shared by {work.decode_cp} ranks" if work.decode_cp > 1 else ""
        version = ".".join(map(str, work.budget.version or ())) if work.budget else ""
        named = f"{work.budget.engine} {version}".strip() if work.budget else ""
        engine = f", {named} with {work.budget.utilization:g} of the device" if work.budget else ""
        return f"serve: {format_plural(work.batch, 'sequence')} of {work.context:,} tokens{source}{kv}{shared}{engine}"
    piped = f", {work.schedule}" if planned.mesh.degree("pp") > 1 else ""
    passes = work.count_passes(planned.mesh.degree("pp"))
    many = "microbatch" if passes == 1 else "microbatches"
    steps = f", {passes:,} {many}{piped}" if work.microbatches or passes > 1 else ""
    modules = (
        f" ({', '.join(work.recompute_modules)})"
        if work.recompute == "selective" and work.recompute_modules != ("core_attn",)
        else ""
    )
    every = f" of every {work.recompute_every} layers the last" if work.recompute_every > 1 else ""
    parts = [
        f"train: {format_plural(work.micro_batch, 'sequence')} of {work.sequence:,} tokens a rank{steps}",
        f"{work.optimizer}, ZeRO {work.zero}" if work.zero else work.optimizer,
        f"compute {work.dtype}, profile {work.profile}, recompute {work.recompute}{modules}{every}",
    ]
    more = [
        *([f"all in {work.precision}"] if work.precision != "mixed" else []),
        *([f"moments in {' and '.join(work.moment_dtypes)}"] if work.moment_dtypes else []),
        *([f"offload to {work.offload}"] if work.offload != "none" else []),
        *([f"{work.optimizer_kernel} kernels of the optimizer"] if work.optimizer_kernel else []),
        *([f"{work.allocator} segments of the allocator"] if work.allocator else []),
        *([f"loss in chunks, as {work.chunked_loss} has it"] if work.chunked_loss else []),
        *(["inputs of layers on the host, where they are not counted"] if work.offload_checkpoints else []),
        *(["optimizer steps in the backward pass"] if work.step_in_backward else []),
        *(["no sequence parallelism"] if not work.sequence_parallel else []),
        *([f"{work.attention} attention"] if work.attention != "flash" else []),
        *(["compiled layers" + " and loss" * (work.compiled == "all")] if work.compiled != "none" else []),
        *([f"{work.float8} float8{', also gathered' * work.float8_gathered}"] if work.float8 != "none" else []),
    ]
    return ", ".join([*parts, *more])
