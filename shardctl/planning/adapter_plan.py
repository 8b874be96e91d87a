"""Says what a plan of an adapter counts beside its own weights, and what it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardctl.base.amounts import format_memory_size
from shardctl.base.value import value_class
from shardctl.estimate.model.rank_shards import list_rank_shards
from shardctl.estimate.training.states import FROZEN
from shardctl.estimate.workload import ServingWorkload, TrainingWorkload

if TYPE_CHECKING:
    from shardctl.estimate.model.rank_shards import RankShards
    from shardctl.estimate.rank_estimate import RankEstimate
    from shardctl.planning.estimated_model import EstimatedModel
    from shardctl.planning.forecast import WorkloadEstimate
    from shardctl.tensors.mesh import Mesh


@value_class
class AdapterPlan:
    """An adapter beside its base."""

    base: str
    """The architecture of its base; empty if that is not known, and then not counted."""
    base_bytes: int | None
    """Of the weights of the base, each once; None if that is not known."""
    base_rank_bytes: int | None
    """Those of the rank that has most."""
    slot_bytes: int
    """What the rank that has most of it holds of the adapter."""
    uncounted: tuple[str, ...]
    """What is needed besides and not counted."""


def hold_adapter(about: EstimatedModel, mesh: Mesh, stages: tuple[int, ...]) -> tuple[RankShards, ...] | None:
    """Return what the ranks hold of an adapter alone; None of a model."""
    return list_rank_shards(about.base.adapter, mesh, stages) if about.base is not None else None


def plan_adapter(about: EstimatedModel, seen: WorkloadEstimate, own: tuple[RankShards, ...]) -> AdapterPlan | None:
    """Say what is counted of an adapter's base; None of a model. `own` are what ranks hold of the adapter."""
    if about.base is None:
        return None
    slot = max(holding.nbytes for holding in own)
    known = about.base.known
    return AdapterPlan(
        base=about.base.architecture,
        base_bytes=about.inventory.nbytes - about.base.adapter.nbytes if known else None,
        base_rank_bytes=max(map(_count_base_bytes, seen.estimate.ranks, own)) if known else None,
        slot_bytes=slot,
        uncounted=tuple(_list_uncounted(seen, slot, known=known, experts=_adapts_experts(own))),
    )


def _count_base_bytes(rank: RankEstimate, own: RankShards) -> int:
    """Count what a rank keeps of the base, of which ZeRO-3 leaves it a part, on its device or not."""
    frozen = [term.nbytes for term in rank.terms if term.name == FROZEN]
    return frozen[0] if frozen else rank.holding.nbytes - own.nbytes


def _adapts_experts(own: tuple[RankShards, ...]) -> bool:
    """Return whether some rank has an expert's part of the adapter."""
    return any(part.kind.spec.of_expert for holding in own for part in holding.parts)


def _list_uncounted(seen: WorkloadEstimate, slot: int, *, known: bool, experts: bool) -> list[str]:
    found = []
    if not known:
        found.append("the base, because no config says which model it is (--config PATH of the base)")
    if isinstance(seen.work, TrainingWorkload):
        if experts:
            found.append("what adapters of experts keep of a forward pass")
    else:
        size = format_memory_size(slot)
        found.append(
            f"further adapters: an engine needs {size} a rank for each that it holds at once, and more where its slots "
            "are for higher ranks (vLLM: --max-loras, --max-lora-rank)"
        )
    if isinstance(seen.work, ServingWorkload):
        found.append("buffers of the engine's kernels for adapters")
    return found
