"""Tabulates what the heaviest rank needs at other contexts and batches, for the same mesh."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import ShardctlError
from shardctl.base.value import value_class
from shardctl.estimate.workload import ServingWorkload, TrainingWorkload
from shardctl.planning.forecast import apply_calibration, estimate_needs

if TYPE_CHECKING:
    from shardctl.estimate.model.rank_shards import RankShards
    from shardctl.planning.plan_result import PlanResult

_CONTEXT_LENGTH_MULTIPLES: Final = (0.125, 0.25, 0.5, 1, 2, 4)
_BATCH_SIZE_MULTIPLES: Final = (0.25, 0.5, 1, 2, 4, 8)
"""Multiples of what was asked for."""


@value_class
class NeedsTable:
    """Bytes of the heaviest rank by tokens per sequence and by sequences."""

    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    """In training, sequences of one forward pass."""
    rows: tuple[tuple[int | None, ...], ...]
    """A row for each context; None where the runtime cannot do it."""


def tabulate_needs(planned: PlanResult) -> NeedsTable | None:
    """Estimate around the workload of a plan; None where activations or caches are not modelled."""
    work, model = planned.forecast.work, planned.model
    if work is None or model is None or model.anatomy is None or planned.forecast.estimate.partial:
        return None
    context, batch = _read_sizes(work)
    contexts = tuple(sorted({max(1, int(context * by)) for by in _CONTEXT_LENGTH_MULTIPLES}))
    batches = tuple(sorted({max(1, int(batch * by)) for by in _BATCH_SIZE_MULTIPLES}))
    rows = tuple(tuple(_estimate_peak(planned, work, one, many) for many in batches) for one in contexts)
    return NeedsTable(contexts, batches, rows)


def _read_sizes(work: ServingWorkload | TrainingWorkload) -> tuple[int, int]:
    if isinstance(work, ServingWorkload):
        return work.context, work.batch
    return work.sequence, work.micro_batch


def _estimate_peak(
    planned: PlanResult, work: ServingWorkload | TrainingWorkload, context: int, batch: int
) -> int | None:
    """Estimate the rank that needs most; of ranks of a stage that differ, the one that holds most decides."""
    if isinstance(work, ServingWorkload):
        asked: ServingWorkload | TrainingWorkload = replace(work, context=context, batch=batch)
    else:
        asked = replace(work, sequence=context, micro_batch=batch)
    assert planned.model is not None  # noqa: S101 - its caller has asked
    stages = tuple(stage.layers for stage in planned.stages) or (planned.model.inventory.layers,)
    try:
        found = estimate_needs(planned.model, _list_heaviest(planned), planned.mesh, stages, asked)
    except ShardctlError:  # a length that does not divide, or more sequences than the engine has rows for
        return None
    return apply_calibration(found, planned.forecast.calibration).binding.total().nbytes


def _list_heaviest(planned: PlanResult) -> tuple[RankShards, ...]:
    stages: dict[int, RankShards] = {}
    for rank in planned.forecast.estimate.distinct:
        known = stages.get(rank.holding.stage)
        if known is None or rank.holding.nbytes > known.nbytes:
            stages[rank.holding.stage] = rank.holding
    return tuple(stages.values())
