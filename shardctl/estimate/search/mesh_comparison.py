"""Compares all sensible meshes of N devices: which ones fit, what they cost, and why the others do not fit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Final, Literal

from shardctl.base.amounts import format_memory_size
from shardctl.base.errors import UsageError
from shardctl.base.value import value_class
from shardctl.estimate.model.allowed_degrees import build_single_axis_mesh
from shardctl.tensors.mesh import EXPERT_FSDP, Mesh
from shardctl.tensors.pieces import balance_stages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from shardctl.estimate.model.allowed_degrees import AllowedDegrees
    from shardctl.estimate.model.inventory import TensorInventory
    from shardctl.estimate.rank_estimate import MeshEstimate
    from shardctl.estimate.search.cost import MeshCost
    from shardctl.estimate.workload import TrainingWorkload

    Estimator = Callable[[Mesh, tuple[int, ...]], MeshEstimate]
    Pricer = Callable[[Mesh, tuple[int, ...], MeshEstimate], MeshCost]

SERVING: Final = frozenset({"pp", "dp", "tp", "ep"})
"""The axes that serving uses."""
TRAINING: Final = frozenset({"pp", "dp", "fsdp", "cp", "tp", "ep"})
LEAST_TOKENS: Final = 4096
"""Tokens of a sequence on one cp rank below which cutting it further is not tried (Llama 3 had 8192; Grattafiori et al.
2024, sec. 3.3.2)."""
SERVING_SPARE_SHARE: Final = 0.05
"""Part of a device's memory that a recommendation for serving leaves free: below it, fragmentation or a longer prompt
ends a server that started. More asks for more devices."""
MOST_DEVICES: Final = 16384
"""Where the search for the smallest number of devices gives up."""


@value_class
class SearchSpace:
    """What is tried."""

    axes: frozenset[str]
    """Axes that may have more than one rank; those of experts only where there are any."""
    per_node: int = 8
    """Devices of a node, within which tp stays."""
    stored: bool = False
    """Whether ranks keep the weights as they are stored, as in serving: then meshes that have no room for them are
    ruled out before they are estimated. In training weights may be narrower, shared by dp too, or on the host."""
    even: bool = False
    """Whether stages have equally many layers where they can, as Megatron-LM's have."""


@value_class
class MeshCandidate:
    """A mesh that fits."""

    mesh: Mesh
    stages: tuple[int, ...]
    """Layers per pipeline stage, balanced by the bytes of their weights, or even."""
    estimate: MeshEstimate
    cost: MeshCost | None = None
    settings: str = ""
    """What to add to the command: the settings that the search chose for this mesh."""

    @property
    def peak(self) -> int:
        """Bytes of the heaviest rank."""
        return self.estimate.binding.total().nbytes

    @property
    def slack(self) -> int:
        """Bytes that the heaviest rank has to spare; 0 without a budget."""
        return 0 if self.estimate.budget is None else self.estimate.budget - self.peak

    @property
    def tight(self) -> bool:
        """Whether the heaviest rank has less to spare than a server that is recommended."""
        return self.estimate.budget is not None and self.slack < SERVING_SPARE_SHARE * self.estimate.budget


@value_class
class MeshRejection:
    """A mesh that does not work, or every mesh with some degree of an axis."""

    what: str
    """Such as ``pp2 x tp4``, or ``tp=3`` for every mesh that has it."""
    why: Literal["illegal", "memory", "node"]
    reason: str
    over: int = 0
    """Bytes by which it does not fit: of the heaviest rank, or at least."""
    mesh: Mesh | None = None
    """The one mesh that this is about."""
    stages: tuple[int, ...] = ()
    """Its layers per pipeline stage, as of a candidate."""


