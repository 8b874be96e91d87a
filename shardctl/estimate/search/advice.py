"""Tries the changes that could make a model fit, and reports the bytes that each one reaches."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.amounts import format_memory_size
from shardctl.base.errors import UsageError
from shardctl.base.value import value_class
from shardctl.estimate.model.allowed_degrees import AllowedDegrees
from shardctl.estimate.model.narrower_types import narrow_inventory
from shardctl.estimate.search.mesh_comparison import MeshCandidate, find_fewest_devices
from shardctl.estimate.workload import ServingWorkload, TrainingWorkload
from shardctl.tensors.mesh import MOST_RANKS, Mesh

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardctl.estimate.model.inventory import TensorInventory
    from shardctl.estimate.rank_estimate import MeshEstimate
    from shardctl.estimate.search.mesh_comparison import Estimator, SearchSpace

    Attempt = Callable[["EstimateRequest"], MeshEstimate]

NARROWER: Final = ("fp8", "int4")
"""The types that serving could quantize to, each with half the bytes of the one before."""
_CAST_DTYPE: Final = "bf16"
_MIN_SEQUENCE_TOKENS: Final = 1024
"""Tokens; shorter sequences are not advised."""
MOST_TIMES: Final = 64
"""More times the devices are not advised."""
_SHARE_STATES: Final = 1
_SHARE_ALL: Final = 3


@value_class
class EstimateRequest:
    """What is asked of the estimator."""

    mesh: Mesh
    work: ServingWorkload | TrainingWorkload
    dtype: str | None = None
    """The type to estimate the weights in, of `narrower.TYPES`; None for as they are stored."""


@value_class
class TriedChange:
    """A change that was tried."""

    change: str
    """In words, such as ``recompute all activations``."""
    options: str
    """As the command line takes it, such as ``--recompute full``."""
    nbytes: int
    """What the heaviest rank would need."""
    saved: int
    """How much less that is than without; negative if it is more."""
    fits: bool
    """Whether that is within the budget; where the estimate is partial, more may be needed."""
    ask: EstimateRequest
    partial: bool = False
    """Whether the estimate leaves out what nobody knows."""

    @property
    def verdict(self) -> str:
        """In words."""
        return ("may fit" if self.partial else "fits") if self.fits else "too much"

    def __str__(self) -> str:
        return f"{self.change} ({self.options}): {format_memory_size(self.nbytes)}{'' if self.fits else ', too much'}"


@value_class
class _ProposedChange:
    """A change to try."""

    change: str
    options: str
    ask: EstimateRequest


def advise_changes(
    ask: EstimateRequest,
    attempt: Attempt,
    budget: int,
    *,
    law: AllowedDegrees | None = None,
    per_node: int = 8,
    solved: tuple[int | None, int | None] = (None, None),
) -> tuple[TriedChange, ...]:
    """Return the changes that make `ask` need less, those that fit `budget` bytes first, each as mild as will do.

    `attempt` estimates an ask; one that it refuses with UsageError is not advised. `law` says which larger meshes a
    model allows; without it none is tried. `solved` is the most sequences and the most tokens that `ask` could have
    instead, which are tried before halves. If no change is enough, the last advice is to make several, if they are.
    """
    before = _try_change(_ProposedChange("", "", ask), attempt, budget, 0)
    if before is None or before.fits:
        return ()
    tries = _ChangeTrials(ask, attempt, budget, before.nbytes, law, per_node, solved)
    found = [one for one in tries.every() if one.saved > 0]
    enough = [one for one in found if one.fits]
    short = sorted((one for one in found if not one.fits), key=lambda one: one.nbytes)
    together = None if enough else tries.together()
    return (*enough, *([together] if together else []), *short)


@value_class
class FewestDevices:
    """The fewest devices for a model in one type."""

    dtype: str
    devices: int | None
    """None if no number that was tried is enough."""
    weights: int
    """Bytes of all weights in that type."""
    candidate: MeshCandidate | None


def find_fewest_by_type(
    inventory: TensorInventory,
    estimator: Callable[[TensorInventory], Estimator],
    types: Sequence[str],
    *,
    space: SearchSpace,
    budget: int,
    sequence: int | None = None,
) -> tuple[FewestDevices, ...]:
    """Find how few devices each of `types` needs, such as two in bf16 and one in int4.

    Raises UsageError for an unknown type, and for a model that is quantized already.
    """
    found = []
    for name in types:
        other = narrow_inventory(inventory, name)
        fewest = find_fewest_devices(AllowedDegrees(other, sequence), estimator(other), space=space, budget=budget)
        devices, candidate = (fewest.devices, fewest.candidate) if fewest else (None, None)
        found.append(FewestDevices(name, devices, other.nbytes, candidate))
    return tuple(found)


def _try_change(change: _ProposedChange, attempt: Attempt, budget: int, before: int) -> TriedChange | None:
    """Return what a change reaches; None if it is not possible."""
    try:
        needs = attempt(change.ask)
    except UsageError:
        return None
    nbytes = needs.binding.total().nbytes
    return TriedChange(
        change.change, change.options, nbytes, before - nbytes, nbytes <= budget, change.ask, needs.partial
    )


@value_class
class _ChangeTrials:
    """The changes to one ask, tried."""

    ask: EstimateRequest
    attempt: Attempt
    budget: int
    before: int
    law: AllowedDegrees | None
    per_node: int
    solved: tuple[int | None, int | None]

    def every(self) -> Iterator[TriedChange]:
        """Yield each group of changes: the mildest that fits, or else the one that saves most."""
        for group in self.groups(self.ask):
            yield from self.best(group)

    def best(self, group: Sequence[_ProposedChange]) -> list[TriedChange]:
        """Return the first of a group that fits, or the one with the fewest bytes; none if none is possible."""
        tried = []
        for change in group:
            one = _try_change(change, self.attempt, self.budget, self.before)
            if one is not None and one.fits:
                return [one]
            if one is not None:
                tried.append(one)
        return [min(tried, key=lambda one: one.nbytes)] if tried else []

    def together(self) -> TriedChange | None:
        """Return one change after another, the mildest groups first, until all together fit; None if they never do."""
        ask, left = self.ask, self.before
        changes: list[str] = []
        options: list[str] = []
        for number in range(len(list(self.groups(ask)))):
            best = self.best(list(self.groups(ask))[number])
            if not best or best[0].nbytes >= left:
                continue
            one = best[0]
            ask, left = one.ask, one.nbytes
            changes.append(one.change)
            options.append(one.options)
            if one.fits:
                return replace(one, change=" and ".join(changes), options=" ".join(options))
        return None

    def groups(self, ask: EstimateRequest) -> Iterator[list[_ProposedChange]]:
        """Yield changes of one sort each, the mildest first; as many groups for any ask of one kind of work."""
        work = ask.work
        if isinstance(work, TrainingWorkload):
            yield from _list_training_changes(ask, work)
            tokens = work.sequence
            shorter = [
                (size, replace(ask, work=replace(work, sequence=size)))
                for size in _list_halves(tokens, _MIN_SEQUENCE_TOKENS)
            ]
        else:
            batch, context = self.solved if ask is self.ask else (None, None)
            yield from _list_serving_changes(ask, work, batch)
            tokens = work.context
            sizes = _list_smaller(tokens, _MIN_SEQUENCE_TOKENS, context)
            shorter = [(size, replace(ask, work=replace(work, context=size))) for size in sizes]
        yield self.more_devices(ask)
        yield [
            _ProposedChange(f"take sequences of {size:,} instead of {tokens:,} tokens", f"--seq-len {size}", less)
            for size, less in shorter
        ]

    def more_devices(self, ask: EstimateRequest) -> list[_ProposedChange]:
        """Yield twice, four times and more the devices: along one axis, or in serving along tp and pp together."""
        if self.law is None:
            return []
        found = []
        times = 2
        while times <= MOST_TIMES and ask.mesh.world * times <= MOST_RANKS:
            for grown in _list_axis_growths(ask.work, times):
                mesh = ask.mesh
                for axis, more in grown.items():
                    mesh = _grow_mesh(mesh, axis, more)
                inside = mesh.degree("tp") <= self.per_node
                if inside and self.law.refuse(mesh) is None:
                    text = f"use {mesh.world:,} devices instead of {ask.mesh.world:,}"
                    options = " ".join(f"--{axis} {mesh.degree(axis)}" for axis in grown)
                    found.append(_ProposedChange(text, options, replace(ask, mesh=mesh)))
            times *= 2
        return found


def _list_axis_growths(work: ServingWorkload | TrainingWorkload, times: int) -> Iterator[dict[str, int]]:
    """List by axis how many times the ranks it gets where there are `times` the devices, a power of two."""
    if isinstance(work, TrainingWorkload):
        yield from ({axis: times} for axis in ("tp", "fsdp", "pp"))
        return
    stages = 1
    while stages <= times:
        yield {axis: more for axis, more in (("tp", times // stages), ("pp", stages)) if more > 1}
        stages *= 2


def _list_training_changes(ask: EstimateRequest, work: TrainingWorkload) -> Iterator[list[_ProposedChange]]:
    recomputed = []
    # Fused attention keeps no scores, which is all that selective recomputation would spare.
    if work.recompute == "none" and not work.flash:
        some = replace(work, recompute="selective", recompute_every=1)
        recomputed.append(_ProposedChange("recompute attention", "--recompute selective", replace(ask, work=some)))
    if work.recompute != "full" or work.recompute_every > 1:
        every = replace(work, recompute="full", recompute_every=1)
        recomputed.append(_ProposedChange("recompute all activations", "--recompute full", replace(ask, work=every)))
    yield recomputed
    # Stages of a pipeline add up the gradients of all microbatches, which ZeRO-2 and 3 would reduce one by one.
    most = _SHARE_ALL if ask.mesh.degree("pp") == 1 else _SHARE_STATES
    yield [
        _ProposedChange(
            f"share model states by ZeRO-{zero}", f"--zero {zero}", replace(ask, work=replace(work, zero=zero))
        )
        for zero in range(work.zero + 1, most + 1)
        if ask.mesh.degree("dp") * ask.mesh.degree("cp") > 1
    ]
    yield [
        _ProposedChange(
            f"take {size:,} instead of {work.micro_batch:,} sequences at a time",
            f"--batch {size}",
            replace(ask, work=replace(work, micro_batch=size)),
        )
        for size in _list_halves(work.micro_batch, 1)
    ]
    # NVMe spares the device no more than the host does.
    away = replace(work, offload="cpu")
    kept = _ProposedChange("keep optimizer states in the host's memory", "--offload cpu", replace(ask, work=away))
    yield [kept] if work.offload == "none" else []
    narrow = replace(work, optimizer="adamw-8bit")
    coded = _ProposedChange("keep moments in 8 bits", "--optimizer adamw-8bit", replace(ask, work=narrow))
    yield [coded] if work.optimizer == "adamw" else []


def _list_serving_changes(
    ask: EstimateRequest, work: ServingWorkload, batch: int | None
) -> Iterator[list[_ProposedChange]]:
    narrow = replace(work, kv_dtype="F8_E4M3")
    cached = _ProposedChange("keep keys and values in fp8", "--kv-dtype fp8", replace(ask, work=narrow))
    yield [] if (work.kv_dtype or "").startswith(("F8", "NVFP4")) else [cached]
    # Of weights that are stored so narrow already, a cast spares nothing, and quantizing is advised.
    names = {_CAST_DTYPE: "cast"} | dict.fromkeys(NARROWER, "quantize")
    yield [
        _ProposedChange(f"{verb} the weights to {name}", f"--dtype {name}", replace(ask, dtype=name))
        for name, verb in names.items()
        if ask.dtype not in names
    ]
    yield [
        _ProposedChange(
            f"hold {size:,} instead of {work.batch:,} sequences at once",
            f"--batch {size}",
            replace(ask, work=replace(work, batch=size)),
        )
        for size in _list_smaller(work.batch, 1, batch)
    ]


def _list_smaller(number: int, least: int, solved: int | None) -> list[int]:
    """List the number that is known to fit, if one is, then halves.

    >>> _list_smaller(50, 1, 32), _list_smaller(50, 10, None)
    ([32, 25, 12, 6, 3, 1], [25, 12])
    """
    known = [solved] if solved is not None and least <= solved < number else []
    return [*known, *_list_halves(number, least)]


def _list_halves(number: int, least: int) -> list[int]:
    """List a half, a quarter and so on, down to `least`."""
    found = []
    while number // 2 >= least:
        number //= 2
        found.append(number)
    return found


def _grow_mesh(mesh: Mesh, axis: str, times: int) -> Mesh:
    """Return the mesh with `times` the ranks along an axis; experts that were cut as all else is stay so."""
    degrees = tuple((name, degree * times if name == axis else degree) for name, degree in mesh.axes)
    follows = mesh.ep == 1 and mesh.etp == mesh.degree("tp")
    etp = mesh.etp * times if axis == "tp" and follows else mesh.etp
    return Mesh(degrees, mesh.ep, etp)
