"""Renders the result of `plan` as a JSON document, as `plan_schema.json` describes it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from shardctl.estimate.term import COUNTERS, sum_terms
from shardctl.estimate.workload import ServingWorkload
from shardctl.planning.forecast import BUSY
from shardctl.report.documents import Document, build_document_head, build_extra_document, build_mesh_fields
from shardctl.report.step_moments import build_moments_document

if TYPE_CHECKING:
    from shardctl.estimate.search.cost import MeshCost
    from shardctl.estimate.search.mesh_comparison import MeshCandidate
    from shardctl.estimate.term import MemorySum, MemoryTerm, Tier
    from shardctl.estimate.training.calibrate import FittedCalibration
    from shardctl.estimate.training.comparison import ShardingStrategy
    from shardctl.planning.forecast import WorkloadEstimate
    from shardctl.planning.mesh_search import MeshExploration
    from shardctl.planning.plan_result import ConversionCost, PlanResult


def build_plan_document(result: PlanResult) -> Document:
    """Build what `plan` says."""
    return build_document_head("plan", answer=result.fits) | build_plan_fields(result)


def build_rehearsal_document(result: PlanResult, destination: str) -> Document:
    """Build what `reshard --dry-run` says."""
    return build_document_head("reshard") | {
        "dry_run": True,
        "verdict": result.describe_writing(destination),
        "destination": destination,
        "plan": build_plan_fields(result),
    }


def build_plan_fields(result: PlanResult) -> Document:
    """Build the plan itself, for `plan` and for `reshard --dry-run`."""
    groups: list[tuple[MemoryTerm, ...]] = []
    places = []
    for need in result.forecast.estimate.ranks:
        if need.terms not in groups:
            groups.append(need.terms)
        places.append(groups.index(need.terms))
    return {
        "path": result.path,
        "layout": result.layout,
        "architecture": result.architecture,
        "parameters": result.parameters,
        "weight_bytes": result.weight_bytes,
        "weight_types": list(result.weight_types),
        "quantised_degrees": {axis: asdict(degrees) for axis, degrees in result.quantised_degrees.items()},
        "mesh": build_mesh_fields(result.mesh),
        "stages": [asdict(stage) for stage in result.stages],
        "ranks": [asdict(rank) | {"needs": place} for rank, place in zip(result.ranks, places, strict=True)],
        "needs": [_build_needs(terms) for terms in groups],
        "timeline": build_moments_document(result.forecast.estimate.binding),
        "replication": result.replication,
        "purpose": _build_purpose(result.forecast, result.mesh.degree("pp")),
        "device": _build_device(result.forecast),
        "verdict": _build_verdict(result),
        "cost": _build_cost(result.forecast.cost) if result.forecast.cost else None,
        "run": _build_run(result.forecast),
        "offload": _build_offload(result.forecast),
        "strategies": [_build_strategy(one) for one in result.forecast.strategies],
        "calibration": _build_calibration(result.forecast.calibration) if result.forecast.calibration else None,
        "search": _build_search(result.explored) if result.explored else None,
        "advice": [
            {
                "change": one.change,
                "options": one.options,
                "total_bytes": one.nbytes,
                "saved_bytes": one.saved,
                "fits": None if one.partial and one.fits else one.fits,
            }
            for one in result.counsel.advice
        ],
        "types": [
            {
                "dtype": one.dtype,
                "devices": one.devices,
                "mesh": build_mesh_fields(one.candidate.mesh) if one.candidate else None,
                "weight_bytes": one.weights,
            }
            for one in result.counsel.types
        ],
        "conversion": _build_cost_document(result.conversion) if result.conversion else None,
        "adapter": asdict(result.adapter) if result.adapter else None,
        **({"extra_tensors": build_extra_document(result.extra)} if result.extra else {}),
        "warnings": list(result.warnings),
    }


def _build_needs(terms: tuple[MemoryTerm, ...]) -> Document:
    """Build what each of some ranks needs, by tier and term by term; of what is on the device always."""
    tiers: tuple[Tier, ...] = ("device", "host", "nvme")
    sums = {tier: sum_terms(terms, tier) for tier in tiers}
    totals = {tier: _build_sum(s) for tier, s in sums.items() if tier == "device" or s.nbytes}
    counters = {counter: _build_sum(sum_terms(terms, counter=counter)) for counter in COUNTERS}
    return {"totals": totals, "counters": counters, "terms": [_build_term(term) for term in terms]}


def _build_sum(some: MemorySum) -> Document:
    return {"total_bytes": some.nbytes, "low_bytes": some.low, "high_bytes": some.high, "exact": some.exact}


def _build_term(term: MemoryTerm) -> Document:
    return {
        "name": term.name,
        "category": term.category,
        "tier": term.tier,
        "counter": term.counter,
        "spared": term.spared,
        "exact": term.exact,
        "term_bytes": term.nbytes,
        "low_bytes": term.low,
        "high_bytes": term.high,
        "formula": term.formula,
        "inputs": dict(term.inputs),
        "source": term.source,
    }


def _build_purpose(seen: WorkloadEstimate, stages: int) -> Document:
    use, passes = None, {}
    if isinstance(seen.work, ServingWorkload):
        use = "serve"
    elif seen.work is not None:
        use, passes = "train", {"microbatches": seen.work.count_passes(stages)}
    return {
        "use": use,
        "why_not": seen.unmodelled,
        "workload": asdict(seen.work) | passes if seen.work is not None else None,
        "quantised": seen.quantised or None,
        "dequantised": seen.dequantised,
        "longest_context": seen.longest_context,
        "largest_batch": seen.largest_batch,
        "room": _build_room(seen),
        "positions": seen.positions,
    }


def _build_room(seen: WorkloadEstimate) -> Document | None:
    if seen.room is None:
        return None
    tokens, low, high = seen.room.count_tokens()
    return {
        "cache_bytes": seen.room.nbytes,
        "low_bytes": seen.room.low,
        "high_bytes": seen.room.high,
        "tokens": tokens,
        "low_tokens": low,
        "high_tokens": high,
        "sequences": seen.largest_batch,
        "low_sequences": seen.batch_interval[0],
        "high_sequences": seen.batch_interval[1],
        "logged_concurrency": round(seen.room.concurrency, 2),
    }


def _build_device(seen: WorkloadEstimate) -> Document | None:
    if seen.device is None:
        return None
    return {
        "name": seen.device.name,
        "memory_bytes": seen.device.memory_bytes,
        "usable_bytes": seen.device.usable_bytes,
        "measured_by": seen.device.measured_by or None,
        "source": seen.device.source,
    }


def _build_run(seen: WorkloadEstimate) -> Document | None:
    """Build the time and the price of a whole run; None if neither was asked for."""
    if seen.run_tokens is None and seen.price is None:
        return None
    return {
        "tokens": seen.run_tokens,
        "days": seen.run_days,
        "device_hour_price": seen.price,
        "million_tokens_price": seen.million_price,
        "price": seen.run_price,
    }


def _build_offload(seen: WorkloadEstimate) -> Document | None:
    if not seen.links and not seen.nodes:
        return None
    return {
        "node_bytes": {tier: some.nbytes for tier, some in seen.nodes.items()},
        "busy": BUSY,
        "operations_per_second": seen.peak,
        "links": [
            {
                "what": need.what,
                "tier": need.tier,
                "operations_per_byte": need.intensity,
                "device_bytes_per_second": need.bandwidth,
                "link_bytes_per_second": need.link,
                "source": need.source,
            }
            for need in seen.links
        ],
    }


def _build_verdict(result: PlanResult) -> Document:
    estimate, whole = result.forecast.estimate, result.forecast.estimate.binding.total()
    return {
        "answer": result.answer,
        "text": result.verdict,
        "binding_rank": estimate.binding.holding.rank,
        "total_bytes": whole.nbytes,
        "low_bytes": whole.low,
        "high_bytes": whole.high,
        "budget_bytes": estimate.budget,
        "partial": estimate.partial,
        "fits": estimate.fits,
        "certain": estimate.certain,
    }


def _build_strategy(one: ShardingStrategy) -> Document:
    return {
        "name": one.name,
        "zero": one.zero,
        "state_bytes": one.nbytes,
        "reduction": one.reduction,
        "sent_bytes": one.sent_bytes,
        "relative": one.relative,
        "formula": one.formula,
        "inputs": dict(one.inputs),
        "source": one.source,
    }


def _build_calibration(fitted: FittedCalibration) -> Document:
    return {
        "scale": fitted.scale,
        "overhead_bytes": fitted.overhead,
        "worst_before": fitted.worst_before,
        "worst_after": fitted.worst_after,
        "lines": [
            {
                "line": one.measurement.line,
                "mesh": build_mesh_fields(one.measurement.mesh),
                "microbatches": one.measurement.work.count_passes(one.measurement.mesh.degree("pp")),
                "counter": one.measurement.counter,
                "peak_bytes": one.measurement.peak,
                "before_bytes": one.before,
                "after_bytes": one.after,
            }
            for one in fitted.lines
        ],
    }


def _build_search(explored: MeshExploration) -> Document:
    found, fewest = explored.found, explored.fewest
    return {
        "devices": found.devices,
        "sequences": explored.sequences,
        "ranked": [_build_candidate(one) | {"settings": one.settings} for one in found.ranked],
        "rejected": [
            {"what": one.what, "why": one.why, "reason": one.reason, "over_bytes": one.over} for one in found.rejected
        ],
        "fewest": _build_candidate(fewest.candidate) if fewest else None,
        "fewer": {"refused": fewest.refused, "least": fewest.least, "all_tried": fewest.every} if fewest else None,
        "settings": [
            {
                "options": one.options,
                "changes": [change.change for change in one.changes],
                "exact": one.exact,
                "timed": one.timed,
                "host_bytes": one.host_bytes,
            }
            | _build_candidate(one.candidate)
            for one in explored.settings
        ],
        "recomputed": _build_candidate(explored.recomputed) if explored.recomputed else None,
    }


def _build_candidate(one: MeshCandidate) -> Document:
    return {
        "mesh": build_mesh_fields(one.mesh),
        "stages": list(one.stages),
        "peak_bytes": one.peak,
        "spare_bytes": one.slack if one.estimate.budget is not None else None,
        "cost": _build_cost(one.cost) if one.cost else None,
    }


def _build_cost(cost: MeshCost) -> Document:
    return {
        "device": cost.device,
        "seconds": cost.seconds,
        "tokens": cost.tokens,
        "microbatches": cost.microbatches,
        "device_seconds_per_token": cost.score,
        "tokens_per_second": cost.rate,
        "model_flops_utilization": cost.utilization,
        "first_token_seconds": cost.first_token_seconds,
        "shares": [
            {"name": s.name, "seconds": s.seconds, "moved_bytes": s.nbytes, "formula": s.formula} for s in cost.shares
        ],
    }


def _build_cost_document(cost: ConversionCost) -> Document:
    found = asdict(cost) | {"seconds": cost.seconds}
    del found["changes"]  # which the verdict of a rehearsal says
    return found
