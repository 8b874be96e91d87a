"""Counts exactly what each rank of a mesh holds of an inventory, once per group of equal ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import field
from itertools import accumulate, pairwise
from math import prod
from typing import TYPE_CHECKING, Final

from shardctl.base.value import value_class
from shardctl.tensors.mesh import EXPERT_FSDP, build_holding_key
from shardctl.tensors.placement import check_cuts, compute_ceil_part, compute_intervals

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardctl.estimate.model.inventory import TensorInventory, TensorKind
    from shardctl.tensors.mesh import Mesh

SHARDING: Final = ("fsdp", EXPERT_FSDP)
"""The axes that share what each rank computes with: before use, its parts are gathered from them."""
_PACKED_WEIGHTS_PER_ELEMENT: Final = {"I32": 8, "U8": 2}
"""Weights in one stored element of a matrix, where it is packed: four bits each, as GPTQ, AWQ and MXFP4 have it."""


@value_class
class HeldPart:
    """What one rank holds of one kind of tensor."""

    kind: TensorKind
    count: int
    """Tensors of the kind that this rank has a part of."""
    gathered: int
    """Elements of one of them that this rank computes with: its part by pp, tp and ep, before fsdp."""
    elements: int
    """Elements of one of them that this rank keeps: its part of those by fsdp."""

    @property
    def nbytes(self) -> int:
        """Bytes kept, of all of them."""
        return self.count * self.kind.dtype.nbytes((self.elements,))

    @property
    def gathered_bytes(self) -> int:
        """Bytes computed with, of all of them."""
        return self.count * self.kind.dtype.nbytes((self.gathered,))


@value_class
class RankShards:
    """What ranks that hold the same weights hold."""

    rank: int
    """The first of them."""
    label: str
    """Its place in words, such as ``pp0 tp1``."""
    coordinate: Mapping[str, int]
    ranks: int
    """How many there are: copies by dp and cp."""
    stage: int
    layers: range
    """Of the pipeline stage."""
    parts: tuple[HeldPart, ...]
    _sums: dict[object, tuple[int, int]] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Sums over the parts that were asked for before: a search asks for each with all settings of a mesh."""

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as stored, ties counted once."""
        return sum(part.nbytes for part in self.parts)

    def elements(self, *, expert: bool | None = None, trainable: bool | None = None) -> int:
        """Return elements kept; of experts only, of all else only, or of both."""
        return self._sum_elements(expert=expert, trainable=trainable)[0]

    def gathered(self, *, expert: bool | None = None, trainable: bool | None = None) -> int:
        """Return elements computed with, before fsdp shares them."""
        return self._sum_elements(expert=expert, trainable=trainable)[1]

    def units(self) -> Mapping[int | None, tuple[HeldPart, ...]]:
        """Group parts by what FSDP gathers together: by layer, and under None the root (embedding, last norm, head)."""
        units: dict[int | None, list[HeldPart]] = {}
        start, stop = self.layers.start, self.layers.stop
        for part in self.parts:
            unit = None
            for where, n in part.kind.spec.where:
                if where == "layer" and start <= n < stop:
                    unit = n
                    break
            units.setdefault(unit, []).append(part)
        return {unit: tuple(parts) for unit, parts in units.items()}

    def merged(self) -> tuple[HeldPart, ...]:
        """Return the parts, those together that differ in nothing but their layer."""
        found: dict[tuple[object, ...], tuple[HeldPart, list[int]]] = {}
        for part in self.parts:
            kind, spec = part.kind, part.kind.spec
            inside = spec.where[0][0] == "layer"
            # An inventory has equal cuts once, and to compare them by value takes long.
            key = (kind.shape, kind.dtype.name, id(spec.cuts), spec.of_expert, kind.trainable, inside, part.elements)
            if key in found:
                found[key][1].append(part.count)
            else:
                found[key] = part, [part.count]
        return tuple(HeldPart(part.kind, sum(counts), part.gathered, part.elements) for part, counts in found.values())

    def multiplied(self, *, last: bool) -> tuple[int, int]:
        """Return weights of matrices that tokens are multiplied with: those of no expert, and those of experts.

        An embedding is not, unless it is the head of the last stage, too.
        """
        key = ("multiplied", last)
        if key not in self._sums:
            sums = [0, 0]
            for part in self.parts:
                if part.kind.matrix and _is_multiplied(part, last=last):
                    sums[part.kind.spec.of_expert] += _count_weights(part)
            self._sums[key] = sums[0], sums[1]
        return self._sums[key]

    def _sum_elements(self, *, expert: bool | None, trainable: bool | None) -> tuple[int, int]:
        """Return elements kept and elements computed with."""
        key = expert, trainable
        if key not in self._sums:
            kept = gathered = 0
            for part in self.parts:
                of_expert, learns = part.kind.spec.of_expert, part.kind.trainable
                if expert in {None, of_expert} and trainable in {None, learns}:
                    kept += part.count * part.elements
                    gathered += part.count * part.gathered
            self._sums[key] = kept, gathered
        return self._sums[key]


def _is_multiplied(part: HeldPart, *, last: bool) -> bool:
    """Return whether tokens are multiplied with it: not with an embedding, unless it is the last stage's head, too."""
    places = {where for where, _ in part.kind.spec.where}
    return "layer" in places or (last and "last" in places)


