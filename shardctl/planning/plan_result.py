"""Holds what a plan says: what each rank and stage has and needs, and what the conversion costs."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import field, replace
from typing import TYPE_CHECKING, Final, Literal

from shardctl.base.amounts import format_file_size, format_memory_size, format_plural
from shardctl.base.result_view import ResultView
from shardctl.base.value import value_class
from shardctl.conversion.conversion_plan import choose_layout, choose_stages
from shardctl.conversion.tensor_choice import filter_tensors
from shardctl.estimate.search.mesh_comparison import WeightTotals
from shardctl.estimate.training.layer_flags import list_expert_remarks, list_model_remarks
from shardctl.estimate.training.selective import list_recomputation_remarks
from shardctl.estimate.workload import ServingWorkload, TrainingWorkload
from shardctl.libraries.files.file_names import WEIGHT_SUFFIXES
from shardctl.planning.adapter_plan import AdapterPlan, hold_adapter, plan_adapter
from shardctl.planning.advice import PlanAdvice, advise_plan
from shardctl.planning.estimated_model import EstimatedModel, build_estimated_model
from shardctl.planning.forecast import WorkloadEstimate, estimate_workload
from shardctl.planning.quantised_degrees import find_quantized_degrees
from shardctl.storage.free_space import find_existing_parent, measure_free_space
from shardctl.tensors.mesh import Mesh

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from shardctl.checkpoint.opening import OpenedCheckpoint
    from shardctl.conversion.measured_conversion import MeasuredConversion
    from shardctl.estimate.model.inventory import TensorInventory
    from shardctl.estimate.model.rank_shards import RankShards
    from shardctl.estimate.term import MemorySum
    from shardctl.models.names.extra_names import ExtraTensor
    from shardctl.options import PlanOptions, ReshardOptions
    from shardctl.planning.mesh_search import MeshExploration
    from shardctl.planning.quantised_degrees import QuantizedDegrees
    from shardctl.tensors.copyplan import CopyPlan


PlanAnswer = Literal[
    "FITS",
    "FITS, BUT TIGHT",
    "DOES NOT FIT",
    "DOES NOT FIT, THOUGH CLOSE",
    "NOT KNOWN",
    "NO ROOM TO CONVERT",
    "NEEDS",
]
"""How the first line of a plan begins; docs/exit-codes.md says when, and which exit code each has."""

DEFAULT_DISK_RATE: Final = 10**9
"""Bytes per second: what one cloud disk or one SATA array sustains; NVMe has 2 to 7 times as much, networks a tenth."""
_HEADER_ALLOWANCE_BYTES: Final = 1 << 20
"""Bytes of headers that a rank's files may have without a word."""


@value_class
class RankPlan:
    """What one rank holds; exact, from headers."""

    rank: int
    label: str
    """Its place in words, such as ``pp0 tp1``."""
    coordinate: Mapping[str, int]
    replicas: int
    """How many ranks hold just this: all that agree on every axis but dp and cp."""
    tensors: int
    weight_bytes: int
    """Bytes of its parts of the weights, ties counted once."""
    file_bytes: int
    """Bytes of the files that this rank writes, headers and both names of ties included; 0 if none are written."""
    files: tuple[str, ...]


@value_class
class StagePlan:
    """What one pipeline stage holds."""

    stage: int
    first_layer: int
    layers: int
    weight_bytes: int
    """Bytes over all its ranks without replicas of dp and cp."""


@value_class
class ConversionCost:
    """What moving the bytes will cost."""

    read_bytes: int
    write_bytes: int
    files: int
    peak_memory_bytes: int
    """Host memory that the conversion will not exceed."""
    threads: int
    block_bytes: int
    free_bytes: int | None
    """Free space where the result would go; None if the file system does not know."""
    rate_bytes: int
    """Bytes per second, of bytes read and written together, that `seconds` supposes."""
    rate_source: Literal["default", "given", "measured"]
    possible: bool = True
    """Whether the limit on host memory can hold it; if not, the numbers are those of the least that can."""
    changes: tuple[str, ...] = ()
    """What is changed besides the layout, such as ``cast to bf16``."""

    @property
    def seconds(self) -> float:
        """How long moving the bytes takes at that rate; what is computed meanwhile is taken to be no slower."""
        return (self.read_bytes + self.write_bytes) / self.rate_bytes


