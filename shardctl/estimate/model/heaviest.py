"""Finds what the heaviest rank of each pipeline stage holds, for the many meshes of a search."""

from __future__ import annotations

from dataclasses import field
from itertools import pairwise
from typing import TYPE_CHECKING

from shardctl.base.value import state_class
from shardctl.estimate.model.rank_shards import HeldPart, RankShards, compute_sizes_at, count_members, group_by_cut
from shardctl.tensors.placement import check_cuts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardctl.estimate.model.inventory import TensorInventory, TensorKind
    from shardctl.tensors.mesh import Mesh


@state_class
class HeaviestRanks:
    """The ranks at index 0 of every axis but pp.

    No rank of their stage holds more: exact cuts and experts are shared out equally, and of ceil-sized parts the first
    is a longest. `hold` says the same of these ranks, and of all others.
    """

    inventory: TensorInventory
    groups: list[TensorKind] = field(init=False)
    """One tensor of each way to be cut; a model has few."""
    group_of: list[int] = field(init=False)
    """For each kind of the inventory its group."""
    layer_of: list[int | None] = field(init=False)
    """For each kind its only layer; None for what is outside of layers, or in several."""
    known: dict[object, tuple[tuple[HeldPart, ...], ...]] = field(default_factory=dict)
    """What was worked out, by what decides it."""
    uncut: dict[object, tuple[tuple[int | None, HeldPart], ...]] = field(default_factory=dict)
    """The parts of all stages together with their only layers, by what decides those."""
    counts: dict[int, list[int]] = field(default_factory=dict)
    """By the degree of ep: how many tensors of each kind a rank has."""

    def __post_init__(self) -> None:
        self.groups, self.group_of = group_by_cut(self.inventory)
        wheres = (kind.spec.where for kind in self.inventory.kinds)
        self.layer_of = [one[0][1] if len(one) == 1 and one[0][0] == "layer" else None for one in wheres]

    def hold(self, mesh: Mesh, stages: Sequence[int], *, most: int | None = None) -> tuple[RankShards, ...]:
        """Return one holding for each stage, or for the first `most` of them, which stands for all ranks of it.

        Raises PartitionError, naming a tensor, if the mesh cannot cut it.
        """
        first = mesh.coordinate(0)
        starts = [sum(stages[:n]) for n in range(len(stages) + 1)]
        spans = [range(a, b) for a, b in pairwise(starts)]
        spans = spans[:most]
        held = self._parts(mesh, spans, first, last=len(stages) - 1)
        below = _compute_stage_stride(mesh)
        ranks = mesh.world // mesh.degree("pp")
        return tuple(
            RankShards(
                stage * below,
                mesh.label(stage * below),
                {**first, "pp": stage},
                ranks,
                stage,
                span,
                held[stage],
            )
            for stage, span in enumerate(spans)
        )

    def _parts(
        self, mesh: Mesh, spans: Sequence[range], first: Mapping[str, int], *, last: int
    ) -> tuple[tuple[HeldPart, ...], ...]:
        """Return the parts of the stages of `spans`, of which `last` is the number of the last one there is.

        Meshes that differ only in copies have the same.
        """
        for kind in self.groups:
            check_cuts(kind.example, kind.shape, kind.spec, mesh)
        sizes = tuple(compute_sizes_at(kind, mesh, first) for kind in self.groups)
        key = (tuple(span.stop for span in spans), last, mesh.ep, sizes)
        if key in self.known:
            return self.known[key]
        stage_of = [stage for stage, span in enumerate(spans) for _ in span]
        held: list[list[HeldPart]] = [[] for _ in spans]
        for layer, part in self._list_parts(mesh, sizes, first, spans[-1].stop):
            if layer is not None:
                held[stage_of[layer]].append(part)
                continue
            for stage in _find_stages(part.kind, stage_of, last):
                if stage < len(held):
                    held[stage].append(part)
        self.known[key] = tuple(map(tuple, held))
        return self.known[key]

    def _list_parts(
        self, mesh: Mesh, sizes: tuple[tuple[int, int], ...], first: Mapping[str, int], stop: int
    ) -> tuple[tuple[int | None, HeldPart], ...]:
        """Return the parts of all kinds of which there is anything outside of layers, or in those before `stop`."""
        key = (mesh.ep, sizes, stop)
        if key not in self.uncut:
            if mesh.ep not in self.counts:
                self.counts[mesh.ep] = [count_members(kind, mesh, first) for kind in self.inventory.kinds]
            kinds = zip(self.inventory.kinds, self.layer_of, self.group_of, self.counts[mesh.ep], strict=True)
            self.uncut[key] = tuple(
                (layer, HeldPart(kind, count, *sizes[group]))
                for kind, layer, group, count in kinds
                if count and (layer is None or layer < stop) and (sizes[group][0] or not all(kind.shape))
            )
        return self.uncut[key]


def _compute_stage_stride(mesh: Mesh) -> int:
    """Compute ranks from one stage to the next."""
    below = 1
    for axis, degree in reversed(mesh.axes):
        if axis == "pp":
            break
        below *= degree
    return below


def _find_stages(kind: TensorKind, stage_of: Sequence[int], last: int) -> set[int]:
    """Find the stages that have a kind, those of layers beyond `stage_of` left out."""
    where = [(place, n) for place, n in kind.spec.where if place != "layer" or n < len(stage_of)]
    return {stage_of[n] if place == "layer" else 0 if place == "first" else last for place, n in where}
