"""Checks that the parts on a rank belong together: the same heads of q and o, the same columns of gate and down.

Coverage says that every element is somewhere. This says that what one rank has of a layer is a layer of a smaller
model: all its tensors that share a logical dim have the same stretch of it. Which dims those are, the family's tables
say (`Row.dims`); what each rank has is read from the files alone.

fsdp spreads over ranks, by dim 0, what tp leaves to each: its ranks are taken together where the mesh is known. Where
it is not, a dim that fsdp never cuts is the witness of what its rank computes with, and what the rank has of other
tensors must lie inside; as every element is stored somewhere, that is the same claim. Dims of one extent that the same
axes cut in the same way are the same on every rank, whatever the mesh.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import field, replace
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import format_first_few
from shardctl.base.value import state_class
from shardctl.tensors.box import Box, make_disjoint
from shardctl.tensors.manifest import Region
from shardctl.verify.finding import CheckFinding
from shardctl.verify.held_dims import (
    DimLabel,
    DimRange,
    HeldDim,
    format_intervals,
    list_shared_words,
    list_stretches,
    merge_intervals,
)
from shardctl.verify.rank_files import find_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from shardctl.models import Model, ModelTensor
    from shardctl.tensors.manifest import Manifest, Tensor
    from shardctl.tensors.mesh import Mesh
    from shardctl.tensors.placement import GroupMember, Interval, PartitionSpec, Where

_DENSE_WEIGHT_AXES: Final = ("pp", "dp", "cp", "tp")
_EXPERT_WEIGHT_AXES: Final = ("pp", "ep", "etp", "replica")
"""The axes on which ranks agree that gather from each other: of experts, and of all else."""
_QUERY_HEADS_LABEL: Final = "attention heads"
_KV_HEADS_LABEL: Final = "key/value heads"
_MAX_OWNERS_SHOWN: Final = 3

_Holder = tuple[int, ...]
"""Ranks that gather from each other, by their common coordinate; one rank where the mesh is not known."""

_NO_STRETCH: Final = DimRange(("", 0), 0, 0, 0, 1, spread=False)
_CutKey = tuple[object, ...]
"""The extent of a dim, its cuts, and what else decides which rank has what of it."""

CHECK: Final = "alignment"
_ExpertOwners = dict["GroupMember", list[tuple["Tensor", dict[tuple[int, ...], str]]]]
"""Of each expert of a layer: its tensors, and who has some of each in which file."""


@state_class
class _AlignmentScope:
    """What holders have of one layer, or of what else lives in one place."""

    held: dict[DimLabel, dict[_Holder, list[HeldDim]]] = field(default_factory=dict)
    holders: dict[str, set[_Holder]] = field(default_factory=dict)
    """Of each tensor that is no expert's."""
    owners: _ExpertOwners = field(default_factory=dict)
    alike: dict[_CutKey, dict[_Holder, list[HeldDim]]] = field(default_factory=dict)
    """Of dims that are cut in the same way; collected where the mesh is not known."""


def check_alignment(manifest: Manifest, model: Model, mesh: Mesh | None) -> Iterator[CheckFinding]:
    """Yield what ranks have that does not belong together.

    One finding a tensor, none if the files are not those of ranks.

    `manifest` has canonical names. `mesh` is the recorded one; without it nothing is said of ranks that lack a tensor.
    """
    check = _AlignmentCheck(mesh, model)
    told: set[str] = set()
    for tensor in manifest.tensors.values():
        known = model.tensors.get(tensor.name)
        if known is not None and known.spec.cuts:
            yield from _skip_told(check.take(tensor, known), told)
    for scope in check.scopes.values():
        yield from _skip_told(chain(check.compare(scope), check.compare_cuts(scope, told)), told)


def _skip_told(findings: Iterable[CheckFinding], told: set[str]) -> Iterator[CheckFinding]:
    """Yield the first finding of each tensor, and add the tensor to `told`."""
    for found in findings:
        if found.tensor not in told:
            told.add(found.tensor)
            yield found


