"""What every rank of a mesh needs for a purpose, whether that fits, and how much more would."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from shardctl.bounded_text import CONFIG_TEXT, read_file
from shardctl.dtype import BY_NAME
from shardctl.errors import SourceError, UnsupportedError, UsageError
from shardctl.memory.calibrate import Calibration, Measurement, calibrate, read
from shardctl.memory.comparison import USUAL_GRADIENT, Strategy, strategies
from shardctl.memory.cost import REFERENCE
from shardctl.memory.devices import device
from shardctl.memory.estimate import gather
from shardctl.memory.forecast import forecast
from shardctl.memory.heaviest import Heaviest
from shardctl.memory.holding import hold
from shardctl.memory.offload import Need, node
from shardctl.memory.offload import needs as links
from shardctl.memory.operations import used
from shardctl.memory.optimizers import optimizer
from shardctl.memory.search import Bulk
from shardctl.memory.serving import largest_batch, longest_context
from shardctl.memory.workload import Serving, Training
from shardctl.verbs.purpose import plan_workload

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardctl.memory.devices import Device
    from shardctl.memory.estimate import Estimate
    from shardctl.memory.holding import Holding
    from shardctl.memory.term import Sum, Term, Tier
    from shardctl.mesh import Mesh
    from shardctl.options import PlanOptions
    from shardctl.verbs.subject import EstimatedModel


@dataclass(frozen=True, slots=True)
class Forecast:
    """What every device needs for a purpose."""

    estimate: Estimate
    work: Serving | Training | None
    """None if only the weights are stated."""
    dtype: str
    """Of activations; safetensors' name."""
    device: Device | None = None
    unmodelled: str = ""
    """Why only the weights are stated, or in training all but activations, if so."""
    longest_context: int | None = None
    """In serving, the most tokens per sequence that fit the device at this batch; None if memory does not limit it."""
    largest_batch: int | None = None
    """The most sequences that fit at this context; None likewise."""
    positions: int | None = None
    """The most tokens per sequence that the model was made for, where its config says so."""
    strategies: tuple[Strategy, ...] = ()
    """In training, what plain data parallelism and ZeRO-1 to 3 would leave of the model's states on each device."""
    quantised: str = ""
    """The type that the weights are taken to have, though nobody has quantised them yet."""
    dequantised: bool = False
    """Whether the weights are those that stored codes stand for, because codes cannot be trained."""
    calibration: Calibration | None = None
    """What measured peaks made of the estimate."""
    links: tuple[Need, ...] = ()
    """Where training offloads states, what must be moved how fast for a device to compute `BUSY` of the time."""
    peak: float = 0.0
    """The operations per second of the device that `links` keep busy."""
    nodes: Mapping[Tier, Sum] = field(default_factory=dict)
    """By tier what the ranks of that node offload which offloads most."""


BUSY: Final = 0.9
"""The part of the time that a device computes while states are moved, for which links are to suffice."""


def foresee(about: EstimatedModel, mesh: Mesh, stages: tuple[int, ...], purpose: PlanOptions | None) -> Forecast:
    """What every rank of `mesh` needs; without a purpose, the weights alone.

    Raises CutError for a mesh that does not fit the tensors, UsageError for options that contradict each other,
    SourceError for measurements that cannot be read.
    """
    holdings = hold(about.inventory, mesh, stages)
    if purpose is None:
        return Forecast(forecast(holdings, None, mesh, stages, None, dtype=about.dtype), None, about.dtype)
    work, unmodelled = plan_workload(purpose, about, mesh), about.unmodelled
    try:
        estimate = needs(about, holdings, mesh, stages, work)
    except UnsupportedError as error:
        unmodelled = error.message
        estimate = needs(about, holdings, mesh, stages, work, passes=False)
    seen = Forecast(estimate, work, about.dtype, purpose.device, unmodelled, quantised=purpose.quantised_type or "")
    seen = replace(seen, dequantised=about.dequantised)
    if about.anatomy is not None:
        seen = replace(seen, positions=about.anatomy.positions)
    if isinstance(work, Training):
        if purpose.calibration is not None:
            fit = fitted(about, work, mesh, purpose.calibration)
            seen = replace(seen, estimate=calibrated(estimate, fit), calibration=fit)
        states, devices = optimizer(work.optimizer).per_parameter, purpose.devices or mesh.world
        gradient = BY_NAME[work.gradient_dtype].unit_bytes if work.gradient_dtype else USUAL_GRADIENT
        compared = strategies(about.parameters, devices, gradient=gradient, optimizer=states)
        seen = replace(seen, strategies=compared)
        seen = _offloaded(seen, about, work, mesh)
    if purpose.device is None:
        return seen
    budget = purpose.device.usable_bytes
    # Of a model whose layers nobody knows, only the weights are counted.
    partial = seen.estimate.partial or work is None
    seen = replace(seen, estimate=replace(seen.estimate.within(budget), partial=partial))
    if not isinstance(work, Serving) or about.anatomy is None:
        return seen
    context, batch = (
        most(about.anatomy, holdings, mesh, work, dtype=about.dtype, budget=budget)
        for most in (longest_context, largest_batch)
    )
    return replace(seen, longest_context=context, largest_batch=batch)


