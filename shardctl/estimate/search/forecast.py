"""Estimates what every rank of a mesh needs for a workload: what it holds, plus serving or training terms."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardctl.estimate.rank_estimate import MeshEstimate, build_estimate
from shardctl.estimate.serving.rank_serving import list_serving_terms
from shardctl.estimate.term import MemoryTerm
from shardctl.estimate.training.rank_training import add_runtime_terms, build_timeline
from shardctl.estimate.workload import ServingWorkload, TrainingWorkload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardctl.estimate.model.layer_graph import LayerGraph
    from shardctl.estimate.model.rank_shards import RankShards
    from shardctl.estimate.training.timeline import StepTimeline
    from shardctl.tensors.mesh import Mesh


def estimate_ranks(
    holdings: Sequence[RankShards],
    anatomy: LayerGraph | None,
    mesh: Mesh,
    stages: Sequence[int],
    work: ServingWorkload | TrainingWorkload | None,
    *,
    dtype: str,
    passes: bool = True,
) -> MeshEstimate:
    """Estimate what the ranks of `holdings` need; `stages` are layers per pipeline stage, `dtype` that of activations.

    Without `passes`, or training such a model, what forward passes keep is left out, and the estimate is partial.
    Without a workload, or serving a model whose layers are not described, the weights alone, which are exact.
    Raises UsageError for a workload that the runtime or the model cannot do.
    """
    partial = isinstance(work, TrainingWorkload) and (anatomy is None or not passes)
    known: dict[int, tuple[MemoryTerm, ...]] = {}
    lines: dict[int, StepTimeline] = {}
    for holding in holdings:
        if id(holding.parts) not in known:  # what is needed follows from the amounts, which many ranks share
            if isinstance(work, TrainingWorkload):
                line = build_timeline(anatomy if passes else None, holding, mesh, work, stages=stages)
                known[id(holding.parts)] = add_runtime_terms(line, mesh, work)
                lines[id(holding.parts)] = line
            else:
                known[id(holding.parts)] = _list_holding_terms(anatomy, holding, mesh, work, dtype)
    keys = [id(holding.parts) for holding in holdings]
    return replace(
        build_estimate(holdings, [known[key] for key in keys], [lines.get(key) for key in keys]), partial=partial
    )


def _list_holding_terms(
    anatomy: LayerGraph | None,
    holding: RankShards,
    mesh: Mesh,
    work: ServingWorkload | TrainingWorkload | None,
    dtype: str,
) -> tuple[MemoryTerm, ...]:
    """List what serving needs, or where nobody knows the weights alone."""
    if anatomy is None or not isinstance(work, ServingWorkload):
        return (MemoryTerm("weights", "weights", holding.nbytes),)
    return list_serving_terms(anatomy, holding, mesh, work, dtype=dtype)