@value_class
class SearchResult:
    """What a search found."""

    devices: int
    ranked: tuple[MeshCandidate, ...]
    """The meshes that fit: those whose upper bound fits before the others, and among these the cheapest first; in
    serving, last those with less to spare than is recommended."""
    rejected: tuple[MeshRejection, ...]
    """First what is not possible, then what does not fit, the closest first."""
    estimated: int = field(compare=False, default=0)
    """How many were estimated; the others were ruled out before."""

    @property
    def best(self) -> MeshCandidate | MeshRejection | None:
        """The cheapest mesh that fits, or if none does, the one that comes closest; None where none is possible."""
        return self.ranked[0] if self.ranked else next((one for one in self.rejected if one.mesh is not None), None)


@value_class
class SmallestCluster:
    """The fewest devices on which some mesh fits, and what is known of fewer."""

    candidate: MeshCandidate
    refused: int
    """The most devices below these that were tried, on which no mesh fits; 0 if none were."""
    least: int
    """The devices that hold together what all must hold, below which nothing can fit."""
    every: bool
    """Whether nothing fits on any fewer: each number was tried, or has no room for what all must hold."""

    @property
    def devices(self) -> int:
        """How many there are."""
        return self.candidate.mesh.world


@value_class
class LowerBoundChecks:
    """What rules meshes out before all of their ranks are estimated."""

    glances: Callable[[Mesh, tuple[int, ...]], Iterable[MeshEstimate]] | None = None
    """Estimates of some ranks after others: once some do not fit, the others need not be asked."""
    floor: Callable[[Mesh], int] | None = None
    """Bytes of states that some rank of a mesh must have."""
    passing: Callable[[Mesh, tuple[int, ...]], int] | None = None
    """Bytes that some rank must have in a pass: where nobody asks for how much is missing, they are soon known."""

    def least(self, mesh: Mesh) -> int:
        """Return bytes that some rank must have; 0 if nothing is known."""
        return self.floor(mesh) if self.floor is not None else 0

    def too_large(self, mesh: Mesh, stages: tuple[int, ...], budget: int | None) -> MeshEstimate | None:
        """Return the estimate of some ranks that do not fit; None if all do, or if nothing is known."""
        if self.glances is None or budget is None:
            return None
        seen = (some.within(budget) for some in self.glances(mesh, stages))
        return next((some for some in seen if some.fits is False), None)


def search_meshes(
    devices: int,
    law: AllowedDegrees,
    estimate: Estimator,
    price: Pricer | None = None,
    *,
    space: SearchSpace,
    budget: int | None = None,
    quick: LowerBoundChecks | None = None,
    closest: bool = True,
) -> SearchResult:
    """Return all meshes of `devices` in `space`, ranked by `price`, or without it by the memory of the heaviest rank.

    `estimate` says what a mesh with some stages needs; where it raises UsageError, its words are the reason why that
    mesh is not possible. It may tell of one rank for each stage only, as long as that is the heaviest. What `quick`
    rules out is not estimated in full; its rejections say what is known. Where nothing fits, the first is the one that
    comes `closest`, or without, the one of which least is known to be needed.
    """
    quick = quick or LowerBoundChecks()
    ranked: list[MeshCandidate] = []
    impossible = list(_list_refusals(devices, law, space))
    tight: list[MeshRejection] = []
    estimated = 0
    bulk = WeightTotals(law.inventory, space.even)
    for mesh in list_meshes(devices, law, space):
        try:
            stages = bulk.stages(mesh)
            least = bulk.least(mesh) if space.stored else quick.least(mesh)
            if budget is not None and least > budget:
                what = "weights" if space.stored else "states"
                reason = (
                    f"its {what} alone take at least {format_memory_size(least)} of "
                    f"{format_memory_size(budget)} on some rank"
                )
                tight.append(MeshRejection(str(mesh), "memory", reason, least - budget, mesh, stages))
                continue
            needs = quick.too_large(mesh, stages, budget) or estimate(mesh, stages).within(budget)
        except UsageError as error:
            impossible.append(MeshRejection(str(mesh), "illegal", error.message))
            continue
        estimated += 1
        if needs.fits is False:
            tight.append(_build_memory_rejection(mesh, stages, needs))
        else:
            ranked.append(MeshCandidate(mesh, stages, needs, price(mesh, stages, needs) if price else None))
    ranked.sort(key=lambda one: (space.stored and one.tight, *rank_candidate(one)))
    tight.sort(key=lambda one: one.over)
    if budget is not None and closest and not ranked:
        tight = _put_closest_first(tight, estimate, budget)
    return SearchResult(devices, tuple(ranked), (*impossible, *tight), estimated)


