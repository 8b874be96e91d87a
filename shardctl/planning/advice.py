"""Finds what would have to change if a model does not fit its devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UnsupportedError, UsageError
from shardctl.base.value import value_class
from shardctl.estimate.model.allowed_degrees import AllowedDegrees
from shardctl.estimate.model.heaviest import HeaviestRanks
from shardctl.estimate.search.advice import (
    EstimateRequest,
    FewestDevices,
    TriedChange,
    advise_changes,
    find_fewest_by_type,
)
from shardctl.estimate.search.mesh_comparison import SERVING, SearchSpace, WeightTotals
from shardctl.estimate.workload import ServingWorkload, TrainingWorkload
from shardctl.planning.forecast import apply_calibration, estimate_needs

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardctl.estimate.model.inventory import TensorInventory
    from shardctl.estimate.rank_estimate import MeshEstimate
    from shardctl.planning.estimated_model import EstimatedModel
    from shardctl.planning.forecast import WorkloadEstimate
    from shardctl.tensors.mesh import Mesh

_SUGGESTED_WEIGHT_TYPES: Final = ("bf16", "fp8", "int4")


@value_class
class PlanAdvice:
    """Changes that were tried, those that are enough first; and how few devices serving needs in each type."""

    advice: tuple[TriedChange, ...] = ()
    types: tuple[FewestDevices, ...] = ()


def advise_plan(about: EstimatedModel, mesh: Mesh, seen: WorkloadEstimate) -> PlanAdvice:
    """Return what to change; nothing where it fits, or where nobody knows whether it does.

    Of a partial estimate, changes are estimated as partially: what they reach is the least that is needed.
    """
    if seen.estimate.fits is not False or seen.device is None or seen.work is None:
        return PlanAdvice()
    budget, work = seen.device.usable_bytes, seen.work
    subjects: dict[str | None, tuple[EstimatedModel, HeaviestRanks, WeightTotals]] = {}

    def attempt(ask: EstimateRequest) -> MeshEstimate:
        if ask.dtype not in subjects:
            other = about.if_quantized(ask.dtype)
            even = isinstance(work, TrainingWorkload) and work.profile == "megatron"
            subjects[ask.dtype] = other, HeaviestRanks(other.inventory), WeightTotals(other.inventory, even)
        other, heaviest, bulk = subjects[ask.dtype]
        stages = bulk.stages(ask.mesh)
        try:
            held = heaviest.hold(ask.mesh, stages)
            found = estimate_needs(other, held, ask.mesh, stages, ask.work, passes=not seen.estimate.partial)
        except UnsupportedError as error:
            raise UsageError(error.message) from error
        return apply_calibration(found, seen.calibration)

    law = AllowedDegrees(about.inventory, work.sequence if isinstance(work, TrainingWorkload) else None)
    solved = seen.largest_batch, seen.longest_context
    advice = advise_changes(
        EstimateRequest(mesh, work), attempt, budget, law=law, per_node=seen.device.per_node, solved=solved
    )
    return PlanAdvice(advice, _find_fewest_by_type(about, seen, budget) if isinstance(work, ServingWorkload) else ())


def _find_fewest_by_type(about: EstimatedModel, seen: WorkloadEstimate, budget: int) -> tuple[FewestDevices, ...]:
    """Find how few devices each type needs; nothing for a model that is quantized already."""
    assert seen.device is not None  # noqa: S101 - somebody asked whether it fits

    def estimator(inventory: TensorInventory) -> Callable[[Mesh, tuple[int, ...]], MeshEstimate]:
        heaviest = HeaviestRanks(inventory)
        return lambda mesh, stages: estimate_needs(about, heaviest.hold(mesh, stages), mesh, stages, seen.work)

    try:
        space = SearchSpace(SERVING, seen.device.per_node, stored=True)
        return find_fewest_by_type(about.inventory, estimator, _SUGGESTED_WEIGHT_TYPES, space=space, budget=budget)
    except UsageError:
        return ()
