"""What `plan` says, as a JSON document; `docs/schema/plan.json` is its published form."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from shardctl.memory.workload import Serving
from shardctl.report.documents import Document, head, mesh_fields

if TYPE_CHECKING:
    from shardctl.memory.estimate import Estimate, RankEstimate
    from shardctl.memory.term import Term, Tier
    from shardctl.verbs.forecasting import Forecast
    from shardctl.verbs.plan import Planned, RankPlan


def planned(result: Planned) -> Document:
    """What `plan` says."""
    return head("plan", answer=result.fits) | plan_fields(result)


def rehearsed(result: Planned, destination: str) -> Document:
    """What `reshard --dry-run` says."""
    return head("reshard") | {"dry_run": True, "destination": destination, "plan": plan_fields(result)}


def plan_fields(result: Planned) -> Document:
    """The plan itself, for `plan` and for `reshard --dry-run`."""
    needs = result.forecast.estimate.ranks
    return {
        "path": result.path,
        "layout": result.layout,
        "architecture": result.architecture,
        "parameters": result.parameters,
        "weight_bytes": result.weight_bytes,
        "mesh": mesh_fields(result.mesh),
        "stages": [asdict(stage) for stage in result.stages],
        "ranks": [_rank(rank, need) for rank, need in zip(result.ranks, needs, strict=True)],
        "replication": result.replication,
        "purpose": _purpose(result.forecast),
        "device": _device(result.forecast),
        "verdict": _verdict(result.forecast.estimate),
        "conversion": asdict(result.conversion) if result.conversion else None,
        "warnings": list(result.warnings),
    }


def _rank(rank: RankPlan, need: RankEstimate) -> Document:
    tiers: tuple[Tier, ...] = ("device", "host", "nvme")
    sums = {tier: need.total(tier) for tier in tiers}
    totals = {
        tier: {"total_bytes": s.nbytes, "low_bytes": s.low, "high_bytes": s.high, "exact": s.exact}
        for tier, s in sums.items()
        if tier == "device" or s.nbytes
    }
    return asdict(rank) | {"needs": totals, "terms": [_term(term) for term in need.terms]}


def _term(term: Term) -> Document:
    return {
        "name": term.name,
        "category": term.category,
        "tier": term.tier,
        "exact": term.exact,
        "term_bytes": term.nbytes,
        "low_bytes": term.low,
        "high_bytes": term.high,
        "formula": term.formula,
        "inputs": dict(term.inputs),
        "source": term.source,
    }


def _purpose(seen: Forecast) -> Document:
    if seen.work is None:
        return {"use": None, "why_not": seen.unmodelled, "workload": None}
    use = "serve" if isinstance(seen.work, Serving) else "train"
    return {"use": use, "why_not": "", "workload": asdict(seen.work)}


def _device(seen: Forecast) -> Document | None:
    if seen.device is None:
        return None
    return {
        "name": seen.device.name,
        "memory_bytes": seen.device.memory_bytes,
        "usable_bytes": seen.device.usable_bytes,
        "source": seen.device.source,
    }


def _verdict(estimate: Estimate) -> Document:
    whole = estimate.binding.total()
    return {
        "binding_rank": estimate.binding.holding.rank,
        "total_bytes": whole.nbytes,
        "low_bytes": whole.low,
        "high_bytes": whole.high,
        "budget_bytes": estimate.budget,
        "fits": estimate.fits,
        "certain": estimate.certain,
    }
