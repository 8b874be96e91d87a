"""Finds the best meshes for a purpose and a number of devices."""

from __future__ import annotations

from dataclasses import field, replace
from math import inf, prod
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import UnsupportedError, UsageError
from shardctl.base.value import state_class, value_class
from shardctl.estimate.model.allowed_degrees import AllowedDegrees
from shardctl.estimate.model.heaviest import HeaviestRanks
from shardctl.estimate.model.rank_shards import RankShards
from shardctl.estimate.rank_estimate import MeshEstimate, RankEstimate
from shardctl.estimate.search.cost import MeshCost, price_mesh
from shardctl.estimate.search.mesh_comparison import (
    SERVING,
    TRAINING,
    LowerBoundChecks,
    MeshCandidate,
    SearchResult,
    SearchSpace,
    count_microbatches,
    find_fewest_devices,
    rank_candidate,
    search_meshes,
    set_equal_tokens,
)
from shardctl.estimate.term import sum_terms
from shardctl.estimate.training.activations import estimate_activations
from shardctl.estimate.training.optimizers import get_optimizer
from shardctl.estimate.training.states import list_state_terms
from shardctl.estimate.workload import ServingWorkload, TrainingWorkload
from shardctl.hardware.devices import DeviceSpec, get_device
from shardctl.planning.forecast import apply_calibration, calibrate_from_log, estimate_needs
from shardctl.planning.settings_search import (
    SettingChange,
    SettingsCandidate,
    VariedSettings,
    apply_changes,
    choose_changed_options,
    find_varied_settings,
    search_settings,
)
from shardctl.planning.workload import plan_workload
from shardctl.tensors.mesh import EXPERT_FSDP, Mesh

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from shardctl.estimate.search.mesh_comparison import SmallestCluster
    from shardctl.estimate.training.calibrate import FittedCalibration
    from shardctl.options import PlanOptions
    from shardctl.planning.estimated_model import EstimatedModel

    _SettingsGroup = tuple[tuple[SettingChange, ...], tuple[tuple[SettingChange, ...], ...]]

_DEFAULT_DEVICE_NAME: Final = "h100-80g"
"""Whose nodes and speed are assumed if no device is named."""

_SHARE_ALL: Final = 3
"""The ZeRO stage that shares parameters, too."""
_MAX_TUNED_MESHES: Final = 32
"""Meshes whose settings are chosen among all, the fastest first: four times what is shown. Slower ones run as they were
asked for, or if they do not fit, with as much recomputed and shared as can be."""
_MODEL_STATE_CATEGORIES: Final = frozenset({"weights", "gradients", "optimizer"})


@value_class
class MeshExploration:
    """What was found among all meshes of some devices."""

    found: SearchResult
    fewest: SmallestCluster | None
    """The fewest devices on which anything fits; None without a device, or if nothing does."""
    sequences: int | None = None
    """In training, the sequences of one optimizer step, which are the same for every mesh."""
    calibration: FittedCalibration | None = None
    """What measured peaks made of the estimates."""
    settings: tuple[SettingsCandidate, ...] = ()
    """Where nothing fits, settings with which something would, the cheapest first."""
    recomputed: MeshCandidate | None = None
    """Where no settings are enough either, the fewest devices that fit if all activations were recomputed."""
    changes: Mapping[Mesh, tuple[SettingChange, ...]] = field(default_factory=dict)
    """The settings that were chosen for each mesh among those that nobody gave."""

    def compared(self, plan_options: PlanOptions, mesh: Mesh) -> PlanOptions:
        """Return the options as `mesh` was compared for: in training with as many microbatches as equal steps take."""
        plan_options = choose_changed_options(plan_options, self.changes.get(mesh, ()))
        if self.sequences is None:
            return plan_options
        many = count_microbatches(mesh, self.sequences, plan_options.batch or 1)
        return replace(plan_options, microbatches=many, global_batch=None, calibration=self.calibration)


