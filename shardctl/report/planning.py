"""What `plan` says, as text."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Final, Literal

from rich.console import Group

from shardctl.report.grid import line, table
from shardctl.report.sizes import count, file_size, memory_size, plural

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shardctl.verbs.plan import Planned, RankPlan, StagePlan

Detail = Literal["summary", "stage", "rank"]

GROUPED: Final = 64
"""Above this many distinct ranks, equal ones share a line."""
_BAR: Final = 24
"""Characters of a full bar."""


def planning(planned: Planned, detail: Detail = "rank") -> RenderableType:
    """The checkpoint and its mesh in one line, then stages, ranks, and the cost of the conversion."""
    parts: list[RenderableType] = [line(_header(planned), "bold")]
    if detail != "summary" and planned.stages:
        parts.append(table([_stage(stage, planned) for stage in planned.stages], right=frozenset({2}), indent=2))
    if detail == "rank":
        parts.append(_ranks(planned))
    parts += [line(text) for text in (_replication(planned), _conversion(planned)) if text]
    parts.append(line("exact, from headers; the peak memory is a bound", "dim"))
    return Group(*parts)


def _header(planned: Planned) -> str:
    name = PurePath(planned.path).name or planned.path
    model = f"{name} ({planned.architecture})" if planned.architecture else name
    world = planned.mesh.world
    mesh = f"{planned.mesh} = {plural(world, 'rank')}" if world > 1 else "one device"
    amounts = f"{count(planned.parameters)} parameters  {memory_size(planned.weight_bytes)}"
    return f"{model}  {amounts} | {mesh} | layout {planned.layout}"


def _stage(stage: StagePlan, planned: Planned) -> tuple[str, str, str]:
    if stage.layers == 0:
        layers = "no layers"
    elif stage.layers == 1:
        layers = f"layer {stage.first_layer}"
    else:
        layers = f"layers {stage.first_layer}-{stage.first_layer + stage.layers - 1}"
    held = [rank for rank in planned.ranks if rank.coordinate.get("pp", 0) == stage.stage]
    copies = f" x {held[0].replicas} copies" if held and held[0].replicas > 1 else ""
    return f"stage {stage.stage}", layers, f"{memory_size(stage.weight_bytes)} on {plural(len(held), 'rank')}{copies}"


def _ranks(planned: Planned) -> RenderableType:
    heaviest = max((rank.weight_bytes for rank in planned.ranks), default=0)
    copies = planned.ranks[0].replicas > 1 if planned.ranks else False
    rows = [("rank", "place", *(("copies",) if copies else ()), "tensors", "weights", "files", "")]
    groups: dict[tuple[int, ...], list[RankPlan]] = {}
    for rank in planned.ranks:
        groups.setdefault(_alike(rank) if len(planned.ranks) > GROUPED else (rank.rank,), []).append(rank)
    for ranks in groups.values():
        first = ranks[0]
        bar = "█" * round(_BAR * first.weight_bytes / heaviest) if heaviest else ""
        rows.append(
            (
                str(first.rank) if len(ranks) == 1 else plural(len(ranks), "rank"),
                first.label if len(ranks) == 1 else f"{first.label} .. {ranks[-1].label}",
                *((f"x{first.replicas}",) if copies else ()),
                f"{first.tensors:,}",
                memory_size(first.weight_bytes),
                file_size(first.file_bytes),
                bar,
            )
        )
    shift = int(copies)
    return table(rows, right=frozenset({0, 2 + shift, 3 + shift, 4 + shift} | ({2} if copies else set())), indent=2)


def _alike(rank: RankPlan) -> tuple[int, ...]:
    """What ranks of one line have in common."""
    return rank.coordinate.get("pp", 0), rank.tensors, rank.weight_bytes, rank.file_bytes


def _replication(planned: Planned) -> str:
    distinct = len(planned.ranks)
    if planned.mesh.world == 1:
        return ""
    copies = planned.ranks[0].replicas
    text = f"replication: {plural(distinct, 'distinct rank')} hold {planned.replication:.3f} times the weights"
    return text + (f", each {copies} times (dp x cp)" if copies > 1 else "")


def _conversion(planned: Planned) -> str:
    cost = planned.conversion
    return (
        f"conversion: read {file_size(cost.read_bytes)}, write {file_size(cost.write_bytes)} "
        f"in {plural(cost.files, 'file')}, peak host memory {memory_size(cost.peak_memory_bytes)}, "
        f"free space {file_size(cost.free_bytes)}"
    )