@value_class
class PlanResult(ResultView):
    """What `plan` says."""

    path: str
    layout: str
    architecture: str
    parameters: int
    weight_bytes: int
    """Of the checkpoint, each element once, in the types that will be written."""
    weight_types: tuple[str, ...]
    """The types that have a hundredth of these bytes at least, the most first."""
    quantised_degrees: Mapping[str, QuantizedDegrees]
    """By axis, the degrees that do not cut blocks of quantized weights; empty if no weights are quantized."""
    mesh: Mesh
    stages: tuple[StagePlan, ...]
    ranks: tuple[RankPlan, ...]
    """The first of each group of ranks that hold the same."""
    replication: float
    """Bytes held by the distinct ranks together, over `weight_bytes`."""
    forecast: WorkloadEstimate
    """What the ranks need, in the order of `ranks`."""
    explored: MeshExploration | None
    """The meshes that were compared, if that was asked for."""
    counsel: PlanAdvice
    """What would have to change, if it does not fit."""
    conversion: ConversionCost | None
    """None where there is nothing to convert: a model of which there is only a config."""
    warnings: tuple[str, ...]
    adapter: AdapterPlan | None = None
    """Of an adapter: what is counted of its base, and what is not."""
    extra: tuple[ExtraTensor, ...] = ()
    """The tensors that the model's class does not have; no device holds them."""
    strict: bool = False
    """Whether a tight fit is a no (`--strict`)."""
    detail: Literal["summary", "stage", "rank", "tensor", "time", "zero"] = "summary"
    """How much the text shows."""
    model: EstimatedModel | None = field(default=None, repr=False)
    """What was estimated, for further questions."""
    plan_copy: Callable[[], CopyPlan] | None = field(default=None, repr=False, compare=False)
    """Works out what would be copied, where there is something to convert."""

    @property
    def copy_plan(self) -> CopyPlan | None:
        """What would be copied, worked out anew, where there is something to convert."""
        return self.plan_copy() if self.plan_copy is not None else None

    @property
    def fits(self) -> bool:
        """Whether the answer is yes, or no limit was given; the exit code repeats it."""
        return self.answer in {"FITS", "NEEDS"} or (self.answer == "FITS, BUT TIGHT" and not self.strict)

    @property
    def answer(self) -> PlanAnswer:
        """Whether the devices hold it, and the host its conversion: the first words of the verdict."""
        estimate = self.forecast.estimate
        if self.explored is not None and not self.explored.found.ranked:
            return "DOES NOT FIT"
        if estimate.budget is not None and estimate.fits is None:
            return "NOT KNOWN"
        if estimate.fits is False:
            return "DOES NOT FIT" if estimate.certain else "DOES NOT FIT, THOUGH CLOSE"
        if self.conversion is not None and not self.conversion.possible:
            return "NO ROOM TO CONVERT"
        if estimate.budget is None:
            return "NEEDS"
        return "FITS" if estimate.certain else "FITS, BUT TIGHT"

    @property
    def verdict(self) -> str:
        """The answer in one line, as the first line of the text and `verdict.text` in JSON say it."""
        answer, seen = self.answer, self.forecast
        if answer == "NO ROOM TO CONVERT" and self.conversion is not None:
            least = format_memory_size(self.conversion.peak_memory_bytes)
            return f"{answer}: reshard needs {least} of host memory, which --memory does not allow"
        needs = self._format_need()
        if answer == "NEEDS":
            return f"{answer} {needs}"
        if self.explored is not None and not self.explored.found.ranked:
            none = f"no mesh of {format_plural(self.explored.found.devices, 'device')} fits"
            return f"{answer}: {none}; {self.mesh if self.mesh.world > 1 else 'one device'} needs {needs}"
        if answer == "NOT KNOWN":
            left_out = "activations are" if seen.work is not None else "memory besides weights is"
            why = f": {seen.unmodelled}" if seen.unmodelled else ""
            return f"{answer}: needs {needs}, but {left_out} not modelled{why}"
        return f"{answer}: needs {needs}"

    def describe_writing(self, destination: str) -> str:
        """Describe in one line what `reshard` would write to `destination`."""
        divided = f"sharded for {self.mesh} " if self.mesh.world > 1 else ""
        shape = f"{divided}in layout {self.layout}".removesuffix(" in layout ranks")
        shape = ", ".join([shape, *(self.conversion.changes if self.conversion is not None else ())])
        size = ""
        if self.conversion is not None:
            written, files = format_file_size(self.conversion.write_bytes), self.conversion.files
            size = f" ({written}, {format_plural(files, 'file')})"
        return f"would write {destination}: the tensors of {self.path}, {shape}{size}"

    def _format_need(self) -> str:
        """Format what the fullest device needs, of how much, and for what."""
        estimate, device, work = self.forecast.estimate, self.forecast.device, self.forecast.work
        least = "at least " if estimate.partial else ""
        known = device is not None and (device.timed or device.measured)
        name = device.name if device is not None and known else "device"
        plural = name if known else "devices"
        limit = f" of {format_memory_size(estimate.budget)}" if estimate.budget is not None else ""
        place = f"the fullest of {self.mesh.world:,} {plural}" if self.mesh.world > 1 else f"one {name}"
        load = " for the weights" if estimate.partial else ""
        if isinstance(work, ServingWorkload):
            load = f", for {format_plural(work.batch, 'sequence')} of {work.context:,} tokens"
        elif work is not None:
            load = f", for {format_plural(work.micro_batch, 'sequence')} of {work.sequence:,} tokens a rank"
            load += self._format_chosen_settings(work)
        return f"{least}{format_amount(estimate.binding.total())}{limit} on {place}{load}"

    def _format_chosen_settings(self, work: TrainingWorkload) -> str:
        """Format the settings that the search chose for this mesh; empty if it was planned without them."""
        changes = self.explored.changes.get(self.mesh, ()) if self.explored is not None else ()
        if not changes or any(getattr(work, name) != value for one in changes for name, value in one.values):
            return ""
        return f", with {' '.join(one.options for one in changes)} as the search chose"