@value_class
class MeshExplorer:
    """What a search asks of each mesh."""

    about: EstimatedModel
    work: ServingWorkload | TrainingWorkload | None
    device: DeviceSpec
    heaviest: HeaviestRanks
    known: dict[Mesh, dict[int, RankEstimate]] = field(default_factory=dict)
    """What was estimated: by mesh and stage."""
    calibration: FittedCalibration | None = None
    """What measured peaks make of estimates."""
    global_batch: int | None = None
    """Sequences of one optimizer step on any number of devices, if somebody says so."""
    alike: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    """By the layers of the stages, what `find_alike_stages` found."""
    layer_kinds: list[object] = field(default_factory=list)
    """Of each layer, what it computes and holds."""

    def with_settings(self, about: EstimatedModel, work: ServingWorkload | TrainingWorkload) -> MeshExplorer:
        """Return the explorer of the model as it would be, and of other work."""
        heaviest = self.heaviest if about is self.about else HeaviestRanks(about.inventory)
        kept = {"alike": self.alike, "layer_kinds": self.layer_kinds} if about is self.about else {}
        fresh: dict[str, Any] = {"known": {}, "alike": {}, "layer_kinds": []}
        return replace(self, about=about, work=work, heaviest=heaviest, **(fresh | kept))

    def law(self) -> AllowedDegrees:
        """Return which degrees the model allows."""
        return AllowedDegrees(
            self.about.inventory, self.work.sequence if isinstance(self.work, TrainingWorkload) else None
        )

    def build_search_space(self) -> SearchSpace:
        """Return what is tried; where dp ranks share all that fsdp ranks do, one of the two axes is enough."""
        if not isinstance(self.work, TrainingWorkload):
            return SearchSpace(SERVING, self.device.per_node, stored=True)
        axes = TRAINING - {"fsdp"} if self.work.zero == _SHARE_ALL else TRAINING
        return SearchSpace(axes, self.device.per_node, even=self.work.profile == "megatron")

    def work_on(self, mesh: Mesh) -> ServingWorkload | TrainingWorkload | None:
        """Return what a mesh does: in training, meshes of as many ranks take as many sequences a step."""
        if not isinstance(self.work, TrainingWorkload):
            return self.work
        sequences = self.global_batch or count_step_sequences(self.work, mesh.world)
        return self.work if sequences is None else set_equal_tokens(self.work, mesh, sequences)

    def estimate(self, mesh: Mesh, stages: tuple[int, ...]) -> MeshEstimate:
        """Return what the heaviest rank of each stage needs; stages that are alike need what the first of them does."""
        ranks = {one.ranks[0].holding.stage: one.ranks[0] for one in self.glances(mesh, stages)}
        held = self.heaviest.hold(mesh, stages) if len(ranks) < len(stages) else ()
        alike = self.find_alike_stages(stages)
        return MeshEstimate(
            tuple(ranks[n] if n in ranks else replace(ranks[alike[n]], holding=held[n]) for n in range(len(stages)))
        )

    def glances(self, mesh: Mesh, stages: tuple[int, ...]) -> Iterator[MeshEstimate]:
        """Yield the same stage by stage: the first holds most microbatches, and the last has the head."""
        found, last = self.known.setdefault(mesh, {}), len(stages) - 1
        held = self.heaviest.hold(mesh, stages, most=1) if not found else ()
        alike = self.find_alike_stages(stages)
        for stage in dict.fromkeys((0, last, *range(1, last))):
            if alike[stage] != stage:
                continue
            if stage not in found:
                if stage >= len(held):
                    held = self.heaviest.hold(mesh, stages)
                seen = self._estimate_held(held[stage : stage + 1], mesh, stages)
                (found[stage],) = apply_calibration(seen, self.calibration).ranks
            yield MeshEstimate((found[stage],))

    def find_alike_stages(self, stages: tuple[int, ...]) -> tuple[int, ...]:
        """Find for each stage the first that has equal layers, and so in no schedule fewer microbatches in flight.

        The first and the last stage, which have the embedding and the head, are like no other.
        """
        if not isinstance(self.work, TrainingWorkload) or self.about.anatomy is None:
            return tuple(range(len(stages)))
        if stages not in self.alike:
            if not self.layer_kinds:
                self.layer_kinds.extend(self._list_layer_kinds())
            firsts: dict[object, int] = {}
            found, start, last = [], 0, len(stages) - 1
            for stage, layers in enumerate(stages):
                inside = tuple(self.layer_kinds[start : start + layers])
                key = (inside, stage if stage in {0, last} else None)
                found.append(firsts.setdefault(key, stage))
                start += layers
            self.alike[stages] = tuple(found)
        return self.alike[stages]

    def _list_layer_kinds(self) -> list[object]:
        """List for each layer what it computes and holds; equal objects for equal layers."""
        assert self.about.anatomy is not None  # noqa: S101 - asked before
        held: list[list[object]] = [[] for _ in range(self.about.inventory.layers)]
        for kind in self.about.inventory.kinds:
            spec = kind.spec
            for where, layer in spec.where:
                if where == "layer":
                    known = (kind.shape, kind.dtype.name, kind.count, id(spec.cuts), spec.of_expert, kind.trainable)
                    held[layer].append(known)
        numbers: dict[object, int] = {}
        pairs = zip(self.about.anatomy.layers, map(tuple, held), strict=False)
        return [numbers.setdefault(pair, len(numbers)) for pair in pairs]

    def _estimate_held(self, held: tuple[RankShards, ...], mesh: Mesh, stages: tuple[int, ...]) -> MeshEstimate:
        """Return what the ranks of `held` need.

        Raises UsageError, as for a mesh that is not possible, where that is not known though it is of one device; and
        UnsupportedError where it is of no mesh.
        """
        work = self.work_on(mesh)
        try:
            return estimate_needs(self.about, held, mesh, stages, work)
        except UnsupportedError as error:
            alone, layers = Mesh.of(), (self.about.inventory.layers,)
            estimate_needs(self.about, self.heaviest.hold(alone, layers), alone, layers, work)
            raise UsageError(error.message, hint=error.hint) from error

    def once(self, *, expert: bool, gradients: bool = True) -> int:
        """Return bytes of states that training has once at least, of experts or of all else, perhaps less `gradients`.

        0 if they are not on devices.
        """
        kinds = tuple(kind for kind in self.about.inventory.kinds if kind.spec.of_expert == expert)
        if not isinstance(self.work, TrainingWorkload) or self.work.offload != "none" or not kinds:
            return 0
        alone, layers = Mesh.of(), (self.about.inventory.layers,)
        (held,) = HeaviestRanks(replace(self.about.inventory, kinds=kinds)).hold(alone, layers)
        try:
            terms = list_state_terms(held, alone, self.work)
        except UsageError:  # nothing of them can be trained
            return 0
        terms = tuple(t for t in terms if gradients or t.category != "gradients")
        # Of Megatron's states nothing but the padding is not exact; of other runtimes' what comes and goes.
        lasts = self.work.profile == "megatron"
        squares = {slot.name for slot in get_optimizer(self.work.optimizer).slots if slot.square}
        some = (t for t in terms if (t.exact or lasts) and t.name not in squares)
        return sum(t.low for t in some if t.category in _MODEL_STATE_CATEGORIES and t.tier == "device")

    def floor(self, dense: int, expert: int) -> Callable[[Mesh], int]:
        """Return the states that some rank of a mesh must have: the mean of `dense` and `expert` bytes over all."""
        work = self.work
        shared = isinstance(work, TrainingWorkload) and (work.zero > 0 or get_optimizer(work.optimizer).spreads)

        def floor(mesh: Mesh) -> int:
            apart = mesh.degree("pp") * mesh.ep * mesh.etp * mesh.degree(EXPERT_FSDP)
            alike = prod(mesh.degree(axis) for axis in ("pp", "fsdp", "tp"))
            return dense // (mesh.world if shared else alike) + expert // (mesh.world if shared else apart)

        return floor

    def passing(self, floor: Callable[[Mesh], int]) -> Callable[[Mesh, tuple[int, ...]], int] | None:
        """Return the activations that a mesh's first stage must have, and if it is the only one, its states, too.

        `floor` leaves gradients out: they grow while activations are freed.
        None where activations are not what the formulas say, or not known.
        """
        work, anatomy = self.work, self.about.anatomy
        if not isinstance(work, TrainingWorkload) or anatomy is None or self.calibration is not None:
            return None
        known: dict[tuple[object, ...], int] = {}

        def passing(mesh: Mesh, stages: tuple[int, ...]) -> int:
            replicas = mesh.degree("dp") * mesh.degree("fsdp")
            key = (stages, replicas, mesh.degree("cp"), mesh.degree("tp"), mesh.ep, mesh.etp)
            if key not in known:
                first = RankShards(0, "", {}, 1, 0, range(stages[0]), ())
                at = self.work_on(mesh)
                assert isinstance(at, TrainingWorkload)  # noqa: S101 - as `work` is
                try:
                    known[key] = sum_terms(estimate_activations(anatomy, first, mesh, at, stages=stages)).nbytes
                except UnsupportedError:
                    known[key] = 0
            return known[key] + (floor(mesh) if len(stages) == 1 else 0)

        return passing

    def build_checks(self) -> LowerBoundChecks:
        """Build what rules meshes out before all their ranks are estimated."""
        floor = self.floor(self.once(expert=False), self.once(expert=True))
        lasting = self.floor(self.once(expert=False, gradients=False), self.once(expert=True, gradients=False))
        return LowerBoundChecks(self.glances, floor, self.passing(lasting))

    def price(self, mesh: Mesh, _stages: tuple[int, ...], estimate: MeshEstimate) -> MeshCost:
        """Return what a mesh costs, for a model whose layers are described."""
        assert self.about.anatomy is not None  # noqa: S101 - there is work only for those
        work = self.work_on(mesh)
        assert work is not None  # noqa: S101
        return price_mesh(self.about.anatomy, estimate, mesh, work, self.device, dtype=self.about.dtype)


