"""Checks that the parts on a rank belong together: the same heads of q and o, the same columns of gate and down.

Coverage says that every element is somewhere. This says that what one rank has of a layer is a layer of a smaller
model: all its tensors that share a logical dim have the same stretch of it. Which dims those are, the family's tables
say (`Row.dims`); what each rank has is read from the files alone.

fsdp spreads over ranks, by dim 0, what tp leaves to each: its ranks are taken together where the mesh is known. Where
it is not, a dim that fsdp never cuts is the witness of what its rank computes with, and what the rank has of other
tensors must lie inside; as every element is stored somewhere, that is the same claim.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Final

from shardctl.box import Box, make_disjoint
from shardctl.errors import format_first_few
from shardctl.manifest import Region
from shardctl.mesh import EXPERT_FSDP
from shardctl.verify.finding import CheckFinding
from shardctl.verify.rank_files import find_rank

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from shardctl.manifest import Manifest, Tensor
    from shardctl.mesh import Mesh
    from shardctl.models import Model, ModelTensor
    from shardctl.placement import Interval, PartitionSpec, Where

CHECK: Final = "alignment"
_SPREADING: Final = frozenset({"fsdp", EXPERT_FSDP})
"""The axes whose ranks gather what they have before they compute."""
_DENSE: Final = ("pp", "dp", "cp", "tp")
_EXPERT: Final = ("pp", "ep", "etp", "replica")
"""The axes on which ranks agree that gather from each other: of experts, and of all else."""
_QUERIES: Final = "attention heads"
_KEYS: Final = "key/value heads"
_SHOWN: Final = 3

_Holder = tuple[int, ...]
"""Ranks that gather from each other, by their common coordinate; one rank where the mesh is not known."""
_Label = tuple[str, int]
"""A logical dim: what its units are, or its name in the table, and how many units there are."""


@dataclass(frozen=True, slots=True)
class _DimStretch:
    """Where in a tensor a logical dim lies: along one of its dims, alone or fused with others."""

    label: _Label
    dim: int
    start: int
    """Its first index along the dim."""
    size: int
    unit: int
    """Elements of one unit."""
    spread: bool
    """Whether fsdp cuts the dim, so that a rank may have only a part of what it computes with."""

    def of(self, span: Sequence[Interval]) -> tuple[Interval, ...]:
        """Return what lies in it of indices along its dim, in elements from its start."""
        stop = self.start + self.size
        return tuple(
            (max(a, self.start) - self.start, min(b, stop) - self.start) for a, b in span if _has_overlap(a, b, self)
        )


@dataclass(frozen=True, slots=True)
class _HeldDim:
    """What one holder has of a logical dim in one tensor."""

    tensor: str
    stretch: _DimStretch
    intervals: tuple[Interval, ...]
    """In elements from the start of the stretch."""
    boxes: tuple[Box, ...]
    file: str

    @property
    def units(self) -> tuple[Interval, ...] | None:
        """The same in units; None if an edge lies inside one."""
        unit = self.stretch.unit
        if any(a % unit or b % unit for a, b in self.intervals):
            return None
        return tuple((a // unit, b // unit) for a, b in self.intervals)

    def is_just(self, units: Iterable[Interval]) -> bool:
        """Return whether it is these units."""
        return self.intervals == self._elements(units)

    def is_within(self, units: Iterable[Interval]) -> bool:
        """Return whether it is a part of these units."""
        outer = self._elements(units)
        return all(any(a <= c and d <= b for a, b in outer) for c, d in self.intervals)

    def _elements(self, units: Iterable[Interval]) -> tuple[Interval, ...]:
        unit = self.stretch.unit
        return tuple((a * unit, b * unit) for a, b in units)

    def __str__(self) -> str:
        return (
            _format_intervals(self.units) if self.units is not None else f"elements {_format_intervals(self.intervals)}"
        )


@dataclass(slots=True)
class _AlignmentScope:
    """What holders have of one layer, or of what else lives in one place."""

    held: dict[_Label, dict[_Holder, list[_HeldDim]]] = field(default_factory=dict)
    holders: dict[str, set[_Holder]] = field(default_factory=dict)
    """Of each tensor that is no expert's."""
    owners: dict[int, tuple[Tensor, set[_Holder]]] = field(default_factory=dict)
    """Of each expert that is stored by itself: its first tensor and who has some of that."""


def check_alignment(manifest: Manifest, model: Model, mesh: Mesh | None) -> Iterator[CheckFinding]:
    """Yield what ranks have that does not belong together.

    One finding a tensor, none if the files are not those of ranks.

    `manifest` has canonical names. `mesh` is the recorded one; without it nothing is said of ranks that lack a tensor.
    """
    check = _AlignmentCheck(mesh)
    for tensor in manifest.tensors.values():
        known = model.tensors.get(tensor.name)
        if known is not None and known.spec.cuts:
            yield from check.take(tensor, known)
    for scope in check.scopes.values():
        told: set[str] = set()
        for found in check.compare(scope):
            if found.tensor not in told:
                told.add(found.tensor)
                yield found


