"""What every rank of a mesh needs for a workload: holdings, and the terms of serving or training over them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardctl.memory.estimate import Estimate, gather
from shardctl.memory.holding import hold
from shardctl.memory.serving import serve
from shardctl.memory.term import Term
from shardctl.memory.training import train
from shardctl.memory.workload import Serving

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardctl.memory.holding import Holding
    from shardctl.memory.inventory import Inventory
    from shardctl.memory.workload import Training
    from shardctl.mesh import Mesh
    from shardctl.models.anatomy import Anatomy


def forecast(
    inventory: Inventory,
    anatomy: Anatomy | None,
    mesh: Mesh,
    stages: Sequence[int],
    work: Serving | Training | None,
    *,
    dtype: str,
) -> Estimate:
    """What the distinct ranks of `mesh` need; `stages` are layers per pipeline stage, `dtype` that of activations.

    Without a workload, or for a model whose layers are not described, the weights alone, which are exact.
    Raises CutError, naming a tensor, if the mesh cannot cut it.
    """
    holdings = hold(inventory, mesh, stages)
    return gather(holdings, [_terms(h, anatomy, mesh, stages, work, dtype) for h in holdings])


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
