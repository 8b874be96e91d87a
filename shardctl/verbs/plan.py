"""What every rank of a mesh will hold, and what converting will cost; from headers only."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardctl.errors import MemoryBudgetError
from shardctl.mesh import HOLDING
from shardctl.verbs.drafting import Wish, draft
from shardctl.verbs.opening import Reading, opened

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.mesh import Mesh
    from shardctl.verbs.drafting import Draft


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
    """Bytes of the files that this rank writes, headers and both names of ties included."""
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
    free_bytes: int
    """Free space where the result would go."""


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
    conversion: Conversion
    warnings: tuple[str, ...]
    fits: bool = True
    """Whether the memory limit can hold the conversion; if not, `conversion` says what would."""


def plan(
    path: str | Path, wish: Wish, *, reading: Reading | None = None, destination: str | Path | None = None
) -> Planned:
    """Work out a conversion without doing it; `destination` says where free space is looked up.

    A memory limit that cannot hold it is a warning here: the plan is what one asks to learn what is needed.
    """
    with opened(path, reading) as checkpoint:
        near = Path(destination or path)
        try:
            return describe(str(path), draft(checkpoint, wish), near)
        except MemoryBudgetError as error:
            planned = describe(str(path), draft(checkpoint, replace(wish, memory=error.needed)), near)
            return replace(planned, warnings=(*planned.warnings, error.message), fits=False)


def describe(path: str, work: Draft, near: Path) -> Planned:
    """A worked-out conversion, as numbers; `near` is where free space is looked up."""
    ranks = _ranks(work)
    weights = sum(copy.target.nbytes for copy in work.plan.copies)
    return Planned(
        path=path,
        layout=work.layout,
        architecture=work.checkpoint.model.architecture if work.checkpoint.model else "",
        parameters=sum(copy.source.size for copy in work.plan.copies),
        weight_bytes=weights,
        mesh=work.mesh,
        stages=_stages(work, ranks),
        ranks=ranks,
        replication=sum(rank.weight_bytes for rank in ranks) / weights if weights else 1.0,
        conversion=Conversion(
            read_bytes=work.plan.read_bytes,
            write_bytes=work.write_bytes,
            files=len(work.plan.want.files) + len(work.carried) + 1,
            peak_memory_bytes=work.budget.projected,
            threads=work.budget.threads,
            block_bytes=work.budget.block,
            free_bytes=_free(near),
        ),
        warnings=work.have.warnings,
    )


def _ranks(work: Draft) -> tuple[RankPlan, ...]:
    sizes = {path: file.size for path, file in work.plan.want.files.items()}
    if work.placed is None:
        weights = sum(copy.target.nbytes for copy in work.plan.copies)
        names = tuple(path for path in sizes if path.endswith(".safetensors"))
        return (RankPlan(0, "only", {}, 1, len(work.plan.copies), weights, sum(sizes[n] for n in names), names),)
    mesh, wanted = work.mesh, work.plan.want.tensors
    alike = Counter(_holding(mesh, rank) for rank in range(mesh.world))
    rows: dict[tuple[int, ...], RankPlan] = {}
    for rank, held in work.placed.ranks(replicas=True):
        key = _holding(mesh, rank)
        if key not in rows:
            files = tuple(path for path in sizes if path.startswith(f"shard-{rank + 1:05d}-"))
            rows[key] = RankPlan(
                rank=rank,
                label=mesh.label(rank),
                coordinate=mesh.coordinate(rank),
                replicas=alike[key],
                tensors=len(held),
                weight_bytes=sum(wanted[h.tensor.name].dtype.nbytes(box.shape) for h in held for box in h.boxes),
                file_bytes=sum(sizes[path] for path in files),
                files=files,
            )
    return tuple(rows.values())


def _holding(mesh: Mesh, rank: int) -> tuple[int, ...]:
    """What ranks that hold the same weights have in common."""
    at = mesh.coordinate(rank)
    return tuple(at[axis] for axis in HOLDING)


def _stages(work: Draft, ranks: tuple[RankPlan, ...]) -> tuple[StagePlan, ...]:
    if work.placed is None:
        return ()
    rows, first = [], 0
    for stage, layers in enumerate(work.placed.stages):
        nbytes = sum(rank.weight_bytes for rank in ranks if rank.coordinate["pp"] == stage)
        rows.append(StagePlan(stage, first, layers, nbytes))
        first += layers
    return tuple(rows)


def _free(near: Path) -> int:
    place = near.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free
