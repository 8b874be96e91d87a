"""What every rank of a mesh needs for a workload: what it holds, and the terms of serving or training over that."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardctl.memory.estimate import Estimate, gather
from shardctl.memory.serving import serve
from shardctl.memory.term import Term
from shardctl.memory.training import train
from shardctl.memory.workload import Serving, Training

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardctl.memory.holding import Holding
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
    passes: bool = True,
) -> Estimate:
    """What the ranks of `holdings` need; `stages` are layers per pipeline stage, `dtype` that of activations.

    Without `passes`, or training such a model, what forward passes keep is left out, and the estimate is partial.
    Without a workload, or serving a model whose layers are not described, the weights alone, which are exact.
    Raises UsageError for a workload that the runtime or the model cannot do.
    """
    partial = isinstance(work, Training) and (anatomy is None or not passes)
    known: dict[int, tuple[Term, ...]] = {}
    for holding in holdings:
        if id(holding.parts) not in known:  # what is needed follows from the amounts, which many ranks share
            if isinstance(work, Training):
                known[id(holding.parts)] = train(anatomy if passes else None, holding, mesh, work, stages=stages)
            else:
                known[id(holding.parts)] = _terms(anatomy, holding, mesh, work, dtype)
    return replace(gather(holdings, [known[id(holding.parts)] for holding in holdings]), partial=partial)


def _terms(
    anatomy: Anatomy | None, holding: Holding, mesh: Mesh, work: Serving | Training | None, dtype: str
) -> tuple[Term, ...]:
    """What serving needs, or where nobody knows the weights alone."""
    if anatomy is None or not isinstance(work, Serving):
        return (Term("weights", "weights", holding.nbytes),)
    return serve(anatomy, holding, mesh, work, dtype=dtype)