def rank_candidate(one: MeshCandidate) -> tuple[bool, float, int, str]:
    """Return what candidates are ordered by: whether the upper bound fits, then cost, then memory."""
    return one.estimate.certain is False, one.cost.score if one.cost else 0.0, one.peak, str(one.mesh)


def _put_closest_first(tight: Sequence[MeshRejection], estimate: Estimator, budget: int) -> list[MeshRejection]:
    """Put the mesh first that comes closest, with all that it needs; the others stay in the order of their bounds.

    What is known of a rejected mesh may be the least that it needs, so those with lower bounds than the best one's
    needs are estimated in full.
    """
    best: MeshRejection | None = None
    for one in tight:
        if best is not None and one.over >= best.over:
            break
        if one.mesh is None:
            continue
        try:
            found = _build_memory_rejection(one.mesh, one.stages, estimate(one.mesh, one.stages).within(budget))
        except UsageError:
            continue
        if best is None or found.over < best.over:
            best = found
    if best is None:
        return list(tight)
    return [best, *(one for one in tight if one.what != best.what)]


def find_fewest_devices(
    law: AllowedDegrees,
    estimate: Estimator,
    *,
    space: SearchSpace,
    budget: int,
    most: int = MOST_DEVICES,
    quick: LowerBoundChecks | None = None,
    together: int = 0,
) -> SmallestCluster | None:
    """Find the fewest devices that some mesh fits on; None if `most` are too few.

    `quick` rules out meshes as in `search_meshes`; `together` are bytes that all devices must hold together in any
    mesh. Tried is every number within a node and, beyond, numbers of nodes: doubled until one fits, then halved
    between that and the last that did not. That is the fewest as long as more nodes can hold what fewer do, which
    experts or layers that many a number does not divide can spoil; the result says what was tried.
    """
    low, high, best = 0, 0, None
    for high in _list_device_counts(space.per_node, most):
        if together <= high * budget:
            best = find_first_fit(high, law, estimate, space=space, budget=budget, quick=quick)
        if best is not None:
            break
        low = high
    if best is None:
        return None
    while high > space.per_node:
        middle = (low // space.per_node + high // space.per_node) // 2 * space.per_node
        if middle <= low:
            break
        fitting = find_first_fit(middle, law, estimate, space=space, budget=budget, quick=quick)
        if fitting is None:
            low = middle
        else:
            high, best = middle, fitting
    least = -(-together // budget)
    every = high <= space.per_node or least > low
    return SmallestCluster(best, low, least, every)


def _list_device_counts(per_node: int, most: int) -> Iterator[int]:
    """List every number of devices of a node, then of nodes the powers of two, none above `most`."""
    yield from range(1, min(per_node, most) + 1)
    nodes = 2
    while nodes * per_node <= most:
        yield nodes * per_node
        nodes *= 2


def find_first_fit(
    devices: int,
    law: AllowedDegrees,
    estimate: Estimator,
    *,
    space: SearchSpace,
    budget: int,
    quick: LowerBoundChecks | None = None,
) -> MeshCandidate | None:
    """Find a mesh of `devices` that fits, or None.

    Tried first where weights are divided most, and by tp, which is quick.
    """
    bulk, quick = WeightTotals(law.inventory, space.even), quick or LowerBoundChecks()
    for mesh in sorted(list_meshes(devices, law, space), key=lambda mesh: (bulk.least(mesh), -mesh.degree("tp"))):
        if space.stored and bulk.least(mesh) > budget:
            break
        if quick.least(mesh) > budget:
            continue
        try:
            stages = bulk.stages(mesh)
            if quick.passing is not None and quick.passing(mesh, stages) > budget:
                continue
            if quick.too_large(mesh, stages, budget) is not None:
                continue
            needs = estimate(mesh, stages).within(budget)
        except UsageError:
            continue
        candidate = MeshCandidate(mesh, stages, needs)
        if needs.fits and not (space.stored and candidate.tight):
            return candidate
    return None


def set_equal_tokens(work: TrainingWorkload, mesh: Mesh, sequences: int) -> TrainingWorkload:
    """Return the work of an optimizer step over `sequences`, which the data-parallel ranks of `mesh` share evenly.

    Meshes are to be compared so: by default each has as many microbatches as stages, and with them another batch.
    Raises UsageError if there is no whole number of microbatches for each rank.

    >>> from shardctl.estimate.workload import TrainingWorkload
    >>> set_equal_tokens(TrainingWorkload(sequence=4096, micro_batch=2), Mesh.of(pp=2, dp=4), 64).microbatches
    8
    """
    return replace(work, microbatches=count_microbatches(mesh, sequences, work.micro_batch))


def count_microbatches(mesh: Mesh, sequences: int, micro_batch: int) -> int:
    """Count how many microbatches each data-parallel rank of `mesh` takes of `sequences`.

    Raises UsageError for no number.
    """
    replicas = mesh.degree("dp") * mesh.degree("fsdp")
    found, rest = divmod(sequences, replicas * micro_batch)
    if rest or not found:
        raise UsageError(
            f"{sequences} sequences cannot be divided into microbatches of {micro_batch} for each of "
            f"{replicas} data-parallel ranks"
        )
    return found


def list_meshes(devices: int, law: AllowedDegrees, space: SearchSpace) -> Iterator[Mesh]:
    """List the meshes of `devices` that a model allows and that people would try.

    tp stays within a node. What dp and fsdp share is all dp, all fsdp, or fsdp within a node and dp between nodes.
    Experts are divided by the ranks of tp, of a node or of a stage, in the latter by as many as their number allows, or
    cut as all else is; inside, by tp or not at all.
    """
    for tp in _list_degrees(devices, law, space, "tp", most=space.per_node):
        for pp in _list_degrees(devices // tp, law, space, "pp"):
            for cp in _list_degrees(devices // tp // pp, law, space, "cp", most=_find_largest_cp(law)):
                rest = devices // tp // pp // cp
                for fsdp in _list_fsdp_degrees(rest, tp * cp, space):
                    stage = {"pp": pp, "dp": rest // fsdp, "fsdp": fsdp, "cp": cp, "tp": tp}
                    for ep, etp in _list_expert_degrees(stage, law, space):
                        yield Mesh.of(ep=ep, etp=etp, **stage)


@dataclass(frozen=True)
class WeightTotals:
    """The weights of a model by where they can be, added up once for all meshes."""

    inventory: TensorInventory
    even: bool = False
    """Whether stages have equally many layers where they can, as Megatron-LM's have."""

    @cached_property
    def _costs(self) -> tuple[list[int], int, int]:
        """Bytes of each layer, of what only the first stage has, and of what only the last has."""
        layers, first, last = [0] * self.inventory.layers, 0, 0
        for kind in self.inventory.kinds:
            nbytes = kind.count * kind.dtype.nbytes(kind.shape)
            for where, layer in kind.spec.where:
                if where == "layer":
                    layers[layer] += nbytes
                elif where == "first":
                    first += nbytes
                else:
                    last += nbytes
        return layers, first, last

    @cached_property
    def _parts(self) -> tuple[int, int]:
        """Bytes of all but the routed experts, and of those."""
        expert = sum(k.count * k.dtype.nbytes(k.shape) for k in self.inventory.kinds if k.spec.of_expert)
        return self.inventory.nbytes - expert, expert

    @cached_property
    def _staged(self) -> dict[int, tuple[int, ...]]:
        return {}

    def stages(self, mesh: Mesh) -> tuple[int, ...]:
        """Return layers per stage, so that the stage with the most bytes of weights has as few as it can."""
        pp = mesh.degree("pp")
        if pp not in self._staged:
            layers = self.inventory.layers
            even = self.even and layers and layers % pp == 0
            self._staged[pp] = (layers // pp,) * pp if even else balance_stages(*self._costs, pp)
        return self._staged[pp]

    def least(self, mesh: Mesh) -> int:
        """Return bytes of weights that some rank must have, however they are laid out: the mean over all ranks."""
        dense, expert = self._parts
        shared = prod(mesh.degree(axis) for axis in ("pp", "fsdp", "tp"))
        apart = mesh.degree("pp") * mesh.ep * mesh.etp * mesh.degree(EXPERT_FSDP)
        return dense // shared + expert // apart


def _list_degrees(
    number: int, law: AllowedDegrees, space: SearchSpace, axis: str, most: int | None = None
) -> list[int]:
    """List the degrees of an axis that divide `number`, that the model allows and that are tried."""
    if axis not in space.axes:
        return [1]
    top = min(number, most or number)
    return [degree for degree in range(1, top + 1) if number % degree == 0 and law.allows_degree(axis, degree)]


def _find_largest_cp(law: AllowedDegrees) -> int:
    return 1 if law.sequence is None else max(1, law.sequence // LEAST_TOKENS)


def _list_fsdp_degrees(rest: int, inner: int, space: SearchSpace) -> list[int]:
    """List degrees of fsdp, of which dp multiplies each to `rest`."""
    if "dp" not in space.axes:
        return [rest] if rest == 1 or "fsdp" in space.axes else []
    if "fsdp" not in space.axes:
        return [1]
    near = space.per_node // inner if inner <= space.per_node else 1
    return sorted({1, rest, near if near and rest % near == 0 else 1})


def _list_expert_degrees(stage: dict[str, int], law: AllowedDegrees, space: SearchSpace) -> list[tuple[int, int]]:
    """List pairs of ep and etp."""
    tp, ranks = stage["tp"], prod(stage.values()) // stage["pp"]
    # Cut as all else is, if the experts allow it.
    found = [(1, tp)] if law.allows_degree("etp", tp) else []
    if "ep" in space.axes and "ep" in law.axes:
        for etp in sorted({1, tp}):
            if law.allows_degree("etp", etp):
                possible = [
                    ep for ep in range(2, ranks // etp + 1) if ranks % (ep * etp) == 0 and law.allows_degree("ep", ep)
                ]
                usual = (tp // etp, min(space.per_node, ranks) // etp, max(possible, default=1))
                found += [(ep, etp) for ep in usual if ep in possible]
    return sorted(set(found)) or [(1, 1)]


def _list_refusals(devices: int, law: AllowedDegrees, space: SearchSpace) -> Iterator[MeshRejection]:
    """List the degrees of each axis that divide the devices, and which the model or the node does not allow."""
    for axis in ("pp", "tp", "ep"):
        if axis not in space.axes or (axis == "ep" and axis not in law.axes):
            continue
        for degree in (d for d in range(2, devices + 1) if devices % d == 0):
            if axis == "tp" and degree > space.per_node:
                reason = f"tp={degree} would leave the node of {space.per_node} devices"
                yield MeshRejection(f"tp={degree}", "node", reason)
            elif not law.allows_degree(axis, degree):
                refusal = law.refuse(build_single_axis_mesh(axis, degree))
                if refusal is not None:
                    yield MeshRejection(f"{axis}={degree}", "illegal", str(refusal))


def _build_memory_rejection(mesh: Mesh, stages: tuple[int, ...], needs: MeshEstimate) -> MeshRejection:
    budget, heaviest = needs.budget or 0, needs.binding.total().nbytes
    where = needs.binding.holding.label
    reason = (
        f"rank {where} needs {format_memory_size(heaviest)}, {format_memory_size(heaviest - budget)} more than "
        "there are"
    )
    return MeshRejection(str(mesh), "memory", reason, heaviest - budget, mesh, stages)
