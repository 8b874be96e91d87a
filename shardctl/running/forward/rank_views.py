"""Shows a model as each rank of tensor and expert parallelism has it: what it holds, and zeros elsewhere.

All shapes are those of the whole model, so that any code runs with them. A rank's zeros do no harm where the cuts are
right: what it computes with them is never used, because the linear that follows has zeros there too.
"""

from __future__ import annotations

from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING, Any

from shardctl.base.value import value_class
from shardctl.running.forward.lazy_state_dict import build_entries
from shardctl.running.forward.placed_tensors import PlacedTensor
from shardctl.running.forward.places import COMPUTING, list_alike_ranks, list_places
from shardctl.running.forward.weights import ModelWeights, place_weights
from shardctl.tensors.placement import PartitionSpec, compute_intervals, compute_rank_boxes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardctl.running.forward.adapter import WeightConversion
    from shardctl.running.forward.lazy_state_dict import LazyTensor
    from shardctl.running.forward.shards import CheckpointShards
    from shardctl.running.forward.skeleton import ModelSkeleton, TensorSlot
    from shardctl.tensors.box import Box
    from shardctl.tensors.mesh import Mesh

Array = Any


@value_class
class RankView:
    """One rank's weights."""

    at: Mapping[str, int]
    """Its coordinate; of several ranks that compute the same, that of the first."""
    label: str
    """Such as ``rank 1 (tp1)``."""
    weights: ModelWeights
    """Nothing, where the rank is in another process."""


@value_class
class RankViews:
    """The ranks that compute together, and how tensors are cut among them."""

    views: tuple[RankView, ...]
    specs: Mapping[TensorSlot, PartitionSpec] = field(default_factory=dict)
    """Of what fills a slot; of one that several tensors make, that of the first."""

    def list_group(self, number: int, *axes: str) -> list[int]:
        """Return the places of one view for each index on `axes`, those whose parts make the whole.

        Of views with the same index, the one that shares most with view `number`.
        """
        mine, best = self.views[number].at, dict[tuple[int, ...], int]()
        for each, view in enumerate(self.views):
            key = tuple(view.at[axis] for axis in axes)
            if key not in best or self._count_common_axes(each, mine) > self._count_common_axes(best[key], mine):
                best[key] = each
        return list(best.values())

    def _count_common_axes(self, number: int, at: Mapping[str, int]) -> int:
        return sum(self.views[number].at[axis] == at[axis] for axis in COMPUTING)


def build_rank_views(
    shards: CheckpointShards,
    skeleton: ModelSkeleton,
    conversion: WeightConversion,
    here: Sequence[int] | None = None,
    right: Callable[[str, str], LazyTensor] | None = None,
) -> RankViews | None:
    """Return the views of the ranks, with the weights of those that are `here`; None if no axis has parts computed.

    With `right`, which gives whole tensors by name and the name to use, each rank has its part of those.
    """
    mesh = shards.placed.mesh
    places = list_places(mesh)
    if len(places) < 2:  # noqa: PLR2004 - one rank is no team
        return None
    views = []
    for number, ranks in enumerate(places.values()):
        at, label = mesh.coordinate(ranks[0]), f"rank {ranks[0]} ({mesh.label(ranks[0])})"
        if here is not None and number not in here:
            views.append(RankView(at, label, ModelWeights(label)))
            continue
        hold = partial(_hold_tensor, shards, at, right)
        entries = build_entries(shards.manifest, shards.model, hold)
        views.append(RankView(at, label, place_weights(label, skeleton, entries, conversion)))
    weights = views[here[0] if here else 0].weights
    specs, aliases = dict[Any, PartitionSpec](), shards.model.aliases
    for slot, lazy in weights.direct.items():
        name = aliases.get(lazy.name, lazy.name)
        fusion = shards.model.fusions.get(name)
        specs[slot] = _keep_computing(shards.placed.specs[fusion.tensors[0] if fusion else name], mesh)
    for slot, group in weights.converted.items():
        name = next(iter(weights.groups[group]))
        specs[slot] = _keep_computing(shards.placed.specs[aliases.get(name, name)], mesh)
    return RankViews(tuple(views), specs)


def _hold_tensor(
    shards: CheckpointShards,
    at: Mapping[str, int],
    right: Callable[[str, str], LazyTensor] | None,
    name: str,
    called: str,
) -> PlacedTensor:
    """Return what the rank at `at` has of a tensor, read from files of ranks that compute with the same part."""
    whole = shards.tensor(name, called)
    mesh, placed = shards.placed.mesh, shards.placed.specs[name]
    spec = _keep_computing(placed, mesh)
    boxes = compute_rank_boxes(whole.shape, spec, mesh, at)
    runs: list[Sequence[tuple[int, int]]] = [[(0, extent)] for extent in whole.shape]
    if not boxes and runs:
        runs[0] = ()
    elif spec.cuts:
        runs = [compute_intervals(extent, cuts, mesh, at) for extent, cuts in zip(whole.shape, spec.cuts, strict=True)]
    ranks = list_alike_ranks(mesh, at, expert=placed.of_expert)
    mine = [holding for holding in whole.holdings if holding.rank in ranks]
    read: Callable[[Box], Array] = right(name, called).read if right else partial(whole.read_copy, mine, ranks)
    return PlacedTensor(whole, boxes, runs, read, shards.note_missing)


def _keep_computing(spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """Return a spec with the cuts alone that ranks compute with."""
    cuts = tuple(tuple(cut for cut in dim if cut.axis in COMPUTING and mesh.degree(cut.axis) > 1) for dim in spec.cuts)
    member = spec.member if spec.member and mesh.degree(spec.member.axis) > 1 else None
    return PartitionSpec(cuts, spec.where, member)