class _AlignmentCheck:
    """Collects what is held, layer by layer, and compares it."""

    def __init__(self, mesh: Mesh | None, model: Model) -> None:
        self._mesh = mesh
        self._words = list_shared_words(model)
        self.scopes: dict[tuple[Where, int], _AlignmentScope] = {}
        self._holders: dict[tuple[str, bool], _Holder | None] = {}
        self._known: dict[tuple[object, ...], tuple[DimRange, ...]] = {}

    def take(self, tensor: Tensor, known: ModelTensor) -> Iterator[CheckFinding]:
        """Note what each holder has of a tensor; says what is wrong with the tensor by itself."""
        files, boxes = self._list_held(tensor, known.spec)
        if not files:
            return
        scope = self.scopes.setdefault(known.spec.where[0], _AlignmentScope())
        if known.spec.member is not None:
            yield from self._one_owner(tensor, known.spec.member.axis, files)
            scope.owners.setdefault(known.spec.member, []).append((tensor, files))
        elif not known.spec.of_expert and len(known.spec.where) == 1:
            scope.holders[tensor.name] = set(files)
        stretches = self._find_dim_ranges(tensor.shape, known)
        for holder, file in files.items():
            mine = tuple(boxes[holder])
            spans = [
                merge_intervals((box.origin[dim], box.stop[dim]) for box in mine) for dim in range(len(tensor.shape))
            ]
            if len(mine) > 1 and not _is_rectangular(mine, spans):
                where = f"{tensor.name} on {self._label_holder(file)}"
                message = f"{where} has other columns in some rows: {format_first_few(mine)}"
                yield _build_finding(message, tensor.name, file, mine)
            if self._mesh is None:
                whole = HeldDim(tensor.name, _NO_STRETCH, (), mine, file)
                _note_cuts(scope, holder, whole, known.spec, tensor.shape, spans)
            for stretch in stretches:
                held = HeldDim(tensor.name, stretch, stretch.of(spans[stretch.dim]), mine, file)
                scope.held.setdefault(stretch.label, {}).setdefault(holder, []).append(held)

    def _list_held(
        self, tensor: Tensor, spec: PartitionSpec
    ) -> tuple[dict[_Holder, str], dict[_Holder, dict[Box, None]]]:
        """List the first file in which each holder has some of a tensor, and the boxes that it has."""
        files: dict[_Holder, str] = {}
        boxes: dict[_Holder, dict[Box, None]] = {}
        for chunk in tensor.chunks:
            if isinstance(chunk.where, Region):
                holder = self._find_holder(chunk.where.file, spec)
                if holder is not None:
                    files.setdefault(holder, chunk.where.file)
                    boxes.setdefault(holder, {})[chunk.box] = None
        return files, boxes

    def _find_holder(self, file: str, spec: PartitionSpec) -> _Holder | None:
        """Find who has what is in `file`; None if no rank of the mesh does."""
        key = (file, spec.of_expert)
        if key not in self._holders:
            rank = find_rank(file)
            holder: _Holder | None = None
            if rank is not None and self._mesh is None:
                holder = (rank,)
            elif rank is not None and self._mesh is not None and rank < self._mesh.world:
                at = self._mesh.coordinate(rank)
                holder = tuple(at[axis] for axis in (_EXPERT_WEIGHT_AXES if spec.of_expert else _DENSE_WEIGHT_AXES))
            self._holders[key] = holder
        return self._holders[key]

    def _find_dim_ranges(self, shape: tuple[int, ...], known: ModelTensor) -> tuple[DimRange, ...]:
        key = (shape, known.spec.cuts, known.row.dims)
        if key not in self._known:
            self._known[key] = tuple(list_stretches(known, self._words))
        return self._known[key]

    def _one_owner(self, tensor: Tensor, axis: str, files: Mapping[_Holder, str]) -> Iterator[CheckFinding]:
        """Check that one of many is on one rank of the axis that divides them, and on its replicas."""
        if self._mesh is None:
            return
        owners = {holder[_EXPERT_WEIGHT_AXES.index(axis)]: file for holder, file in files.items()}
        if len(owners) > 1:
            places = " and ".join(
                f"{axis}{owner} ({file})" for owner, file in sorted(owners.items())[:_MAX_OWNERS_SHOWN]
            )
            message = f"{tensor.name} is on {places}, but {axis} gives each expert to one"
            yield CheckFinding("error", CHECK, message, tensor.name, next(iter(owners.values())))

    def compare(self, scope: _AlignmentScope) -> Iterator[CheckFinding]:
        """Yield what does not belong together in one layer."""
        if self._mesh is not None:
            yield from self._find_absent_tensors(scope)
        yield from _check_expert_owners(scope.owners, self._label_holder)
        grouped = set()
        for (noun, heads), queries in scope.held.items():
            for (other, groups), keys in scope.held.items():
                if noun == _QUERY_HEADS_LABEL and other == _KV_HEADS_LABEL and heads % groups == 0:
                    grouped.add((other, groups))
                    yield from self._check_grouped_heads(heads // groups, queries, keys)
        for label, holders in scope.held.items():
            if label not in grouped:
                for held in holders.values():
                    yield from self._check_same_range(label, held)

    def compare_cuts(self, scope: _AlignmentScope, told: Collection[str]) -> Iterator[CheckFinding]:
        """Yield dims of which a holder has another part than of most that are cut in the same way, if not `told`."""
        for held in (held for holders in scope.alike.values() for held in holders.values()):
            rest = [one for one in held if one.tensor not in told]
            counts = Counter(one.intervals for one in rest)
            first = max(rest, key=lambda one: counts[one.intervals], default=None)
            for one in rest if first is not None else ():
                if first is not None and one.intervals != first.intervals:
                    message = (
                        f"{one.tensor} is not cut as {first.tensor}: of the {one.stretch.size:,} that both have, "
                        f"{self._label_holder(one.file)} has {one} where {first} belong to it"
                    )
                    yield _build_finding(message, one.tensor, one.file, one.boxes)

    def _find_absent_tensors(self, scope: _AlignmentScope) -> Iterator[CheckFinding]:
        """Yield ranks that have some of a layer and nothing of one of its tensors."""
        every = {holder for holders in scope.holders.values() for holder in holders}
        for name, holders in scope.holders.items():
            missing = min(every - holders, default=None)
            if missing is not None:
                other = next(n for n, found in scope.holders.items() if missing in found)
                place = " ".join(f"{axis}{index}" for axis, index in zip(_DENSE_WEIGHT_AXES, missing, strict=True))
                message = f"{name} is on no rank of {place}, which have {other} of the same layer"
                yield CheckFinding("error", CHECK, message, name)

    def _find_witness(self, held: Sequence[HeldDim]) -> HeldDim | None:
        """Return the one that says which stretch of a logical dim its holder computes with; None if none can."""
        sure = [one for one in held if self._mesh is not None or not one.stretch.spread]
        return next((one for one in sure if not one.stretch.spread), sure[0] if sure else None)

    def _check_same_range(self, label: DimLabel, held: Sequence[HeldDim]) -> Iterator[CheckFinding]:
        """Check that one holder has the same stretch of a logical dim in all tensors."""
        witness = self._find_witness(held)
        if witness is None:
            return
        if witness.units is None:
            message = (
                f"{witness.tensor} is cut inside one of {label[1]} {label[0]} of {witness.stretch.unit} elements: "
                f"{self._label_holder(witness.file)} has {format_first_few(witness.boxes)}"
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
                f"{one.tensor} {what}: of {label[1]:,} {label[0]}, {self._label_holder(one.file)} has {one} "
                f"where {witness} belong to it"
            )
            yield _build_finding(message, one.tensor, one.file, one.boxes)

    def _check_grouped_heads(
        self, share: int, queries: Mapping[_Holder, Sequence[HeldDim]], keys: Mapping[_Holder, Sequence[HeldDim]]
    ) -> Iterator[CheckFinding]:
        """Check that each holder has the key/value heads that its queries use: one for `share` neighbouring queries."""
        for holder, held in keys.items():
            witness = self._find_witness(queries.get(holder, ()))
            if witness is None or witness.units is None:
                continue
            used = merge_intervals((a // share, -(-b // share)) for a, b in witness.units)
            for one in held:
                exact = self._mesh is not None or not one.stretch.spread
                if one.is_just(used) if exact else one.is_within(used):
                    continue
                message = (
                    f"{one.tensor} is not cut with its queries: {self._label_holder(one.file)} has {_KV_HEADS_LABEL} "
                    f"{one}, but its {_QUERY_HEADS_LABEL} {witness}, of {witness.tensor}, use {format_intervals(used)}"
                )
                yield _build_finding(message, one.tensor, one.file, one.boxes)

    def _label_holder(self, file: str) -> str:
        rank = find_rank(file) or 0
        return f"rank {rank}" if self._mesh is None else f"rank {rank} ({self._mesh.label(rank)})"


def _note_cuts(
    scope: _AlignmentScope,
    holder: _Holder,
    tensor: HeldDim,
    spec: PartitionSpec,
    shape: Sequence[int],
    spans: Sequence[tuple[Interval, ...]],
) -> None:
    """Note what a holder has of each dim of a tensor that some axis cuts."""
    for dim, cuts in enumerate(spec.cuts):
        if cuts:
            stretch = replace(tensor.stretch, dim=dim, size=shape[dim])
            key = (shape[dim], cuts, spec.of_expert, spec.member)
            one = replace(tensor, stretch=stretch, intervals=spans[dim])
            scope.alike.setdefault(key, {}).setdefault(holder, []).append(one)


def _is_rectangular(boxes: Sequence[Box], spans: Sequence[Sequence[Interval]]) -> bool:
    """Return whether boxes are all elements with these indices."""
    return prod(sum(b - a for a, b in span) for span in spans) == sum(part.size for _, part in make_disjoint(boxes))


def _build_finding(message: str, tensor: str, file: str, boxes: Sequence[Box]) -> CheckFinding:
    return CheckFinding("error", CHECK, message, tensor, file, format_first_few(boxes))


def _check_expert_owners(owners: _ExpertOwners, name_holder: Callable[[str], str]) -> Iterator[CheckFinding]:
    """Yield each tensor of an expert that is on other ranks than most of its tensors.

    A rank that has no tensor of a kind, such as `down_proj`, of any expert of the layer says nothing: of a tensor of a
    few rows fewer ranks have a part than of a large one. `name_holder` says whose a file is.
    """
    having: dict[str, set[tuple[int, ...]]] = {}
    for tensors in owners.values():
        for tensor, files in tensors:
            having.setdefault(_name_kind(tensor.name), set()).update(files)
    for tensors in owners.values():
        places = Counter(frozenset(files) for _, files in tensors)
        first, own = max(tensors, key=lambda each: places[frozenset(each[1])])
        for tensor, files in tensors:
            kinds = having[_name_kind(first.name)], having[_name_kind(tensor.name)]
            yield from _compare_owners(first, own, tensor, files, kinds, name_holder)


def _compare_owners(
    first: Tensor,
    own: Mapping[tuple[int, ...], str],
    tensor: Tensor,
    files: Mapping[tuple[int, ...], str],
    having: tuple[set[tuple[int, ...]], set[tuple[int, ...]]],
    name_holder: Callable[[str], str],
) -> Iterator[CheckFinding]:
    beyond = [files[one] for one in files if one not in own and one in having[0]]
    lacking = [own[one] for one in own if one not in files and one in having[1]]
    if not beyond and not own.keys() & files.keys():
        beyond = list(files.values())
    if beyond:
        message = f"{tensor.name} is on {name_holder(beyond[0])}, and {first.name} of the same expert is on other ranks"
        yield CheckFinding("error", CHECK, message, tensor.name, beyond[0])
    elif lacking:
        message = f"{tensor.name} is not on {name_holder(lacking[0])}, which has {first.name} of the same expert"
        yield CheckFinding("error", CHECK, message, tensor.name, lacking[0])


def _name_kind(name: str) -> str:
    """Return the name of an expert's tensor without the numbers in it."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