def format_amount(sum_: MemorySum) -> str:
    """Format a number of bytes, with the interval to be expected if it is modelled."""
    if sum_.exact:
        return f"{format_memory_size(sum_.nbytes)} (exact)"
    return f"{format_memory_size(sum_.nbytes)} ({format_memory_size(sum_.low)} to {format_memory_size(sum_.high)})"


def describe_conversion(
    path: str,
    work: MeasuredConversion,
    near: Path,
    plan_options: PlanOptions | None = None,
    about: EstimatedModel | None = None,
) -> PlanResult:
    """Return a conversion as numbers.

    `near` is where free space is looked up. Without a purpose no forecast. `about` is the model as estimates see it, if
    that is other than its files.
    """
    about = about or build_estimated_model(work.checkpoint, work.reshard_options)
    stages = work.stages or (about.inventory.layers,)
    rate = plan_options.disk_rate if plan_options is not None else None
    conversion = ConversionCost(
        read_bytes=work.read_bytes,
        write_bytes=work.write_bytes,
        files=len(work.files) + len(work.carried) + 1,
        peak_memory_bytes=work.budget.projected,
        threads=work.budget.threads,
        block_bytes=work.budget.block,
        free_bytes=measure_free_space(find_existing_parent(near)),
        rate_bytes=rate or DEFAULT_DISK_RATE,
        rate_source="given" if rate else "default",
        possible=not work.impossible,
        changes=work.changes,
    )
    found = _build_result(path, work.checkpoint, about, work.mesh, stages, plan_options, work, conversion)
    besides = _note_extra_bytes(work, found.ranks) if plan_options is not None else ""
    quantised = work.reshard_options.quantize is not None
    left = work.checkpoint.source.notes()[-1:] if quantised else ()  # what stays as it is
    warnings = (*work.have.warnings, *left, *filter(None, [work.impossible, besides]))
    return replace(found, warnings=warnings, extra=work.checkpoint.list_extra_tensors(work.have.extra))


