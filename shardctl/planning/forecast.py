"""Estimates what every rank of a mesh needs for a purpose, whether it fits, and how much more would."""

from __future__ import annotations

from dataclasses import field, replace
from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import SourceError, UnsupportedError, UsageError
from shardctl.base.value import value_class
from shardctl.estimate.model.heaviest import HeaviestRanks
from shardctl.estimate.model.operations import compute_used_share
from shardctl.estimate.model.rank_shards import list_rank_shards
from shardctl.estimate.search.cost import REFERENCE, MeshCost, price_mesh
from shardctl.estimate.search.forecast import estimate_ranks
from shardctl.estimate.search.mesh_comparison import WeightTotals
from shardctl.estimate.serving.rank_serving import (
    CacheRoom,
    find_largest_batch,
    find_longest_context,
    measure_cache_room,
)
from shardctl.estimate.term import MemoryTerm
from shardctl.estimate.training.calibrate import FittedCalibration, PeakMeasurement, fit_calibration, parse_measurements
from shardctl.estimate.training.comparison import USUAL_GRADIENT, ShardingStrategy, list_strategies
from shardctl.estimate.training.offload import LinkNeed, sum_heaviest_node
from shardctl.estimate.training.offload import list_link_needs as links
from shardctl.estimate.training.optimizers import build_plain_optimizer, get_optimizer
from shardctl.estimate.workload import ServingWorkload, TrainingWorkload
from shardctl.hardware.devices import get_device
from shardctl.planning.workload import plan_workload
from shardctl.storage.bounded_text import CONFIG_TEXT, read_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardctl.estimate.model.rank_shards import RankShards
    from shardctl.estimate.rank_estimate import MeshEstimate
    from shardctl.estimate.term import MemorySum, Tier
    from shardctl.hardware.devices import DeviceSpec
    from shardctl.options import PlanOptions
    from shardctl.planning.estimated_model import EstimatedModel
    from shardctl.tensors.mesh import Mesh


@value_class
class WorkloadEstimate:
    """What every device needs for a purpose."""

    estimate: MeshEstimate
    work: ServingWorkload | TrainingWorkload | None
    """None if only the weights are stated."""
    dtype: str
    """Of activations; safetensors' name."""
    device: DeviceSpec | None = None
    unmodelled: str = ""
    """Why only the weights are stated, or in training all but activations, if so."""
    longest_context: int | None = None
    """In serving, the most tokens per sequence that fit the device at this batch; None if memory does not limit it."""
    largest_batch: int | None = None
    """The most sequences that fit at this context; None likewise."""
    room: CacheRoom | None = None
    """In serving, what the device leaves for caches; None without a device, or for a model without caches."""
    batch_interval: tuple[int | None, int | None] = (None, None)
    """`largest_batch` at both ends of the interval of that room."""
    positions: int | None = None
    """The most tokens per sequence that the model was made for, where its config says so."""
    strategies: tuple[ShardingStrategy, ...] = ()
    """In training, what plain data parallelism and ZeRO-1 to 3 would leave of the model's states on each device."""
    quantised: str = ""
    """The type that the weights are taken to have, though nobody has quantized them yet."""
    dequantised: bool = False
    """Whether the weights are those that stored codes stand for, because codes cannot be trained."""
    calibration: FittedCalibration | None = None
    """What measured peaks made of the estimate."""
    links: tuple[LinkNeed, ...] = ()
    """Where training offloads states, what must be moved how fast for a device to compute `BUSY` of the time."""
    peak: float = 0.0
    """The operations per second of the device that `list_link_needs` keep busy."""
    nodes: Mapping[Tier, MemorySum] = field(default_factory=dict)
    """By tier what the ranks of that node offload which offloads most."""
    cost: MeshCost | None = None
    """What the mesh takes for a step or a token; None where the speed of its devices or the model is not known."""


BUSY: Final = 0.9
"""The part of the time that a device computes while states are moved, for which links are to suffice."""


