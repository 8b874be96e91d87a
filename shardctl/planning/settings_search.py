"""Lists the settings of training that a search may vary, and finds those with which a model fits that would not."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import UsageError
from shardctl.base.value import value_class
from shardctl.estimate.training.optimizers import get_optimizer
from shardctl.estimate.workload import ServingWorkload, TrainingWorkload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardctl.estimate.model.layer_graph import LayerGraph
    from shardctl.estimate.search.mesh_comparison import MeshCandidate, SearchResult
    from shardctl.options import PlanOptions
    from shardctl.planning.estimated_model import EstimatedModel
    from shardctl.tensors.mesh import Mesh

    Workload = ServingWorkload | TrainingWorkload
    Searching = Callable[[EstimatedModel, Workload], SearchResult]

MOST_FOUND: Final = 5
"""Settings after which the search ends."""
MOST_TRIED: Final = 32
"""Combinations of settings that are tried at most, the mildest first."""
_MAX_CHUNK_COUNTS: Final = 3
"""Numbers of chunks of a stage that a search tries, the largest: more of them wait less and send more."""
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


_RECOMPUTE_ALL: Final = SettingChange(
    "--recompute full", "recompute all activations", _SLOWER, (("recompute", "full"), ("recompute_every", 1))
)


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


_PIPELINED: Final = frozenset({"megatron", "fsdp2"})
"""Profiles whose runtimes interleave the chunks of stages."""
_SHARED_STAGES: Final = {"megatron": (1, 2), "fsdp2": (0, 2), "deepspeed": (0, 1, 2), "hf": (0, 1, 2)}
"""ZeRO stages of dp ranks that a search tries; where fsdp ranks share everything, there is nothing left to share.
Megatron-LM's distributed optimizer sends as much as no sharing, and needs less. With fsdp2, 2 is FSDP that keeps its
parameters between passes (`reshard_after_forward=False`)."""


@value_class
class VariedSettings:
    """What a search of training may vary: settings that nobody gave."""

    recompute: bool = False
    zero: bool = False
    virtual_stages: bool = False
    overlap: bool = False
    cheap_modules: tuple[str, ...] = ()
    """Modules of Megatron-LM's selective recomputation that take next to no time to compute again."""

    def list_groups(
        self, work: TrainingWorkload, mesh: Mesh, stages: Sequence[int]
    ) -> Iterator[tuple[tuple[SettingChange, ...], bool]]:
        """List the combinations for `mesh` but for recomputation, each with whether all-to-alls are overlapped."""
        for zero, chunks, overlap in product(
            self._list_zero(work, mesh), self._list_chunks(work, mesh, stages), self._list_overlaps(work, mesh)
        ):
            overlapped = bool(overlap) or work.overlapped_all_to_all
            if overlapped and mesh.degree("pp") > 1 and not chunks and work.virtual_stages == 1:
                continue  # Megatron-LM's `validate_args`
            yield (*zero, *chunks, *overlap), overlapped

    def list_recomputation(self, *, overlapped: bool) -> Iterator[tuple[SettingChange, ...]]:
        """List what may be recomputed, the least first."""
        yield ()
        if not self.recompute:
            return
        if self.cheap_modules:
            names = ",".join(self.cheap_modules)
            flags = f"--recompute selective --recompute-modules {names}"
            cheap = (("recompute", "selective"), ("recompute_modules", self.cheap_modules))
            yield (SettingChange(flags, f"recompute {names}", _MILD, cheap),)
        else:
            selective = (("recompute", "selective"),)
            yield (SettingChange("--recompute selective", "recompute some activations", _MILD, selective),)
        if not overlapped:  # Megatron-LM refuses both
            yield (_RECOMPUTE_ALL,)

    def _list_zero(self, work: TrainingWorkload, mesh: Mesh) -> list[tuple[SettingChange, ...]]:
        if not self.zero or mesh.degree("fsdp") > 1 or mesh.degree("dp") * mesh.degree("cp") == 1:
            return [()]
        stages = _SHARED_STAGES[work.profile]
        return [
            (SettingChange(f"--zero {zero}", f"share model states by ZeRO-{zero}", _MILD * zero, (("zero", zero),)),)
            if zero
            else ()
            for zero in stages
        ]

    def _list_chunks(
        self, work: TrainingWorkload, mesh: Mesh, stages: Sequence[int]
    ) -> list[tuple[SettingChange, ...]]:
        """List model chunks of a stage: those that divide its layers, and one layer each."""
        pp = mesh.degree("pp")
        if not self.virtual_stages or pp == 1 or work.count_passes(pp) % pp:
            return [()]
        layers = min(stages)
        some = [number for number in range(2, layers + 1) if layers % number == 0]
        if len(set(stages)) > 1:
            some = [number for number in some if max(stages) % number == 0] + [layers] * (layers > 1)
        return [
            (),
            *(
                (SettingChange(f"--vp {number}", f"interleave {number} chunks of each stage", _MILD, values),)
                for number in dict.fromkeys(some[-_MAX_CHUNK_COUNTS:])
                for values in ((("schedule", "interleaved"), ("virtual_stages", number)),)
            ),
        ]

    def _list_overlaps(self, work: TrainingWorkload, mesh: Mesh) -> list[tuple[SettingChange, ...]]:
        if not self.overlap or mesh.ep == 1 or work.recompute == "full":
            return [()]
        change = "exchange tokens of experts behind another microbatch"
        return [(), (SettingChange("--overlap-all-to-all", change, _MILD, (("overlapped_all_to_all", True),)),)]


def find_varied_settings(options: PlanOptions, work: Workload | None, anatomy: LayerGraph | None) -> VariedSettings:
    """Find what a search may vary: of training whose layers are described, what no option of the command says."""
    if not isinstance(work, TrainingWorkload) or anatomy is None:
        return VariedSettings()
    free = options.recompute is None and work.recompute_every == 1
    latent = any(layer.attention is not None and layer.attention.latent for layer in anatomy.layers)
    experts = any(layer.experts for layer in anatomy.layers)
    cheap = ("moe_act",) * experts + ("layernorm",) + ("mla_up_proj",) * latent
    shares = options.zero is None and options.offload in {None, "none"} and work.profile in _SHARED_STAGES
    return VariedSettings(
        recompute=free,
        zero=shares and not get_optimizer(work.optimizer).spreads,
        virtual_stages=options.virtual_stages is None and options.schedule is None and work.profile in _PIPELINED,
        overlap=experts and work.profile == "megatron" and not work.overlapped_all_to_all,
        cheap_modules=cheap if work.profile == "megatron" else (),
    )


def apply_changes(work: TrainingWorkload, changes: Sequence[SettingChange]) -> TrainingWorkload:
    """Return the work with `changes` of its settings."""
    return replace(work, **{name: value for one in changes for name, value in one.values})


def choose_changed_options(options: PlanOptions, changes: Sequence[SettingChange]) -> PlanOptions:
    """Return the options of a plan with `changes`, as `SettingChange.options` would give them."""
    values = {name: value for one in changes for name, value in one.values}
    values.pop("schedule", None)  # follows from --vp
    if "recompute_modules" in values:
        values["recompute_modules"] = ",".join(values["recompute_modules"])
    return replace(options, **values)


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
        yield [_RECOMPUTE_ALL]
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
