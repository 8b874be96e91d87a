"""What every rank of a mesh will hold and need, whether it fits, and what converting will cost; from headers only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardctl.amounts import memory_size
from shardctl.errors import MemoryBudgetError, UsageError
from shardctl.memory.search import Bulk
from shardctl.mesh import Mesh
from shardctl.options import PlanOptions, ReshardOptions, SourceOptions
from shardctl.storage.room import existing, free_space
from shardctl.verbs import plan_file
from shardctl.verbs.advising import Counsel, counsel
from shardctl.verbs.collecting import uncollected
from shardctl.verbs.drafting import divide, draft, filtered, layout_of, understood
from shardctl.verbs.forecasting import Forecast, foresee
from shardctl.verbs.opening import opened
from shardctl.verbs.purpose import decide_use
from shardctl.verbs.searching import Explored, explore
from shardctl.verbs.subject import EstimatedModel, coded, subject

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardctl.memory.holding import Holding
    from shardctl.verbs.drafting import Draft
    from shardctl.verbs.opening import Checkpoint


_NOTHING: Final = "a plan is for tensors that are stored, in a type that reshard writes"


_HEADERS: Final = 1 << 20
"""Bytes of headers that a rank's files may have without a word."""
_DATA: Final = (".safetensors", ".distcp", ".pt", ".pth")
"""How the names of files with weights end."""


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What one pipeline stage holds."""

    stage: int
    first_layer: int
    layers: int
    weight_bytes: int
    """Bytes over all its ranks without replicas of dp and cp."""


@dataclass(frozen=True, slots=True)
class Conversion:
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
    possible: bool = True
    """Whether the limit on host memory can hold it; if not, the numbers are those of the least that can."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What `plan` says."""

    path: str
    layout: str
    architecture: str
    parameters: int
    weight_bytes: int
    """Of the checkpoint, each element once, in the types that will be written."""
    mesh: Mesh
    stages: tuple[StagePlan, ...]
    ranks: tuple[RankPlan, ...]
    """The first of each group of ranks that hold the same."""
    replication: float
    """Bytes held by the distinct ranks together, over `weight_bytes`."""
    forecast: Forecast
    """What the ranks need, in the order of `ranks`."""
    explored: Explored | None
    """The meshes that were compared, if that was asked for."""
    counsel: Counsel
    """What would have to change, if it does not fit."""
    conversion: Conversion | None
    """None where there is nothing to convert: a model of which there is only a config."""
    warnings: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the answer is yes: devices and host can hold it, as far as limits were given."""
        if self.explored is not None and not self.explored.found.ranked:
            return False
        return self.forecast.estimate.fits is not False and (self.conversion is None or self.conversion.possible)


@uncollected()
def plan(
    path: str | Path,
    wish: ReshardOptions,
    *,
    reading: SourceOptions | None = None,
    destination: str | Path | None = None,
    purpose: PlanOptions | None = None,
    out: str | Path | None = None,
) -> Planned:
    """Work out a conversion without doing it; `destination` says where free space is looked up.

    `out` is where the plan is written, for `reshard --plan` to follow; of a model that is not here there is none.
    A memory limit that cannot hold it is a warning here: the plan is what one asks to learn what is needed.
    """
    purpose = purpose or PlanOptions()
    if purpose.cast_type is not None:
        wish = replace(wish, dtype=purpose.cast_type)
    if purpose.search and wish.mesh is None and wish.stages is not None:
        raise UsageError(
            "--stages is about one mesh, and --search compares many", hint="name the mesh, or leave --stages out"
        )
    with opened(path, replace(understood(reading, wish), described=True)) as checkpoint:
        about = _otherwise(checkpoint, wish, purpose)
        explored = explore(about or subject(checkpoint, wish), purpose, wish.mesh) if purpose.search else None
        if explored is not None and wish.mesh is None:
            wish, purpose = _best(wish, purpose, explored)
        if about is not None:
            if out is not None:
                raise UsageError(f"there is nothing to convert for {out}", hint=_NOTHING)
            planned = imagine(str(path), checkpoint, wish, purpose, about)
        else:
            work, impossible = _drafted(checkpoint, wish)
            planned = describe(str(path), work, Path(destination or path), purpose, impossible=impossible)
            if out is not None:
                plan_file.save(out, work, reading)
        return replace(planned, explored=explored)


def _otherwise(checkpoint: Checkpoint, wish: ReshardOptions, purpose: PlanOptions) -> EstimatedModel | None:
    """The model where it would be other than stored: only described, quantised, or trained as it was before that."""
    trained = decide_use(purpose, wish.mesh or Mesh.of()) == "train"
    if checkpoint.hypothetical or purpose.quantised_type is not None or (trained and coded(checkpoint)):
        return subject(checkpoint, wish, trained=trained).if_quantised(purpose.quantised_type)
    return None


def _best(wish: ReshardOptions, purpose: PlanOptions, explored: Explored) -> tuple[ReshardOptions, PlanOptions]:
    """The same for the mesh that a search found, or if none fits, for the one that comes closest."""
    found = explored.found.best
    if found is None or found.mesh is None:
        return wish, purpose
    stages = ",".join(map(str, found.stages)) if found.mesh.degree("pp") > 1 else None
    mesh = found.mesh if found.mesh.world > 1 else None
    return replace(wish, mesh=mesh, stages=stages), explored.compared(purpose, found.mesh)


def _drafted(checkpoint: Checkpoint, wish: ReshardOptions) -> tuple[Draft, str]:
    """The conversion, and why the limit on host memory cannot hold it; then it is drafted for the least that can."""
    try:
        return draft(checkpoint, wish), ""
    except MemoryBudgetError as error:
        return draft(checkpoint, replace(wish, host_memory=error.needed)), error.message


def describe(
    path: str, work: Draft, near: Path, purpose: PlanOptions | None = None, *, impossible: str = ""
) -> Planned:
    """A worked-out conversion, as numbers; `near` is where free space is looked up. Without a purpose no forecast.

    `impossible` says why the limit on host memory cannot hold it, if so.
    """
    about = subject(work.checkpoint, work.wish)
    stages = work.stages or (about.inventory.layers,)
    conversion = Conversion(
        read_bytes=work.plan.read_bytes,
        write_bytes=work.write_bytes,
        files=len(work.plan.want.files) + len(work.carried) + 1,
        peak_memory_bytes=work.budget.projected,
        threads=work.budget.threads,
        block_bytes=work.budget.block,
        free_bytes=free_space(existing(near)),
        possible=not impossible,
    )
    found = _result(path, work.checkpoint, about, work.mesh, stages, purpose, work, conversion)
    besides = _besides(work, found.ranks) if purpose is not None else ""
    return replace(found, warnings=(*work.have.warnings, *filter(None, [impossible, besides])))


def _besides(work: Draft, ranks: Sequence[RankPlan]) -> str:
    """What another library has a rank hold that is no part of the cut, such as TensorRT-LLM's whole embedding."""
    if work.plan.want.dialect is None:
        return ""
    most = max(ranks, key=lambda rank: rank.file_bytes - rank.weight_bytes)
    more = most.file_bytes - most.weight_bytes
    if more <= max(_HEADERS, most.weight_bytes // 100):
        return ""
    return (
        f"rank {most.rank} of layout {work.layout} holds {memory_size(more)} more than its part of the weights, "
        "as copies or padding, which the estimate does not count"
    )


def imagine(
    path: str, checkpoint: Checkpoint, wish: ReshardOptions, purpose: PlanOptions, about: EstimatedModel
) -> Planned:
    """What a model would need that is not stored so: there is only a config, or it would have to be quantised, or not.

    `about` is that model.
    """
    layout_of(wish)
    mesh = wish.mesh or Mesh.of()
    model = checkpoint.require_model("a plan")
    stages = divide(model, filtered(checkpoint.manifest, wish), mesh, wish.stages)
    if wish.stages is None and (about.dequantised or about.quantised is not None):
        stages = Bulk(about.inventory).stages(mesh)
    return _result(path, checkpoint, about, mesh, stages, purpose, None, None)


def _result(
    path: str,
    checkpoint: Checkpoint,
    about: EstimatedModel,
    mesh: Mesh,
    stages: tuple[int, ...],
    purpose: PlanOptions | None,
    work: Draft | None,
    conversion: Conversion | None,
) -> Planned:
    forecast = foresee(about, mesh, stages, purpose)
    counted: dict[int, tuple[int, int]] = {}
    for rank in forecast.estimate.ranks:  # many share one tuple of parts
        if id(rank.holding.parts) not in counted:
            held = rank.holding
            counted[id(held.parts)] = sum(part.count for part in held.parts), held.nbytes
    ranks = tuple(_rank(rank.holding, work, *counted[id(rank.holding.parts)]) for rank in forecast.estimate.ranks)
    weights = about.inventory.nbytes
    return Planned(
        path=path,
        layout=work.layout if work is not None else "",
        architecture=checkpoint.model.architecture if checkpoint.model else "",
        parameters=about.parameters,
        weight_bytes=weights,
        mesh=mesh,
        stages=_stages(stages, ranks) if mesh.world > 1 else (),
        ranks=ranks,
        replication=sum(rank.weight_bytes for rank in ranks) / weights if weights else 1.0,
        forecast=forecast,
        explored=None,
        counsel=counsel(about, mesh, forecast),
        conversion=conversion,
        warnings=checkpoint.manifest.warnings,
    )


def _rank(holding: Holding, work: Draft | None, tensors: int, nbytes: int) -> RankPlan:
    sizes: dict[str, int] = {}
    if work is not None:
        prefix = work.prefix(holding.rank)
        sizes = {
            path: file.size
            for path, file in work.plan.want.files.items()
            if path.startswith(prefix) and path.endswith(_DATA)
        }
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


def _stages(stages: Sequence[int], ranks: tuple[RankPlan, ...]) -> tuple[StagePlan, ...]:
    rows, first = [], 0
    for stage, layers in enumerate(stages):
        nbytes = sum(rank.weight_bytes for rank in ranks if rank.coordinate["pp"] == stage)
        rows.append(StagePlan(stage, first, layers, nbytes))
        first += layers
    return tuple(rows)