def estimate_workload(
    about: EstimatedModel, mesh: Mesh, stages: tuple[int, ...], plan_options: PlanOptions | None
) -> WorkloadEstimate:
    """Estimate what every rank of `mesh` needs; without a purpose, the weights alone.

    Raises PartitionError for a mesh that does not fit the tensors, UsageError for options that contradict each other,
    SourceError for measurements that cannot be read.
    """
    holdings = list_rank_shards(about.inventory, mesh, stages)
    if plan_options is None:
        return WorkloadEstimate(
            estimate_ranks(holdings, None, mesh, stages, None, dtype=about.dtype), None, about.dtype
        )
    work, unmodelled = plan_workload(plan_options, about, mesh), about.unmodelled
    try:
        estimate = estimate_needs(about, holdings, mesh, stages, work)
    except UnsupportedError as error:
        unmodelled = error.message
        estimate = estimate_needs(about, holdings, mesh, stages, work, passes=False)
    seen = WorkloadEstimate(
        estimate, work, about.dtype, plan_options.device, unmodelled, quantised=plan_options.quantized_type or ""
    )
    seen = replace(seen, dequantised=about.dequantised)
    if about.anatomy is not None:
        seen = replace(seen, positions=about.anatomy.positions)
    if isinstance(work, TrainingWorkload):
        if plan_options.calibration is not None:
            fit = calibrate_from_log(about, work, mesh, plan_options.calibration)
            seen = replace(seen, estimate=apply_calibration(estimate, fit), calibration=fit)
        devices = plan_options.devices or mesh.world
        compared = _compare_strategies(about.parameters, devices, work)
        seen = replace(seen, strategies=compared)
        seen = _add_offload(seen, about, work, mesh)
    if plan_options.device is None:
        return seen
    budget = plan_options.device.usable_bytes
    # Of a model whose layers nobody knows, only the weights are counted.
    partial = seen.estimate.partial or work is None
    seen = replace(seen, estimate=replace(seen.estimate.within(budget), partial=partial))
    if about.anatomy is not None and work is not None and not partial and _is_timed(work, plan_options.device):
        cost = price_mesh(about.anatomy, seen.estimate, mesh, work, plan_options.device, dtype=about.dtype)
        seen = replace(seen, cost=cost)
    if not isinstance(work, ServingWorkload) or about.anatomy is None:
        return seen
    context, batch = (
        most(about.anatomy, holdings, mesh, work, dtype=about.dtype, budget=budget)
        for most in (find_longest_context, find_largest_batch)
    )
    seen = replace(seen, longest_context=context, largest_batch=batch)
    room = measure_cache_room(about.anatomy, holdings, mesh, work, dtype=about.dtype, budget=budget)
    if room is None:
        return seen
    low, high = (
        find_largest_batch(about.anatomy, holdings, mesh, work, dtype=about.dtype, budget=budget + end - room.nbytes)
        for end in (room.low, room.high)
    )
    return replace(seen, room=room, batch_interval=(low, high))


def _is_timed(work: ServingWorkload | TrainingWorkload, device: DeviceSpec) -> bool:
    """Return whether the speed is known; that of fp32 is of no device."""
    return device.timed and not (isinstance(work, TrainingWorkload) and work.precision == "fp32")


def _compare_strategies(parameters: int, devices: int, work: TrainingWorkload) -> tuple[ShardingStrategy, ...]:
    """Compare data parallelism and the ZeRO stages for the types of `work`."""
    known, width = get_optimizer(work.optimizer), BY_NAME[work.dtype].unit_bytes
    if known.spreads:
        return ()  # ZeRO cuts flat vectors, which have nothing to precondition
    if work.precision != "mixed":
        known = build_plain_optimizer(known)
    states = known.per_parameter * (width / USUAL_GRADIENT if work.precision == "fp32" else 1)
    usual = width if work.precision == "fp32" else USUAL_GRADIENT
    gradient = BY_NAME[work.gradient_dtype].unit_bytes if work.gradient_dtype else usual
    return list_strategies(parameters, devices, parameter=width, gradient=gradient, optimizer=states)