def _count_weights(part: HeldPart) -> int:
    packed = 1 if part.kind.trainable else _PACKED_WEIGHTS_PER_ELEMENT.get(part.kind.dtype.name, 1)
    return part.count * part.gathered * packed


def list_rank_shards(inventory: TensorInventory, mesh: Mesh, stages: Sequence[int]) -> tuple[RankShards, ...]:
    """List what the distinct ranks of `mesh` hold; `stages` are the layers of each pipeline stage.

    Ranks of a stage that hold as much of everything share one tuple of parts.
    Raises PartitionError, naming a tensor, if the mesh cannot cut it.
    """
    groups, group_of = group_by_cut(inventory)
    specs = [kind.spec for kind in groups]
    for kind in groups:
        check_cuts(kind.example, kind.shape, kind.spec, mesh, beside=specs)
    by_stage, spans = _group_by_stage(inventory, stages)
    places = [mesh.coordinate(rank) for rank in range(mesh.world)]
    alike = Counter(map(build_holding_key, places))
    seen: set[tuple[int, ...]] = set()
    dividing = sorted({kind.spec.member.axis for kind in groups if kind.spec.member})
    ways_at = _PartSizes(groups, mesh)
    found_of: dict[tuple[object, ...], tuple[HeldPart, ...]] = {}
    same: dict[tuple[object, ...], tuple[HeldPart, ...]] = {}
    found = []
    for rank, at in enumerate(places):
        key = build_holding_key(at)
        if key in seen:
            continue
        seen.add(key)
        stage = at["pp"]
        sizes = ways_at.at(at)
        decisive = (stage, *[at[axis] for axis in dividing], *sizes)
        held = found_of.get(decisive)
        if held is None:
            held = tuple(_list_parts(by_stage[stage], mesh, at, group_of, sizes))
            amounts = (stage, *((part.kind.example, part.count, part.gathered, part.elements) for part in held))
            held = found_of[decisive] = same.setdefault(amounts, held)
        found.append(RankShards(rank, mesh.place(at), at, alike[key], stage, spans[stage], held))
    return tuple(found)


def group_by_cut(inventory: TensorInventory) -> tuple[list[TensorKind], list[int]]:
    """Return one kind of each way to be cut, and for each kind of the inventory which of them it is."""
    numbers: dict[object, int] = {}
    groups: list[TensorKind] = []
    group_of: list[int] = []
    for kind in inventory.kinds:
        member = kind.spec.member
        key = (kind.shape, kind.spec.cuts, member and (member.axis, member.count))
        number = numbers.setdefault(key, len(numbers))
        if number == len(groups):
            groups.append(kind)
        group_of.append(number)
    return groups, group_of