class _AlignmentCheck:
    """Collects what is held, layer by layer, and compares it."""

    def __init__(self, mesh: Mesh | None) -> None:
        self._mesh = mesh
        self.scopes: dict[tuple[Where, int], _AlignmentScope] = {}
        self._holders: dict[tuple[str, bool], _Holder | None] = {}
        self._known: dict[tuple[object, ...], tuple[_DimStretch, ...]] = {}

    def take(self, tensor: Tensor, known: ModelTensor) -> Iterator[CheckFinding]:
        """Note what each holder has of a tensor; says what is wrong with the tensor by itself."""
        files: dict[_Holder, str] = {}
        boxes: dict[_Holder, dict[Box, None]] = {}
        for chunk in tensor.chunks:
            if isinstance(chunk.where, Region):
                holder = self._holder(chunk.where.file, known.spec)
                if holder is not None:
                    files.setdefault(holder, chunk.where.file)
                    boxes.setdefault(holder, {})[chunk.box] = None
        if not files:
            return
        scope = self.scopes.setdefault(known.spec.where[0], _AlignmentScope())
        if known.spec.member is not None:
            yield from self._one_owner(tensor, known.spec.member.axis, files)
            yield from self._same_owner(
                tensor, scope.owners.setdefault(known.spec.member.index, (tensor, set(files))), files
            )
        elif not known.spec.of_expert and len(known.spec.where) == 1:
            scope.holders[tensor.name] = set(files)
        stretches = self._stretches(tensor.shape, known)
        for holder, file in files.items():
            mine = tuple(boxes[holder])
            spans = [
                _merge_intervals((box.origin[dim], box.stop[dim]) for box in mine) for dim in range(len(tensor.shape))
            ]
            if len(mine) > 1 and not _is_rectangular(mine, spans):
                message = f"{tensor.name} on {self._who(file)} has other columns in some rows: {format_first_few(mine)}"
                yield _build_finding(message, tensor.name, file, mine)
            for stretch in stretches:
                held = _HeldDim(tensor.name, stretch, stretch.of(spans[stretch.dim]), mine, file)
                scope.held.setdefault(stretch.label, {}).setdefault(holder, []).append(held)

    def _holder(self, file: str, spec: PartitionSpec) -> _Holder | None:
        """Find who has what is in `file`; None if no rank of the mesh does."""
        key = (file, spec.of_expert)
        if key not in self._holders:
            rank = find_rank(file)
            holder: _Holder | None = None
            if rank is not None and self._mesh is None:
                holder = (rank,)
            elif rank is not None and self._mesh is not None and rank < self._mesh.world:
                at = self._mesh.coordinate(rank)
                holder = tuple(at[axis] for axis in (_EXPERT if spec.of_expert else _DENSE))
            self._holders[key] = holder
        return self._holders[key]

    def _stretches(self, shape: tuple[int, ...], known: ModelTensor) -> tuple[_DimStretch, ...]:
        key = (shape, known.spec.cuts, known.row.dims)
        if key not in self._known:
            self._known[key] = tuple(_list_stretches(known))
        return self._known[key]

    def _one_owner(self, tensor: Tensor, axis: str, files: Mapping[_Holder, str]) -> Iterator[CheckFinding]:
        """Check that one of many is on one rank of the axis that divides them, and on its replicas."""
        if self._mesh is None:
            return
        owners = {holder[_EXPERT.index(axis)]: file for holder, file in files.items()}
        if len(owners) > 1:
            places = " and ".join(f"{axis}{owner} ({file})" for owner, file in sorted(owners.items())[:_SHOWN])
            message = f"{tensor.name} is on {places}, but {axis} gives each expert to one"
            yield CheckFinding("error", CHECK, message, tensor.name, next(iter(owners.values())))

    def _same_owner(
        self, tensor: Tensor, first: tuple[Tensor, set[_Holder]], files: Mapping[_Holder, str]
    ) -> Iterator[CheckFinding]:
        """Check that some rank has parts of both this and the first tensor of one expert."""
        if first[1].isdisjoint(files):
            file = next(iter(files.values()))
            message = f"{tensor.name} is on {self._who(file)}, and {first[0].name} of the same expert is on other ranks"
            yield CheckFinding("error", CHECK, message, tensor.name, file)

    def compare(self, scope: _AlignmentScope) -> Iterator[CheckFinding]:
        """Yield what does not belong together in one layer."""
        if self._mesh is not None:
            yield from self._absent(scope)
        grouped = set()
        for (noun, heads), queries in scope.held.items():
            for (other, groups), keys in scope.held.items():
                if noun == _QUERIES and other == _KEYS and heads % groups == 0:
                    grouped.add((other, groups))
                    yield from self._grouped(heads // groups, queries, keys)
        for label, holders in scope.held.items():
            if label not in grouped:
                for held in holders.values():
                    yield from self._same(label, held)

    def _absent(self, scope: _AlignmentScope) -> Iterator[CheckFinding]:
        """Yield ranks that have some of a layer and nothing of one of its tensors."""
        every = {holder for holders in scope.holders.values() for holder in holders}
        for name, holders in scope.holders.items():
            missing = min(every - holders, default=None)
            if missing is not None:
                other = next(n for n, found in scope.holders.items() if missing in found)
                place = " ".join(f"{axis}{index}" for axis, index in zip(_DENSE, missing, strict=True))
                message = f"{name} is on no rank of {place}, which have {other} of the same layer"
                yield CheckFinding("error", CHECK, message, name)

    def _witness(self, held: Sequence[_HeldDim]) -> _HeldDim | None:
        """Return the one that says which stretch of a logical dim its holder computes with; None if none can."""
        sure = [one for one in held if self._mesh is not None or not one.stretch.spread]
        return next((one for one in sure if not one.stretch.spread), sure[0] if sure else None)

    def _same(self, label: _Label, held: Sequence[_HeldDim]) -> Iterator[CheckFinding]:
        """Check that one holder has the same stretch of a logical dim in all tensors."""
        witness = self._witness(held)
        if witness is None:
            return
        if witness.units is None:
            message = (
                f"{witness.tensor} is cut inside one of {label[1]} {label[0]} of {witness.stretch.unit} elements: "
                f"{self._who(witness.file)} has {format_first_few(witness.boxes)}"
            )
            yield _build_finding(message, witness.tensor, witness.file, witness.boxes)
            return
        for one in held:
            exact = self._mesh is not None or not one.stretch.spread
            if one.is_just(witness.units) if exact else one.is_within(witness.units):
                continue
            fused = one.tensor == witness.tensor
            what = "is fused, and its parts are not cut alike" if fused else f"is not cut as {witness.tensor}"
            message = (
                f"{one.tensor} {what}: of {label[1]:,} {label[0]}, {self._who(one.file)} has {one} "
                f"where {witness} belong to it"
            )
            yield _build_finding(message, one.tensor, one.file, one.boxes)

    def _grouped(
        self, share: int, queries: Mapping[_Holder, Sequence[_HeldDim]], keys: Mapping[_Holder, Sequence[_HeldDim]]
    ) -> Iterator[CheckFinding]:
        """Check that each holder has the key/value heads that its queries use: one for `share` neighbouring queries."""
        for holder, held in keys.items():
            witness = self._witness(queries.get(holder, ()))
            if witness is None or witness.units is None:
                continue
            used = _merge_intervals((a // share, -(-b // share)) for a, b in witness.units)
            for one in held:
                exact = self._mesh is not None or not one.stretch.spread
                if one.is_just(used) if exact else one.is_within(used):
                    continue
                message = (
                    f"{one.tensor} is not cut with its queries: {self._who(one.file)} has {_KEYS} {one}, but "
                    f"its {_QUERIES} {witness}, of {witness.tensor}, use {_format_intervals(used)}"
                )
                yield _build_finding(message, one.tensor, one.file, one.boxes)

    def _who(self, file: str) -> str:
        rank = find_rank(file) or 0
        return f"rank {rank}" if self._mesh is None else f"rank {rank} ({self._mesh.label(rank)})"


def _list_stretches(known: ModelTensor) -> Iterator[_DimStretch]:
    """List the logical dims of a tensor that an axis divides exactly: those that other tensors share."""
    words = known.row.dims.split()
    for dim, cuts in enumerate(known.spec.cuts):
        cut = next((cut for cut in cuts if cut.sections), None)
        if cut is None or len(words) != len(known.spec.cuts):
            continue
        names = words[dim].split("+")
        if len(names) != len(cut.sections):  # one word for several, or a rule file that speaks of the whole
            names = [f"{words[dim]} of {known.row.name}"] * len(cut.sections)
        start = 0
        for name, section in zip(names, cut.sections, strict=True):
            label = (section.noun or name, section.size // section.unit)
            spread = any(other.axis in _SPREADING for other in cuts)
            yield _DimStretch(label, dim, start, section.size, section.unit, spread)
            start += section.size


def _has_overlap(start: int, stop: int, stretch: _DimStretch) -> bool:
    return start < stretch.start + stretch.size and stretch.start < stop


def _is_rectangular(boxes: Sequence[Box], spans: Sequence[Sequence[Interval]]) -> bool:
    """Return whether boxes are all elements with these indices."""
    return prod(sum(b - a for a, b in span) for span in spans) == sum(part.size for _, part in make_disjoint(boxes))


def _merge_intervals(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Return the same indices in as few intervals as can be, in order."""
    found: list[Interval] = []
    for start, stop in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        elif start < stop:
            found.append((start, stop))
    return tuple(found)


def _format_intervals(intervals: Sequence[Interval]) -> str:
    shown = ", ".join(f"{a}:{b}" for a, b in intervals[:_SHOWN])
    return (shown + (" and more" if len(intervals) > _SHOWN else "")) or "none"


def _build_finding(message: str, tensor: str, file: str, boxes: Sequence[Box]) -> CheckFinding:
    return CheckFinding("error", CHECK, message, tensor, file, format_first_few(boxes))
