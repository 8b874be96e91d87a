"""Shows a model as each rank of tensor and expert parallelism has it: what it holds, and zeros elsewhere.

All shapes are those of the whole model, so that any code runs with them. A rank's zeros do no harm where the cuts are
right: what it computes with them is never used, because the linear that follows has zeros there too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shardctl.mesh import EXPERT_AXES
from shardctl.placement import PartitionSpec, compute_rank_boxes
from shardctl.verify.forward.lens import LazyTensor, build_entries
from shardctl.verify.forward.weights import ModelWeights, place_weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.box import Box
    from shardctl.mesh import Mesh
    from shardctl.verify.forward.adapter import WeightConversion
    from shardctl.verify.forward.shards import CheckpointShards
    from shardctl.verify.forward.skeleton import ModelSkeleton, TensorSlot

Array = Any
_COMPUTING: Final = ("tp", *EXPERT_AXES)
"""The axes along which ranks compute with parts; along the others they gather, or do the same."""


class PartialTensor(LazyTensor):
    """A tensor of which some boxes are held, and the rest is zero."""

    __slots__ = ("_boxes", "_whole")

    def __init__(self, whole: LazyTensor, boxes: list[Box]) -> None:
        super().__init__(whole.name, whole.elements, whole.shape)
        self._whole, self._boxes = whole, boxes

    def read(self, box: Box) -> Array:
        """Return the elements of `box`, zeros where the rank has none."""
        import torch

        result = torch.zeros(box.shape, dtype=self.dtype)
        for held in self._boxes:
            common = held.intersect(box) if box.size else None
            if common is not None:
                result[common.slices(box.origin)] = self._whole.read(common)
        return result


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank's weights."""

    at: Mapping[str, int]
    """Its place on the axes along which ranks compute with parts."""
    weights: ModelWeights

    def __str__(self) -> str:
        return " ".join(f"{axis}{self.at[axis]}" for axis in _COMPUTING)


@dataclass(frozen=True, slots=True)
class RankViews:
    """The ranks that compute together, and how tensors are cut among them."""

    views: tuple[RankView, ...]
    specs: Mapping[TensorSlot, PartitionSpec]
    """Of what fills a slot; of one that several tensors make, that of the first."""

    def list_group(self, *axes: str) -> list[int]:
        """Return the places of one view for each index on `axes`: those whose parts make the whole."""
        first: dict[tuple[int, ...], int] = {}
        for number, view in enumerate(self.views):
            first.setdefault(tuple(view.at[axis] for axis in axes), number)
        return list(first.values())


def build_rank_views(
    shards: CheckpointShards, skeleton: ModelSkeleton, conversion: WeightConversion
) -> RankViews | None:
    """Return the view of each rank; None if no axis has ranks compute with parts."""
    mesh = shards.placed.mesh
    places = list(dict.fromkeys(_find_place(mesh, rank) for rank in range(mesh.world // mesh.degree("pp"))))
    if len(places) < 2:  # noqa: PLR2004 - one rank is no team
        return None
    views, specs = [], dict[Any, PartitionSpec]()
    for place in places:
        at = dict(place)

        def hold(name: str, called: str, at: Mapping[str, int] = at) -> LazyTensor:
            whole = shards.tensor(name, called)
            spec = _keep_computing(shards.placed.specs[name])
            return PartialTensor(whole, compute_rank_boxes(whole.shape, spec, mesh, at)) if spec.axes else whole

        entries = build_entries(shards.manifest, shards.model, hold)
        weights = place_weights(f"rank {RankView(at, ModelWeights(''))}", skeleton, entries, conversion)
        views.append(RankView(at, weights))
    aliases = shards.model.aliases
    for slot, lazy in views[0].weights.direct.items():
        name = aliases.get(lazy.name, lazy.name)
        fusion = shards.model.fusions.get(name)
        specs[slot] = _keep_computing(shards.placed.specs[fusion.tensors[0] if fusion else name])
    for slot, group in views[0].weights.converted.items():
        name = next(iter(views[0].weights.groups[group]))
        specs[slot] = _keep_computing(shards.placed.specs[aliases.get(name, name)])
    return RankViews(tuple(views), specs)


def _find_place(mesh: Mesh, rank: int) -> tuple[tuple[str, int], ...]:
    at = mesh.coordinate(rank)
    return tuple((axis, at[axis]) for axis in _COMPUTING)


def _keep_computing(spec: PartitionSpec) -> PartitionSpec:
    """Return a spec with the cuts alone that ranks compute with."""
    return PartitionSpec(
        tuple(tuple(cut for cut in dim if cut.axis in _COMPUTING) for dim in spec.cuts), spec.where, spec.member
    )