class _PartSizes:
    """What `compute_sizes_at` says of each way to be cut; the parts of fsdp's ranks, which can be many, are counted."""

    def __init__(self, groups: Sequence[TensorKind], mesh: Mesh) -> None:
        self._ways = [(kind, *_split_axes(kind)) for kind in groups]
        self._mesh = mesh
        self._whole: dict[tuple[int, ...], tuple[int, int, int]] = {}
        self._known: dict[tuple[int, ...], tuple[int, int]] = {}

    def at(self, at: Mapping[str, int]) -> list[tuple[int, int]]:
        """Return elements of one tensor of each way that the rank at `at` computes with, and that it keeps."""
        return [self._of(number, kind, exact, sharing, at) for number, (kind, exact, sharing) in enumerate(self._ways)]

    def _of(
        self, number: int, kind: TensorKind, exact: tuple[str, ...], sharing: tuple[str, ...], at: Mapping[str, int]
    ) -> tuple[int, int]:
        if len(sharing) != 1 or not _is_spread_last(kind):
            place = (number, *[at[axis] for axis in (*exact, *sharing)])
            if place not in self._known:
                self._known[place] = compute_sizes_at(kind, self._mesh, at)
            return self._known[place]
        place = (number, *[at[axis] for axis in exact])
        if place not in self._whole:
            gathered, _ = compute_sizes_at(kind, self._mesh, at)
            first = [cut for cut in kind.spec.cuts[0] if cut.axis not in SHARDING]
            rows = sum(b - a for a, b in compute_intervals(kind.shape[0], first, self._mesh, at))
            self._whole[place] = gathered, rows, gathered // rows if rows else 0
        gathered, rows, wide = self._whole[place]
        low, high = compute_ceil_part(rows, self._mesh.degree(sharing[0]), at[sharing[0]])
        return gathered, (high - low) * wide


def _split_axes(kind: TensorKind) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the axes that cut it exactly and those that share it, each once."""
    every = dict.fromkeys(cut.axis for dim in kind.spec.cuts for cut in dim)
    return tuple(a for a in every if a not in SHARDING), tuple(a for a in every if a in SHARDING)


def _is_spread_last(kind: TensorKind) -> bool:
    """Return whether it is shared along its first dim alone, after all other cuts, in ceil-sized parts."""
    first, *rest = kind.spec.cuts
    spread = any(cut.axis in SHARDING for dim in (first[:-1], *rest) for cut in dim)
    return not spread and not first[-1].sections


def _group_by_stage(
    inventory: TensorInventory, stages: Sequence[int]
) -> tuple[list[list[tuple[int, TensorKind]]], list[range]]:
    """Return the kinds of each stage with their numbers, and its layers."""
    spans = [range(a, b) for a, b in pairwise(accumulate(stages, initial=0))]
    kinds = list(enumerate(inventory.kinds))
    return [[(number, k) for number, k in kinds if _is_on_stage(k, n, spans)] for n in range(len(spans))], spans


def _is_on_stage(kind: TensorKind, stage: int, spans: Sequence[range]) -> bool:
    """Return whether the stage has the kind; a model without layers is on one stage."""
    last = len(spans) - 1
    return any(
        n in spans[stage] if where == "layer" else stage == (0 if where == "first" else last)
        for where, n in kind.spec.where
    )


def _list_parts(
    kinds: Sequence[tuple[int, TensorKind]],
    mesh: Mesh,
    at: Mapping[str, int],
    group_of: Sequence[int],
    sizes: Sequence[tuple[int, int]],
) -> Iterator[HeldPart]:
    for number, kind in kinds:
        gathered, elements = sizes[group_of[number]]
        count = count_members(kind, mesh, at)
        if count and (gathered or not all(kind.shape)):
            yield HeldPart(kind, count, gathered, elements)


def count_members(kind: TensorKind, mesh: Mesh, at: Mapping[str, int]) -> int:
    """Count how many tensors of the kind the rank at `at` has a part of: experts are shared out in equal runs."""
    member = kind.spec.member
    if member is None:
        return kind.count
    run = member.count // mesh.degree(member.axis)
    first = at[member.axis] * run
    return sum(kind.members[first : first + run])


def compute_sizes_at(kind: TensorKind, mesh: Mesh, at: Mapping[str, int]) -> tuple[int, int]:
    """Compute elements of one tensor that the rank at `at` computes with, and that it keeps."""
    if not kind.spec.cuts:
        return prod(kind.shape), prod(kind.shape)
    gathered = elements = 1
    for extent, cuts in zip(kind.shape, kind.spec.cuts, strict=True):
        whole = [cut for cut in cuts if cut.axis not in SHARDING]
        gathered *= sum(b - a for a, b in compute_intervals(extent, whole, mesh, at))
        elements *= sum(b - a for a, b in compute_intervals(extent, cuts, mesh, at))
    return gathered, elements
