"""What every rank of a mesh needs for a purpose, whether that fits, and how much more would."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardctl.errors import SourceError, UnsupportedError, UsageError
from shardctl.memory.calibrate import Calibration, Measurement, calibrate, read
from shardctl.memory.comparison import Strategy, strategies
from shardctl.memory.estimate import gather
from shardctl.memory.forecast import forecast
from shardctl.memory.heaviest import Heaviest
from shardctl.memory.holding import hold
from shardctl.memory.optimizers import optimizer
from shardctl.memory.search import Bulk
from shardctl.memory.serving import largest_batch, longest_context
from shardctl.memory.workload import Serving, Training

if TYPE_CHECKING:
    from pathlib import Path

    from shardctl.memory.devices import Device
    from shardctl.memory.estimate import Estimate
    from shardctl.memory.holding import Holding
    from shardctl.memory.term import Term
    from shardctl.mesh import Mesh
    from shardctl.verbs.purpose import Purpose
    from shardctl.verbs.subject import Subject


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
    """Why only the weights are stated, if so."""
    longest_context: int | None = None
    """In serving, the most tokens per sequence that fit the device at this batch; None if memory does not limit it."""
    largest_batch: int | None = None
    """The most sequences that fit at this context; None likewise."""
    strategies: tuple[Strategy, ...] = ()
    """In training, what plain data parallelism and ZeRO-1 to 3 would leave of the model's states on each device."""
    quantised: str = ""
    """The type that the weights are taken to have, though nobody has quantised them yet."""
    calibration: Calibration | None = None
    """What measured peaks made of the estimate."""


def foresee(about: Subject, mesh: Mesh, stages: tuple[int, ...], purpose: Purpose | None) -> Forecast:
    """What every rank of `mesh` needs; without a purpose, the weights alone.

    Raises CutError for a mesh that does not fit the tensors, UsageError for options that contradict each other,
    SourceError for measurements that cannot be read.
    """
    holdings = hold(about.inventory, mesh, stages)
    if purpose is None:
        return Forecast(forecast(holdings, None, mesh, stages, None, dtype=about.dtype), None, about.dtype)
    work, unmodelled = purpose.workload(about, mesh), about.unmodelled
    try:
        estimate = needs(about, holdings, mesh, stages, work)
    except UnsupportedError as error:
        work, unmodelled = None, error.message
        estimate = needs(about, holdings, mesh, stages, None)
    seen = Forecast(estimate, work, about.dtype, purpose.device, unmodelled, quantised=purpose.narrower or "")
    if isinstance(work, Training):
        if purpose.calibration is not None:
            seen = _calibrated(seen, _calibration(about, work, mesh, purpose.calibration))
        states, devices = optimizer(work.optimizer).per_parameter, purpose.devices or mesh.world
        seen = replace(seen, strategies=strategies(about.parameters, devices, optimizer=states))
    if purpose.device is None:
        return seen
    budget = purpose.device.usable_bytes
    seen = replace(seen, estimate=seen.estimate.within(budget))
    if not isinstance(work, Serving) or about.anatomy is None:
        return seen
    context, batch = (
        most(about.anatomy, holdings, mesh, work, dtype=about.dtype, budget=budget)
        for most in (longest_context, largest_batch)
    )
    return replace(seen, longest_context=context, largest_batch=batch)


def needs(
    about: Subject,
    holdings: tuple[Holding, ...],
    mesh: Mesh,
    stages: tuple[int, ...],
    work: Serving | Training | None,
) -> Estimate:
    """What the ranks of `holdings` need; the weights of a model that nobody has quantised yet are modelled."""
    estimate = forecast(holdings, about.anatomy, mesh, stages, work, dtype=about.dtype)
    layout = about.quantised
    if layout is None:
        return estimate

    def modelled(term: Term) -> Term:
        if term.category != "weights" or not term.exact:
            return term
        return replace(term, interval=(term.nbytes, term.nbytes), formula=layout.formula, source=layout.source)

    return gather(holdings, [[modelled(term) for term in rank.terms] for rank in estimate.ranks])


def _calibration(about: Subject, work: Training, mesh: Mesh, log: Path) -> Calibration:
    try:
        text = log.read_text(encoding="utf-8")
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


def _calibrated(seen: Forecast, calibration: Calibration) -> Forecast:
    ranks = tuple(replace(rank, terms=calibration.apply(rank.terms)) for rank in seen.estimate.ranks)
    return replace(seen, estimate=replace(seen.estimate, ranks=ranks), calibration=calibration)