def _add_offload(seen: WorkloadEstimate, about: EstimatedModel, work: TrainingWorkload, mesh: Mesh) -> WorkloadEstimate:
    """Add what must be moved between tiers, and what the nodes have there; the reference where no speed is known."""
    if work.offload == "none":
        return seen
    on = seen.device if seen.device is not None and seen.device.timed else get_device(REFERENCE)
    tiers: tuple[Tier, ...] = ("host", "nvme")
    nodes = {tier: sum_heaviest_node(seen.estimate, mesh, tier, per_node=on.per_node) for tier in tiers}
    held = {tier: some for tier, some in nodes.items() if some.high}
    share = compute_used_share(about.anatomy, seen.estimate.binding.holding, mesh) if about.anatomy is not None else 1.0
    moved = links(mesh, work, peak=on.flops_bf16, target=BUSY, used=share)
    return replace(seen, links=moved, peak=on.flops_bf16, nodes=held)


def estimate_needs(
    about: EstimatedModel,
    holdings: tuple[RankShards, ...],
    mesh: Mesh,
    stages: tuple[int, ...],
    work: ServingWorkload | TrainingWorkload | None,
    *,
    passes: bool = True,
) -> MeshEstimate:
    """Estimate what the ranks of `holdings` need, without `passes` but for activations.

    The weights of a model that nobody has quantized yet are modelled.
    """
    estimate = estimate_ranks(holdings, about.anatomy, mesh, stages, work, dtype=about.dtype, passes=passes)
    estimate = _add_beside_models(estimate, about, mesh)
    layout = about.quantised
    if layout is None:
        return estimate

    def modelled(term: MemoryTerm) -> MemoryTerm:
        if term.category != "weights" or not term.exact:
            return term
        return replace(term, interval=(term.nbytes, term.nbytes), formula=layout.formula, source=layout.source)

    ranks = tuple(replace(rank, terms=tuple(map(modelled, rank.terms))) for rank in estimate.ranks)
    return replace(estimate, ranks=ranks)


def _add_beside_models(estimate: MeshEstimate, about: EstimatedModel, mesh: Mesh) -> MeshEstimate:
    """Add the weights of models beside the trained one, each divided into stages of its own.

    Of a stage the rank that holds most is counted. Raises UsageError for a mesh that one of them cannot have.
    """
    if not about.beside:
        return estimate
    held = [(one.name, one.heaviest.hold(mesh, one.totals.stages(mesh))) for one in about.beside]
    source = (
        "the headers; what its forward passes need, which are without gradients, is taken to be less than training's"
    )
    terms = [
        tuple(MemoryTerm(f"weights of {name}", "weights", ranks[n].nbytes, source=source) for name, ranks in held)
        for n in range(mesh.degree("pp"))
    ]
    ranks = tuple(replace(rank, terms=(*rank.terms, *terms[rank.holding.stage])) for rank in estimate.ranks)
    return replace(estimate, ranks=ranks)


def calibrate_from_log(
    about: EstimatedModel, work: TrainingWorkload, mesh: Mesh, log: Path | FittedCalibration
) -> FittedCalibration:
    """Return what the peaks of a log make of the estimate; `work` and `mesh` are what its lines leave out.

    Raises SourceError for a log that cannot be read, and UsageError for one that nothing can be fitted to.
    """
    if isinstance(log, FittedCalibration):
        return log
    try:
        text = read_file(log, CONFIG_TEXT).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{log} cannot be read: {error}") from error
    heaviest = HeaviestRanks(about.inventory)
    totals = {even: WeightTotals(about.inventory, even) for even in (False, True)}

    def terms(run: PeakMeasurement) -> tuple[MemoryTerm, ...]:
        stages = totals[run.work.profile == "megatron"].stages(run.mesh)
        return estimate_needs(about, heaviest.hold(run.mesh, stages), run.mesh, stages, run.work).binding.terms

    found = parse_measurements(text, work, mesh)
    if not found:
        raise UsageError(f"{log} has no measured peak", hint="write one JSON object a line; docs/planning.md says how")
    return fit_calibration(found, terms)


def apply_calibration(estimate: MeshEstimate, calibration: FittedCalibration | None) -> MeshEstimate:
    """Return the estimate with fitted coefficients, if any are."""
    if calibration is None:
        return estimate
    ranks = tuple(replace(rank, terms=calibration.apply(rank.terms), timeline=None) for rank in estimate.ranks)
    return replace(estimate, ranks=ranks)
