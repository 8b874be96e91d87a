"""From a purpose and a number of devices to the meshes that are worth having."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shardctl.memory.cost import Cost, price
from shardctl.memory.devices import Device, device
from shardctl.memory.heaviest import Heaviest
from shardctl.memory.legal import Law
from shardctl.memory.search import SERVING, TRAINING, Candidate, Found, Space, at_equal_tokens, search, smallest
from shardctl.memory.workload import Serving, Training
from shardctl.mesh import Mesh
from shardctl.verbs.forecasting import needs

if TYPE_CHECKING:
    from shardctl.memory.estimate import Estimate
    from shardctl.verbs.purpose import Purpose
    from shardctl.verbs.subject import Subject

_USUAL: Final = "h100-80g"
"""Whose nodes and speed are assumed if no device is named."""

_STATES: Final = frozenset({"weights", "gradients", "optimizer"})


@dataclass(frozen=True, slots=True)
class Explored:
    """What was found among all meshes of some devices."""

    found: Found
    fewest: Candidate | None
    """The mesh of the fewest devices on which anything fits; None without a device, or if nothing does."""
    sequences: int | None = None
    """In training, the sequences of one optimizer step, which are the same for every mesh."""


@dataclass(frozen=True, slots=True)
class Explorer:
    """What a search asks of each mesh."""

    about: Subject
    work: Serving | Training | None
    device: Device
    heaviest: Heaviest

    def law(self) -> Law:
        """Which degrees the model allows."""
        return Law(self.about.inventory, self.work.sequence if isinstance(self.work, Training) else None)

    def space(self) -> Space:
        """What is tried."""
        trains = isinstance(self.work, Training)
        return Space(TRAINING if trains else SERVING, self.device.per_node, stored=not trains)

    def work_on(self, mesh: Mesh) -> Serving | Training | None:
        """What a mesh does: in training, meshes of as many ranks take as many sequences a step."""
        if not isinstance(self.work, Training):
            return self.work
        return at_equal_tokens(self.work, mesh, sequences(self.work, mesh.world))

    def estimate(self, mesh: Mesh, stages: tuple[int, ...]) -> Estimate:
        """What the heaviest rank of each stage needs."""
        return needs(self.about, self.heaviest.hold(mesh, stages), mesh, stages, self.work_on(mesh))

    def glance(self, mesh: Mesh, stages: tuple[int, ...]) -> Estimate:
        """What the heaviest rank of the first stage needs, which holds the most microbatches in flight."""
        return needs(self.about, self.heaviest.hold(mesh, stages)[:1], mesh, stages, self.work_on(mesh))

    def together(self) -> int:
        """Bytes of states that training has once at least, on one device or shared by many; 0 if they are not there."""
        if not isinstance(self.work, Training) or self.work.offload != "none":
            return 0
        alone, layers = Mesh.of(), (self.about.inventory.layers,)
        estimate = needs(self.about, self.heaviest.hold(alone, layers), alone, layers, self.work, passes=False)
        return sum(t.nbytes for t in estimate.binding.terms if t.exact and t.category in _STATES and t.tier == "device")

    def price(self, mesh: Mesh, _stages: tuple[int, ...], estimate: Estimate) -> Cost:
        """What a mesh costs, for a model whose layers are described."""
        assert self.about.anatomy is not None  # noqa: S101 - there is work only for those
        work = self.work_on(mesh)
        assert work is not None  # noqa: S101
        return price(self.about.anatomy, estimate, mesh, work, self.device, dtype=self.about.dtype)


def explore(about: Subject, purpose: Purpose, mesh: Mesh | None) -> Explored:
    """All meshes of `purpose.devices` (by default as many as `mesh` has ranks, else the fewest that will do), ranked.

    Raises UsageError for a purpose that contradicts itself.
    """
    work = purpose.workload(about, mesh or Mesh.of())
    if about.anatomy is None:  # compared by weights
        work = None
    explorer = Explorer(about, work, purpose.device or device(_USUAL), Heaviest(about.inventory))
    law, space = explorer.law(), explorer.space()
    budget = purpose.device.usable_bytes if purpose.device is not None else None
    fewest = None
    if budget is not None:
        fewest = smallest(
            law, explorer.estimate, space=space, budget=budget, glance=explorer.glance, together=explorer.together()
        )
    devices = purpose.devices or (mesh.world if mesh else None) or (fewest[0] if fewest else 1)
    pricer = explorer.price if work is not None else None
    found = search(devices, law, explorer.estimate, pricer, space=space, budget=budget)
    step = sequences(work, devices) if isinstance(work, Training) else None
    return Explored(found, fewest[1] if fewest else None, step)


def sequences(work: Training, devices: int) -> int:
    """The sequences of one optimizer step on `devices`: as many for each as if all were data-parallel."""
    return devices * work.micro_batch * (work.microbatches or 1)
