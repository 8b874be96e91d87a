"""Computes the boxes that one rank of a mesh holds, from the named cuts of a tensor's dims.

>>> from shardctl.tensors.mesh import Mesh
>>> mesh, rows = Mesh.of(tp=2), PartitionSpec(((AxisPartition("tp"),), ()))
>>> compute_rank_boxes((8, 4), rows, mesh, mesh.coordinate(1))
[Box(origin=(4, 0), shape=(4, 4))]
"""

from __future__ import annotations

from dataclasses import field
from itertools import product
from typing import TYPE_CHECKING, Literal

from shardctl.base.errors import PartitionError
from shardctl.base.value import value_class
from shardctl.tensors.box import Box
from shardctl.tensors.mesh import EXPERT_AXES, EXPERT_FSDP, MOST_RANKS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from shardctl.tensors.mesh import Mesh

Interval = tuple[int, int]
"""A half-open range of indices along one dim."""
Where = Literal["first", "layer", "last"]
"""On which pipeline stage a tensor lives: the first, its layer's, or the last."""


@value_class
class PartitionSection:
    """A stretch of a dim that is cut by itself, such as the q rows of a fused qkv."""

    size: int
    """Elements."""
    unit: int = 1
    """Elements that must stay on one rank, such as one head."""
    shared: bool = False
    """Where there are fewer units than ranks, neighbouring ranks hold the same unit (key/value heads)."""
    noun: str = ""
    """What a unit is, for messages: `key/value heads`."""
    even: bool = True
    """Whether every rank has as many units; else each has the ceil of its share, and the last rank fewer."""


@value_class
class AxisPartition:
    """One mesh axis cutting one dim."""

    axis: str
    """The mesh axis."""
    sections: tuple[PartitionSection, ...] = ()
    """The sections of the dim, each divided by its units; empty means any extent in ceil-sized parts, as `torch.chunk`
    does for FSDP: the last part may be short and trailing parts empty."""


@value_class
class GroupMember:
    """A tensor that is one of many alike, which a mesh axis divides among its ranks whole: one expert of all."""

    axis: str
    index: int
    count: int
    """How many there are; the axis gives each rank an equal run of them."""


