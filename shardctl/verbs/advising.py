"""What would have to change where a model does not fit its devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shardctl.errors import UnsupportedError, UsageError
from shardctl.memory.advice import Advice, Ask, Needed, advise, by_type
from shardctl.memory.heaviest import Heaviest
from shardctl.memory.legal import Law
from shardctl.memory.search import SERVING, Bulk, Space
from shardctl.memory.workload import Serving, Training
from shardctl.verbs.forecasting import calibrated, needs

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardctl.memory.estimate import Estimate
    from shardctl.memory.inventory import Inventory
    from shardctl.mesh import Mesh
    from shardctl.verbs.forecasting import Forecast
    from shardctl.verbs.subject import EstimatedModel

_TYPES: Final = ("bf16", "fp8", "int4")


@dataclass(frozen=True, slots=True)
class Counsel:
    """Changes that were tried, those that are enough first; and how few devices serving needs in each type."""

    advice: tuple[Advice, ...] = ()
    types: tuple[Needed, ...] = ()


def counsel(about: EstimatedModel, mesh: Mesh, seen: Forecast) -> Counsel:
    """What to change; nothing where it fits, or where nobody knows whether it does.

    Of a partial estimate, changes are estimated as partially: what they reach is the least that is needed.
    """
    if seen.estimate.fits is not False or seen.device is None or seen.work is None:
        return Counsel()
    budget, work = seen.device.usable_bytes, seen.work
    subjects: dict[str | None, tuple[EstimatedModel, Heaviest, Bulk]] = {}

    def attempt(ask: Ask) -> Estimate:
        if ask.dtype not in subjects:
            other = about.if_quantised(ask.dtype)
            subjects[ask.dtype] = other, Heaviest(other.inventory), Bulk(other.inventory)
        other, heaviest, bulk = subjects[ask.dtype]
        stages = bulk.stages(ask.mesh)
        try:
            held = heaviest.hold(ask.mesh, stages)
            found = needs(other, held, ask.mesh, stages, ask.work, passes=not seen.estimate.partial)
        except UnsupportedError as error:
            raise UsageError(error.message) from error
        return calibrated(found, seen.calibration)

    law = Law(about.inventory, work.sequence if isinstance(work, Training) else None)
    advice = advise(Ask(mesh, work), attempt, budget, law=law, per_node=seen.device.per_node)
    return Counsel(advice, _by_type(about, seen, budget) if isinstance(work, Serving) else ())


def _by_type(about: EstimatedModel, seen: Forecast, budget: int) -> tuple[Needed, ...]:
    """How few devices each type needs; nothing for a model that is quantised already."""
    assert seen.device is not None  # noqa: S101 - somebody asked whether it fits

    def estimator(inventory: Inventory) -> Callable[[Mesh, tuple[int, ...]], Estimate]:
        heaviest = Heaviest(inventory)
        return lambda mesh, stages: needs(about, heaviest.hold(mesh, stages), mesh, stages, seen.work)

    try:
        space = Space(SERVING, seen.device.per_node, stored=True)
        return by_type(about.inventory, estimator, _TYPES, space=space, budget=budget)
    except UsageError:
        return ()
