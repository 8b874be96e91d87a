"""Finds settings with which a model fits the devices that it does not fit as it was asked for, the cheapest first."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import UsageError
from shardctl.base.value import value_class
from shardctl.estimate.workload import ServingWorkload, TrainingWorkload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardctl.estimate.search.mesh_comparison import MeshCandidate, SearchResult
    from shardctl.planning.estimated_model import EstimatedModel

    Workload = ServingWorkload | TrainingWorkload
    Searching = Callable[[EstimatedModel, Workload], SearchResult]

MOST_FOUND: Final = 5
"""Settings after which the search ends."""
MOST_TRIED: Final = 32
"""Combinations of settings that are tried at most, the mildest first."""
_MILD, _SLOWER, _COARSER, _COARSEST, _HOST = 1, 4, 8, 12, 16
"""How much a setting costs a run, for the order in which they are tried; the time that they take decides the result."""


@value_class
class SettingChange:
    """A setting that could be another."""

    options: str
    """As the command line takes it."""
    change: str
    """In words."""
    cost: int
    values: tuple[tuple[str, Any], ...] = ()
    """The fields of the workload and what they become."""
    dtype: str | None = None
    """The type that weights become."""
    exact: bool = True
    """Whether a run computes the same numbers as without."""
    timed: bool = True
    """Whether its time is counted whole."""


@value_class
class SettingsCandidate:
    """Settings with which some mesh fits, and the cheapest of those."""

    changes: tuple[SettingChange, ...]
    candidate: MeshCandidate

    @property
    def options(self) -> str:
        """What to add to the command."""
        return " ".join(one.options for one in self.changes)

    @property
    def exact(self) -> bool:
        """Whether a run computes the same numbers as without."""
        return all(one.exact for one in self.changes)

    @property
    def host_bytes(self) -> int:
        """Bytes that the heaviest rank keeps on its host."""
        return self.candidate.estimate.binding.total("host").nbytes

    @property
    def timed(self) -> bool:
        """Whether the time counts all that a run does; of offloading nobody counts what the host computes."""
        return all(one.timed for one in self.changes)


def search_settings(about: EstimatedModel, work: Workload, search: Searching) -> tuple[SettingsCandidate, ...]:
    """Find what would make some mesh fit, the cheapest in device-seconds per token first.

    `search` compares all meshes for a model and its work. Settings that need another which was enough by itself are
    left out.
    """
    found: list[SettingsCandidate] = []
    for changes in _list_combinations(work)[:MOST_TRIED]:
        if any(set(one.changes) <= set(changes) for one in found):
            continue
        model, changed = about, work
        try:
            for one in changes:
                model, changed = model.if_quantized(one.dtype), replace(changed, **dict(one.values))
            ranked = search(model, changed).ranked
        except UsageError:
            continue
        if ranked:
            found.append(SettingsCandidate(changes, ranked[0]))
        if len(found) == MOST_FOUND:
            break
    return tuple(sorted(found, key=_get_price))


def _get_price(one: SettingsCandidate) -> tuple[bool, float]:
    """Return what settings are ordered by: those of which the time is not counted whole come last."""
    return not one.timed, one.candidate.cost.score if one.candidate.cost is not None else 0.0


def _list_combinations(work: Workload) -> list[tuple[SettingChange, ...]]:
    """List the combinations of changes, of each sort one at most, the mildest first."""
    sorts = [[None, *some] for some in _list_sorts(work)]
    every = [tuple(one for one in some if one is not None) for some in product(*sorts)]
    return sorted(filter(None, every), key=lambda some: (sum(one.cost for one in some), len(some)))


def _list_sorts(work: Workload) -> Iterator[list[SettingChange]]:
    """List by sort what can be changed."""
    if isinstance(work, TrainingWorkload):
        yield from _list_training_sorts(work)
    else:
        yield from _list_serving_sorts(work)


def _list_training_sorts(work: TrainingWorkload) -> Iterator[list[SettingChange]]:
    # With fsdp2, the meshes with fsdp ranks are those with ZeRO-3.
    stages = {"megatron": (1,), "deepspeed": (1, 3), "hf": (1, 3)}.get(work.profile, ())
    yield [
        SettingChange(f"--zero {zero}", f"share model states by ZeRO-{zero}", _MILD * zero, (("zero", zero),))
        for zero in stages
        if zero > work.zero
    ]
    if work.schedule == "gpipe":
        yield [SettingChange("--schedule 1f1b", "keep fewer microbatches", _MILD, (("schedule", "1f1b"),))]
    elif work.virtual_stages > 1:
        plain = (("schedule", "1f1b"), ("virtual_stages", 1))
        yield [SettingChange("--schedule 1f1b --vp 1", "keep fewer microbatches", _MILD, plain)]
    if work.micro_batch > 1:
        yield [SettingChange("--batch 1", "take one sequence at a time", _MILD, (("micro_batch", 1),))]
    if work.recompute != "full" or work.recompute_every > 1:
        full = (("recompute", "full"), ("recompute_every", 1))
        yield [SettingChange("--recompute full", "recompute all activations", _SLOWER, full)]
    if work.optimizer == "adamw":
        yield [
            SettingChange(f"--optimizer {name}", text, cost, (("optimizer", name),), exact=False)
            for name, text, cost in (
                ("adamw-8bit", "keep moments in 8 bits", _COARSER),
                ("adamw-bf16", "keep no fp32 copies", _COARSEST),
            )
        ]
    if work.offload == "none":
        shared = work.zero or work.profile == "fsdp2"
        away = (("offload", "cpu"), *(() if shared else (("zero", 1),)))
        flags = "--offload cpu" if shared else "--offload cpu --zero 1"
        yield [SettingChange(flags, "keep optimizer states in the host's memory", _HOST, away, timed=False)]


def _list_serving_sorts(work: ServingWorkload) -> Iterator[list[SettingChange]]:
    if not (work.kv_dtype or "").startswith(("F8", "NVFP4")):
        narrow = (("kv_dtype", "F8_E4M3"),)
        yield [SettingChange("--kv-dtype fp8", "keep keys and values in fp8", _MILD, narrow, exact=False)]
    yield [
        SettingChange(f"--dtype {name}", f"quantize the weights to {name}", cost, dtype=name, exact=False)
        for name, cost in (("fp8", _SLOWER), ("int4", _COARSER))
    ]
    halves = [work.batch >> shift for shift in range(1, work.batch.bit_length())]
    yield [
        SettingChange(f"--batch {size}", f"hold {size:,} sequences at once", _COARSEST + n, (("batch", size),))
        for n, size in enumerate(halves)
    ]