@state_class
class SettingsChooser:
    """Chooses for each mesh the fastest settings that fit, among those that nobody gave."""

    explorer: MeshExplorer
    varied: VariedSettings
    budget: int | None
    others: dict[tuple[SettingChange, ...], MeshExplorer] = field(default_factory=dict)
    """Explorers of the changed work."""
    floors: dict[int, Callable[[Mesh], int]] = field(default_factory=dict)
    """By the ZeRO stage of dp ranks, the bytes of states that some rank must have."""

    def choose(self, found: SearchResult) -> tuple[SearchResult, dict[Mesh, tuple[SettingChange, ...]]]:
        """Return `found` with the settings of each mesh, also of meshes that did not fit without."""
        if self.varied == VariedSettings():
            return found, {}
        fitting = {one.mesh: one for one in found.ranked}
        stages = {one.mesh: one.stages for one in found.ranked}
        refused = [one for one in found.rejected if one.mesh is not None and one.why == "memory"]
        stages |= {one.mesh: one.stages for one in refused if one.mesh and self._may_fit(one.mesh, one.stages)}
        order = sorted(stages, key=lambda mesh: self._time_fastest(mesh, stages[mesh]))
        changes: dict[Mesh, tuple[SettingChange, ...]] = {}
        for number, mesh in enumerate(order):
            every = number < _MAX_TUNED_MESHES
            if not every and mesh in fitting:
                continue
            chosen = self._choose(mesh, stages[mesh], self._list_groups(mesh, stages[mesh], every=every))
            if chosen is not None:
                changes[mesh], fitting[mesh] = chosen
        ranked = sorted(fitting.values(), key=rank_candidate)
        rejected = [one for one in found.rejected if one.mesh not in fitting]
        return replace(found, ranked=tuple(ranked), rejected=tuple(rejected)), changes

    def _explore(self, changes: tuple[SettingChange, ...]) -> MeshExplorer:
        if not changes:
            return self.explorer
        if changes not in self.others:
            work = self.explorer.work
            assert isinstance(work, TrainingWorkload)  # noqa: S101 - nothing else is varied
            self.others[changes] = self.explorer.with_settings(self.explorer.about, apply_changes(work, changes))
        return self.others[changes]

    def _list_groups(self, mesh: Mesh, stages: tuple[int, ...], *, every: bool = True) -> list[_SettingsGroup]:
        """List the settings of a mesh in groups, each with what may be recomputed, the least first.

        Without `every`, only those that share and recompute most, and overlap nothing; the first needs least.
        """
        try:
            work = self.explorer.work_on(mesh)
        except UsageError:  # the step has no whole number of microbatches
            return []
        assert isinstance(work, TrainingWorkload)  # noqa: S101 - nothing else is varied
        varied = self.varied if every else replace(self.varied, overlap=False)
        found = [
            (group, tuple(varied.list_recomputation(overlapped=overlapped)))
            for group, overlapped in varied.list_groups(work, mesh, stages)
        ]
        if every or not found:
            return found
        most = {one for one in found[-1][0] if "--zero" in one.options}
        return [(group, levels[-1:]) for group, levels in found if most <= set(group)]

    def _may_fit(self, mesh: Mesh, stages: tuple[int, ...]) -> bool:
        """Return whether a mesh fits with the settings that need least."""
        return any(
            self._glance(self._explore((*group, *levels[-1])), mesh, stages) is not None
            for group, levels in self._list_groups(mesh, stages, every=False)[:1]
        )

    def _time_fastest(self, mesh: Mesh, stages: tuple[int, ...]) -> float:
        """Return device-seconds per token of the first stage with the settings that take least time."""
        groups = self._list_groups(mesh, stages)
        first = self.explorer.heaviest.hold(mesh, stages, most=1)[0]
        # Of each ZeRO stage the group with most chunks and the overlap comes last.
        fastest = {
            tuple(one.options for one in group if "--zero" in one.options): (group, levels) for group, levels in groups
        }
        times = [self._time((*group, *levels[0]), mesh, stages, first) for group, levels in fastest.values()]
        return min((one for one in times if one is not None), default=inf)

    def _glance(self, explorer: MeshExplorer, mesh: Mesh, stages: tuple[int, ...]) -> tuple[MeshEstimate, ...] | None:
        """Return what the stages of a mesh need; None if one does not fit."""
        work, budget = explorer.work, self.budget
        assert isinstance(work, TrainingWorkload)  # noqa: S101 - nothing else is varied
        if work.zero not in self.floors:
            self.floors[work.zero] = explorer.floor(explorer.once(expert=False), explorer.once(expert=True))
        if budget is not None and self.floors[work.zero](mesh) > budget:
            return None
        seen: list[MeshEstimate] = []
        try:
            for one in explorer.glances(mesh, stages):
                seen.append(one.within(budget))
                if seen[-1].fits is False:
                    return None
        except (UsageError, UnsupportedError):  # such as selective recomputation of layers where it is not known
            return None
        return tuple(seen)

    def _choose(
        self, mesh: Mesh, stages: tuple[int, ...], among: list[_SettingsGroup]
    ) -> tuple[tuple[SettingChange, ...], MeshCandidate] | None:
        """Choose the settings of a mesh; None if it fits with none.

        In each group of settings, recomputing more takes longer and needs less, so the first that fits is its fastest;
        groups whose fastest is not faster than what was found are passed over.
        """
        slowest = self._find_slowest(mesh, stages)
        timed: list[tuple[float, int, _SettingsGroup]] = []
        for number, settings in enumerate(among):
            shortest = self._time((*settings[0], *settings[1][0]), mesh, stages, slowest)
            if shortest is not None:
                timed.append((shortest, number, settings))
        best: tuple[bool, float, tuple[SettingChange, ...]] | None = None
        for least, _, (group, levels) in sorted(timed, key=lambda one: one[:2]):
            if best is not None and (False, least) >= best[:2]:
                break
            for level in levels:
                changes = (*group, *level)
                seconds = self._time(changes, mesh, stages, slowest) if level else least
                if seconds is None or (best is not None and (False, seconds) >= best[:2]):
                    continue
                seen = self._glance(self._explore(changes), mesh, stages) or ()
                uncertain = any(one.certain is False for one in seen)
                if seen and (best is None or (uncertain, seconds) < best[:2]):
                    best = (uncertain, seconds, changes)
                if seen and not uncertain:
                    break
        if best is None:
            return None
        changes = best[-1]
        explorer = self._explore(changes)
        estimate = explorer.estimate(mesh, stages).within(self.budget)
        cost = explorer.price(mesh, stages, estimate)
        return changes, MeshCandidate(mesh, stages, estimate, cost, " ".join(one.options for one in changes))

    def _find_slowest(self, mesh: Mesh, stages: tuple[int, ...]) -> RankShards:
        """Find the stage that takes longest, which no setting changes."""
        held = self.explorer.heaviest.hold(mesh, stages)
        alike = self.explorer.find_alike_stages(stages)
        firsts = [held[stage] for stage in dict.fromkeys(alike)]
        if len(firsts) == 1:
            return firsts[0]
        return max(firsts, key=lambda one: self._time((), mesh, stages, one) or 0.0)

    def _time(
        self, changes: tuple[SettingChange, ...], mesh: Mesh, stages: tuple[int, ...], rank: RankShards
    ) -> float | None:
        """Return device-seconds per token at the pace of `rank`; None for settings that the mesh cannot have."""
        try:
            return self._explore(changes).price(mesh, stages, MeshEstimate((RankEstimate(rank, ()),))).score
        except (UsageError, UnsupportedError):
            return None


