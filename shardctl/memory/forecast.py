"""What every rank of a mesh needs for a workload: what it holds, and the terms of serving or training over that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardctl.memory.estimate import Estimate, gather
from shardctl.memory.serving import serve
from shardctl.memory.term import Term
from shardctl.memory.training import train
from shardctl.memory.workload import Serving

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardctl.memory.holding import Holding
    from shardctl.memory.workload import Training
    from shardctl.mesh import Mesh
    from shardctl.models.anatomy import Anatomy


def forecast(
    holdings: Sequence[Holding],
    anatomy: Anatomy | None,
    mesh: Mesh,
    stages: Sequence[int],
    work: Serving | Training | None,
    *,
    dtype: str,
) -> Estimate:
    """What the ranks of `holdings` need; `stages` are layers per pipeline stage, `dtype` that of activations.

    Without a workload, or for a model whose layers are not described, the weights alone, which are exact.
    Raises UsageError for a workload that the runtime or the model cannot do.
    """
    known: dict[int, tuple[Term, ...]] = {}
    for holding in holdings:
        if id(holding.parts) not in known:  # what is needed follows from the amounts, which many ranks share
            known[id(holding.parts)] = _terms(holding, anatomy, mesh, stages, work, dtype)
    return gather(holdings, [known[id(holding.parts)] for holding in holdings])


def _terms(
    holding: Holding,
    anatomy: Anatomy | None,
    mesh: Mesh,
    stages: Sequence[int],
    work: Serving | Training | None,
    dtype: str,
) -> tuple[Term, ...]:
    if work is None or anatomy is None:
        return (Term("weights", "weights", holding.nbytes),)
    if isinstance(work, Serving):
        return serve(anatomy, holding, mesh, work, dtype=dtype)
    return train(anatomy, holding, mesh, work, stages=stages)