def _note_extra_bytes(work: MeasuredConversion, ranks: Sequence[RankPlan]) -> str:
    """Note what another library has a rank hold that is no part of the cut, such as TensorRT-LLM's whole embedding."""
    if work.dialect is None:
        return ""
    most = max(ranks, key=lambda rank: rank.file_bytes - rank.weight_bytes)
    more = most.file_bytes - most.weight_bytes
    if more <= max(_HEADER_ALLOWANCE_BYTES, most.weight_bytes // 100):
        return ""
    return (
        f"rank {most.rank} of layout {work.layout} holds {format_memory_size(more)} more than its part of the weights, "
        "as copies or padding, which the estimate does not count"
    )


def describe_unstored_model(
    path: str,
    checkpoint: OpenedCheckpoint,
    reshard_options: ReshardOptions,
    plan_options: PlanOptions,
    about: EstimatedModel,
) -> PlanResult:
    """Plan a model that is not stored so: there is only a config, or it would have to be quantized, or not.

    `about` is that model.
    """
    choose_layout(reshard_options)
    mesh = reshard_options.mesh or Mesh.of()
    model = checkpoint.require_placement(mesh)
    stages = choose_stages(model, filter_tensors(checkpoint, reshard_options), mesh, reshard_options.stages)
    if reshard_options.stages is None and (about.dequantised or about.quantised is not None):
        stages = WeightTotals(about.inventory).stages(mesh)
    planned = _build_result(path, checkpoint, about, mesh, stages, plan_options, None, None)
    notes = checkpoint.note_placement(mesh) if mesh.world > 1 else ()
    return replace(planned, warnings=(*planned.warnings, *notes))


def _build_result(
    path: str,
    checkpoint: OpenedCheckpoint,
    about: EstimatedModel,
    mesh: Mesh,
    stages: tuple[int, ...],
    plan_options: PlanOptions | None,
    work: MeasuredConversion | None,
    conversion: ConversionCost | None,
) -> PlanResult:
    forecast = estimate_workload(about, mesh, stages, plan_options)
    alone = hold_adapter(about, mesh, stages)
    holdings = alone if alone is not None else tuple(rank.holding for rank in forecast.estimate.ranks)
    counted: dict[int, tuple[int, int]] = {}
    for held in holdings:  # many share one tuple of parts
        if id(held.parts) not in counted:
            counted[id(held.parts)] = sum(part.count for part in held.parts), held.nbytes
    files = _RankFiles(work)
    ranks = tuple(_build_rank_plan(held, files.sizes(held.rank), *counted[id(held.parts)]) for held in holdings)
    layers = about.anatomy.layers if about.anatomy is not None else ()
    own = about.base.adapter if about.base is not None else about.inventory
    weights = own.nbytes
    return PlanResult(
        path=path,
        layout=work.layout if work is not None else "",
        architecture=checkpoint.model.architecture if checkpoint.model else "",
        parameters=about.parameters,
        weight_bytes=weights,
        weight_types=_list_weight_types(own),
        quantised_degrees=find_quantized_degrees(None if about.dequantised else checkpoint.model, own),
        mesh=mesh,
        stages=_build_stage_plans(stages, ranks) if mesh.world > 1 else (),
        ranks=ranks,
        replication=sum(rank.weight_bytes for rank in ranks) / weights if weights else 1.0,
        forecast=forecast,
        explored=None,
        counsel=advise_plan(about, mesh, forecast),
        conversion=conversion,
        warnings=(
            *checkpoint.manifest.warnings,
            *list_recomputation_remarks(forecast.work, layers),
            *list_model_remarks(forecast.work, about.anatomy),
            *list_expert_remarks(forecast.work, about.inventory),
        ),
        adapter=plan_adapter(about, forecast, alone) if alone is not None else None,
        model=about,
        plan_copy=work.plan_copy if work is not None else None,
    )


def _list_weight_types(inventory: TensorInventory) -> tuple[str, ...]:
    sizes: Counter[str] = Counter()
    for kind in inventory.kinds:
        sizes[kind.dtype.name] += kind.count * kind.dtype.nbytes(kind.shape)
    return tuple(name for name, size in sizes.most_common() if size * 100 >= sizes.total())


class _RankFiles:
    """Finds the files of weights of each rank by how their names begin, among as many files as there are ranks."""

    def __init__(self, work: MeasuredConversion | None) -> None:
        self._work = work
        files = work.files if work is not None else {}
        self._sizes = {path: size for path, size in files.items() if path.endswith(WEIGHT_SUFFIXES)}
        self._turns = {path: turn for turn, path in enumerate(self._sizes)}
        self._sorted = sorted(self._sizes)
        self._known: dict[str, dict[str, int]] = {}

    def sizes(self, rank: int) -> dict[str, int]:
        """The bytes of each file of a rank, in the order in which they are written."""
        if self._work is None:
            return {}
        prefix = self._work.prefix(rank)
        if prefix not in self._known:
            begin = end = bisect_left(self._sorted, prefix)
            while end < len(self._sorted) and self._sorted[end].startswith(prefix):
                end += 1
            found = sorted(self._sorted[begin:end], key=self._turns.__getitem__)
            self._known[prefix] = {path: self._sizes[path] for path in found}
        return self._known[prefix]


def _build_rank_plan(holding: RankShards, sizes: dict[str, int], tensors: int, nbytes: int) -> RankPlan:
    return RankPlan(
        rank=holding.rank,
        label=holding.label,
        coordinate=holding.coordinate,
        replicas=holding.ranks,
        tensors=tensors,
        weight_bytes=nbytes,
        file_bytes=sum(sizes.values()),
        files=tuple(sizes),
    )


def _build_stage_plans(stages: Sequence[int], ranks: tuple[RankPlan, ...]) -> tuple[StagePlan, ...]:
    rows, first = [], 0
    for stage, layers in enumerate(stages):
        nbytes = sum(rank.weight_bytes for rank in ranks if rank.coordinate["pp"] == stage)
        rows.append(StagePlan(stage, first, layers, nbytes))
        first += layers
    return tuple(rows)