def explore_meshes(about: EstimatedModel, plan_options: PlanOptions, mesh: Mesh | None) -> MeshExploration:
    """Rank all meshes of `plan_options.devices`: by default as many as `mesh` has ranks, else the fewest that will do.

    Raises UsageError for options that contradict each other.
    """
    work = plan_workload(plan_options, about, mesh or Mesh.of())
    if about.anatomy is None:  # compared by weights
        work = None
    explorer = MeshExplorer(
        about,
        work,
        plan_options.device or get_device(_DEFAULT_DEVICE_NAME),
        HeaviestRanks(about.inventory),
        global_batch=plan_options.global_batch,
    )
    if isinstance(work, TrainingWorkload) and plan_options.calibration is not None:
        explorer = replace(
            explorer, calibration=calibrate_from_log(about, work, mesh or Mesh.of(), plan_options.calibration)
        )
    space = explorer.build_search_space()
    budget = plan_options.device.usable_bytes if plan_options.device is not None else None
    fewest, quick = None, LowerBoundChecks()
    if budget is not None:
        fewest, quick = _find_fewest(explorer, budget)
    devices = plan_options.devices or (mesh.world if mesh else None) or (fewest.devices if fewest else 1)

    def search(one: MeshExplorer, quick: LowerBoundChecks | None, *, closest: bool = True) -> SearchResult:
        pricer = one.price if one.work is not None else None
        # In serving the heaviest stage, which rejections name, may be any, and is found soon.
        checks = None if space.stored else quick
        law, within = one.law(), one.build_search_space()
        return search_meshes(
            devices, law, one.estimate, pricer, space=within, budget=budget, quick=checks, closest=closest
        )

    found = search(explorer, quick)
    varied = find_varied_settings(plan_options, work, about.anatomy)
    found, changes = SettingsChooser(explorer, varied, budget).choose(found)
    step = plan_options.global_batch
    if step is None and isinstance(work, TrainingWorkload):
        step = count_step_sequences(work, devices)
    made = MeshExploration(found, fewest, step, explorer.calibration, changes=changes)
    if budget is None or found.ranked or work is None:
        return made

    def search_with(model: EstimatedModel, changed: ServingWorkload | TrainingWorkload) -> SearchResult:
        other = explorer.with_settings(model, changed)
        return search(other, other.build_checks(), closest=False)

    settings = search_settings(about, work, search_with)
    if settings or not isinstance(work, TrainingWorkload) or (work.recompute == "full" and work.recompute_every == 1):
        return replace(made, settings=settings)
    leaner = explorer.with_settings(about, replace(work, recompute="full", recompute_every=1))
    few, _ = _find_fewest(leaner, budget)
    return replace(made, recomputed=few.candidate if few else None)


def _find_fewest(explorer: MeshExplorer, budget: int) -> tuple[SmallestCluster | None, LowerBoundChecks]:
    """Find the fewest devices on which some mesh fits; with the checks that ruled others out."""
    dense, expert = explorer.once(expert=False), explorer.once(expert=True)
    quick = explorer.build_checks()
    space = explorer.build_search_space()
    found = find_fewest_devices(
        explorer.law(), explorer.estimate, space=space, budget=budget, quick=quick, together=dense + expert
    )
    return found, quick


def count_step_sequences(work: TrainingWorkload, devices: int) -> int | None:
    """Count the sequences of one optimizer step on `devices`: as many for each as if all were data-parallel.

    None where somebody says how many microbatches each data-parallel rank takes: then meshes have steps of their own.
    """
    return devices * work.micro_batch if work.microbatches is None else None