def _offloaded(seen: Forecast, about: EstimatedModel, work: Training, mesh: Mesh) -> Forecast:
    """With what must be moved between tiers, and what the nodes have there; the reference where no speed is known."""
    if work.offload == "none":
        return seen
    on = seen.device if seen.device is not None and seen.device.timed else device(REFERENCE)
    tiers: tuple[Tier, ...] = ("host", "nvme")
    nodes = {tier: node(seen.estimate, mesh, tier, per_node=on.per_node) for tier in tiers}
    held = {tier: some for tier, some in nodes.items() if some.high}
    share = used(about.anatomy, seen.estimate.binding.holding, mesh) if about.anatomy is not None else 1.0
    moved = links(mesh, work, peak=on.flops_bf16, target=BUSY, used=share)
    return replace(seen, links=moved, peak=on.flops_bf16, nodes=held)


def needs(
    about: EstimatedModel,
    holdings: tuple[Holding, ...],
    mesh: Mesh,
    stages: tuple[int, ...],
    work: Serving | Training | None,
    *,
    passes: bool = True,
) -> Estimate:
    """What the ranks of `holdings` need, without `passes` but for activations.

    The weights of a model that nobody has quantised yet are modelled.
    """
    estimate = forecast(holdings, about.anatomy, mesh, stages, work, dtype=about.dtype, passes=passes)
    layout = about.quantised
    if layout is None:
        return estimate

    def modelled(term: Term) -> Term:
        if term.category != "weights" or not term.exact:
            return term
        return replace(term, interval=(term.nbytes, term.nbytes), formula=layout.formula, source=layout.source)

    return replace(gather(holdings, [[modelled(t) for t in r.terms] for r in estimate.ranks]), partial=estimate.partial)


def fitted(about: EstimatedModel, work: Training, mesh: Mesh, log: Path | Calibration) -> Calibration:
    """What the peaks of a log make of the estimate; `work` and `mesh` are what its lines leave out.

    Raises SourceError for a log that cannot be read, and UsageError for one that nothing can be fitted to.
    """
    if isinstance(log, Calibration):
        return log
    try:
        text = read_file(log, CONFIG_TEXT).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{log} cannot be read: {error}") from error
    heaviest, bulk = Heaviest(about.inventory), Bulk(about.inventory)

    def terms(run: Measurement) -> tuple[Term, ...]:
        stages = bulk.stages(run.mesh)
        return needs(about, heaviest.hold(run.mesh, stages), run.mesh, stages, run.work).binding.terms

    found = read(text, work, mesh)
    if not found:
        raise UsageError(f"{log} has no measured peak", hint="write one JSON object a line; docs/planning.md says how")
    return calibrate(found, terms)


def calibrated(estimate: Estimate, calibration: Calibration | None) -> Estimate:
    """The estimate with fitted coefficients, if any are."""
    if calibration is None:
        return estimate
    ranks = tuple(replace(rank, terms=calibration.apply(rank.terms)) for rank in estimate.ranks)
    return replace(estimate, ranks=ranks)