@value_class
class PartitionSpec:
    """How one tensor is cut and on which stage it lives; a partition spec with units.

    `compute_rank_boxes` raises PartitionError where a shape does not divide as the spec asks.

    >>> from shardctl.tensors.mesh import Mesh
    >>> heads = PartitionSection(size=8, unit=4)  # two heads of four rows
    >>> spec = PartitionSpec(((AxisPartition("tp", (heads,)),), ()))
    >>> print(*compute_rank_boxes((8, 3), spec, Mesh.of(tp=2), Mesh.of(tp=2).coordinate(1)))
    [4:8, 0:3]
    """

    cuts: tuple[tuple[AxisPartition, ...], ...]
    """For each dim, the cuts in the order they are made: a later one divides what the earlier one left."""
    where: tuple[tuple[Where, int], ...] = (("layer", 0),)
    """The stages that hold the tensor: `("layer", n)` for layer n; a tied weight can be on two."""
    member: GroupMember | None = None
    """Set for a tensor that only some ranks of an axis hold."""

    _axes: tuple[str, ...] | None = field(default=None, init=False, repr=False, compare=False)
    """Those below, once they are known."""
    _of_expert: bool | None = field(default=None, init=False, repr=False, compare=False)
    _rule: PartitionSpec | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def rule(self) -> PartitionSpec:
        """One object for all that are alike but for which expert they speak of, where their maker knew; else itself."""
        return self._rule or self

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that cut or place the tensor, each once."""
        if self._axes is None:
            member = (self.member.axis,) if self.member else ()
            axes = tuple(dict.fromkeys((*member, *(cut.axis for dim in self.cuts for cut in dim))))
            object.__setattr__(self, "_axes", axes)
            return axes
        return self._axes

    @property
    def of_expert(self) -> bool:
        """Whether the expert axes decide who holds the tensor."""
        if self._of_expert is None:
            object.__setattr__(self, "_of_expert", not {*EXPERT_AXES, EXPERT_FSDP}.isdisjoint(self.axes))
        return bool(self._of_expert)


def build_member_spec(rule: PartitionSpec, member: GroupMember) -> PartitionSpec:
    """Build the spec of one of many tensors that are alike but for their number; `rule` stands for all of them."""
    spec = PartitionSpec(rule.cuts, rule.where, member)
    object.__setattr__(spec, "_rule", rule)
    return spec


def compute_intervals(extent: int, cuts: Sequence[AxisPartition], mesh: Mesh, at: Mapping[str, int]) -> list[Interval]:
    """Compute what the rank at coordinate `at` holds of a dim of `extent`, as ordered disjoint intervals.

    Raises PartitionError if the extent cannot be divided exactly where it must be.
    """
    held = [(0, extent)] if extent else []
    for cut in cuts:
        degree = mesh.degree(cut.axis)
        if degree == 1:
            continue
        index = at[cut.axis]
        held = _cut_sections(held, cut, degree, index) if cut.sections else _cut_ceil_parts(held, degree, index)
    return held


def compute_rank_boxes(shape: Sequence[int], spec: PartitionSpec, mesh: Mesh, at: Mapping[str, int]) -> list[Box]:
    """Compute the boxes that the rank at `at` holds of a tensor of `shape`, in row-major order.

    Stages are not considered.
    """
    if spec.member and at[spec.member.axis] != find_holder(spec.member, mesh):
        return []
    return compute_held_boxes(shape, spec.cuts, mesh, at)


def find_holder(member: GroupMember, mesh: Mesh) -> int:
    """Find which rank of its axis holds a tensor that is one of many alike."""
    return member.index * mesh.degree(member.axis) // member.count


def compute_held_boxes(
    shape: Sequence[int], cuts: Sequence[Sequence[AxisPartition]], mesh: Mesh, at: Mapping[str, int]
) -> list[Box]:
    """Compute the same for a tensor that the rank is known to hold something of."""
    if not all(shape) or not cuts:  # a tensor without elements is one all the same
        return [Box.whole(shape)]
    held = [compute_intervals(extent, each, mesh, at) for extent, each in zip(shape, cuts, strict=True)]
    return [
        Box(tuple(start for start, _ in part), tuple(stop - start for start, stop in part)) for part in product(*held)
    ]


def check_cuts(
    name: str, shape: Sequence[int], spec: PartitionSpec, mesh: Mesh, *, beside: Iterable[PartitionSpec] = ()
) -> None:
    """Raise PartitionError, naming the tensor and the degrees that work, if the mesh cannot cut it.

    `beside` says how other tensors are cut, for which those degrees must work as well.
    """
    if spec.cuts and len(spec.cuts) != len(shape):
        raise PartitionError(f"{name} has {len(shape)} dims, but its rule is for {len(spec.cuts)}")
    for extent, cuts in zip(shape, spec.cuts, strict=False):
        for cut in cuts:
            ruled = sum(section.size for section in cut.sections)
            if cut.sections and ruled != extent:
                raise PartitionError(f"{name} {list(shape)} has a dim of {extent} where its rule has {ruled}")
    for cut in _list_exact_cuts(spec):
        degree = mesh.degree(cut.axis)
        for section in cut.sections:
            if not can_divide(section, degree):
                units = section.size // section.unit
                whole = _suggest_whole_experts(cut.axis, spec, mesh)
                raise PartitionError(
                    f"cannot split {name} {list(shape)} over {cut.axis}={degree}: "
                    f"{units} {section.noun or 'rows or columns'}",
                    hint=f"use {whole}{_suggest_degrees(cut.axis, mesh, (spec, *beside))}",
                )


def _list_exact_cuts(spec: PartitionSpec) -> Iterator[AxisPartition]:
    """List the cuts of a tensor, and which of the experts a rank has as one more."""
    if spec.member:
        yield AxisPartition(spec.member.axis, (PartitionSection(spec.member.count, noun="experts"),))
    for cuts in spec.cuts:
        yield from cuts


def can_divide(section: PartitionSection, degree: int) -> bool:
    """Return whether `degree` ranks can share the section's units, evenly unless it is enough that all have some."""
    units = section.size // section.unit
    if not section.even:
        return -(-units // degree) * (degree - 1) < units
    return units % degree == 0 or (section.shared and degree % units == 0)


def _suggest_degrees(axis: str, mesh: Mesh, specs: Iterable[PartitionSpec]) -> str:
    """Suggest the degrees of an axis that work for all of `specs`; say whether sharing heads would allow the mesh's.

    Those inside experts are only what the ranks of a stage can be divided into, because etp adds none.
    """
    degree, ranks = mesh.degree(axis), mesh.world // mesh.degree("pp") // mesh.degree("ep")
    sections = {
        section for spec in specs for cut in _list_exact_cuts(spec) if cut.axis == axis for section in cut.sections
    }
    most = min((s.size // s.unit for s in sections if not s.shared), default=degree)
    possible = (d for d in range(1, min(most, MOST_RANKS) + 1) if axis != "etp" or ranks % d == 0)
    degrees = [str(d) for d in possible if all(can_divide(s, d) for s in sections)]
    shown = degrees if len(degrees) < 10 else [*degrees[:8], "...", degrees[-1]]  # noqa: PLR2004 - a line's worth
    listed = " or ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))
    refusing = [section for section in sections if not can_divide(section, degree)]
    heads = all(s.noun.startswith("key") and degree % (s.size // s.unit) == 0 for s in refusing)
    also = ", or --kv-heads replicate to keep each head on several ranks" if heads else ""
    return f"--{axis} {listed}{also}"


def _suggest_whole_experts(axis: str, spec: PartitionSpec, mesh: Mesh) -> str:
    """Suggest to divide whole experts among the ranks where a cut goes through each of them; empty if that fails."""
    degree = mesh.degree("ep") * mesh.degree("etp")
    counts = [s.size // s.unit for cut in _list_exact_cuts(spec) if cut.axis == "ep" for s in cut.sections]
    whole = axis == "etp" and bool(counts) and all(count % degree == 0 for count in counts)
    return f"--ep {degree}, which leaves each expert whole, or " if whole else ""


def _cut_sections(held: Sequence[Interval], cut: AxisPartition, degree: int, index: int) -> list[Interval]:
    whole = sum(section.size for section in cut.sections)
    if sum(stop - start for start, stop in held) != whole:
        raise PartitionError(f"an exact cut over {cut.axis} must come before any other cut of the same dim")
    if not whole:
        return []
    origin = held[0][0]
    result: list[Interval] = []
    for section in cut.sections:
        units = section.size // section.unit
        if units % degree == 0:
            share = units // degree
            first = index * share
        elif not section.even:
            first, stop = compute_ceil_part(units, degree, index)
            share = stop - first
        elif section.shared and degree % units == 0:
            share = 1
            first = index // (degree // units)
        else:
            raise PartitionError(f"{units} {section.noun or 'elements'} do not divide over {cut.axis}={degree}")
        start = origin + first * section.unit
        _append_interval(result, (start, start + share * section.unit))
        origin += section.size
    return result


def compute_ceil_part(total: int, degree: int, index: int) -> tuple[int, int]:
    """Compute where the part of one of `degree` ranks begins and ends, if parts are ceil-sized.

    >>> [compute_ceil_part(10, 4, index) for index in range(4)]
    [(0, 3), (3, 6), (6, 9), (9, 10)]
    """
    part = -(-total // degree)
    return min(index * part, total), min((index + 1) * part, total)


def _cut_ceil_parts(held: Sequence[Interval], degree: int, index: int) -> list[Interval]:
    low, high = compute_ceil_part(sum(stop - start for start, stop in held), degree, index)
    result: list[Interval] = []
    position = 0
    for start, stop in held:
        a, b = max(low - position, 0), min(high - position, stop - start)
        if a < b:
            _append_interval(result, (start + a, start + b))
        position += stop - start
    return result


def _append_interval(held: list[Interval], new: Interval) -> None:
    if new[0] == new[1]:
        return
    if held and held[-1][1] == new[0]:
        held[-1] = (held[-1][0], new[1])
    else:
        held.append(new)
