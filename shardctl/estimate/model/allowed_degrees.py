"""Finds the degrees of each mesh axis that a model allows, and says why others fail and which would work."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import PartitionError
from shardctl.base.value import value_class
from shardctl.tensors.mesh import AXES, EXPERT_AXES, Mesh
from shardctl.tensors.placement import PartitionSection, can_divide, check_cuts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardctl.estimate.model.inventory import TensorInventory, TensorKind
    from shardctl.tensors.placement import PartitionSpec

MOST: Final = 1024
"""Degrees up to which alternatives are looked for."""
_MAX_DEGREES_SHOWN: Final = 9
"""How many a line has room for."""


@value_class
class MeshRefusal:
    """Why a mesh is not possible."""

    axis: str
    degree: int
    reason: str
    """In words that name a tensor or what else is too few."""
    works: tuple[int, ...]
    """The degrees up to twice the one asked for that do work, in order."""

    def __str__(self) -> str:
        return f"{self.reason}; {self.axis} can be {format_degrees(self.works)}" if self.works else self.reason


def format_degrees(degrees: Sequence[int]) -> str:
    """Format degrees in a line: all in a row as a range, of many the first and the last."""
    if len(degrees) > 2 and degrees[-1] == len(degrees):  # noqa: PLR2004 - two are no range
        return f"1 to {degrees[-1]}"
    shown = [str(degree) for degree in degrees]
    if len(shown) > _MAX_DEGREES_SHOWN:
        shown = [*shown[: _MAX_DEGREES_SHOWN - 1], "...", shown[-1]]
    return ", ".join(shown)


@dataclass(frozen=True)
class AllowedDegrees:
    """What a model allows, worked out from the cuts of its tensors as placement does for each of them.

    Heads, key/value heads and their replication, experts, vocabulary, intermediate sizes and the blocks of quantized
    weights are all in there. fsdp and dp have no limit: fsdp cuts in ceil-sized parts, dp copies.
    """

    inventory: TensorInventory
    sequence: int | None = None
    """Tokens per sequence, which cp shares out; None if they do not matter."""

    @cached_property
    def kinds(self) -> tuple[TensorKind, ...]:
        """One tensor of each way to be cut; a model has few."""
        alike: dict[object, TensorKind] = {}
        for kind in self.inventory.kinds:
            member = kind.spec.member
            alike.setdefault((kind.shape, kind.spec.cuts, member and (member.axis, member.count)), kind)
        return tuple(alike.values())

    @cached_property
    def axes(self) -> frozenset[str]:
        """The axes that cut or place any tensor."""
        return frozenset(axis for kind in self.kinds for axis in kind.spec.axes)

    @cached_property
    def _sections(self) -> Mapping[str, frozenset[PartitionSection]]:
        """By axis what must be divided exactly."""
        return list_sections(kind.spec for kind in self.kinds)

    def allows_degree(self, axis: str, degree: int) -> bool:
        """Return whether the axis can have the degree."""
        if axis in self.inventory.unknown:
            return degree == 1
        if axis == "pp":
            return degree <= max(self.inventory.layers, 1)
        if axis == "cp":
            # Each rank gets an early and a late part, so that causal work is even (Megatron-LM, context parallelism).
            return degree == 1 or self.sequence is None or self.sequence % (2 * degree) == 0
        return all(can_divide(section, degree) for section in self._sections.get(axis, ()))

    def degrees(self, axis: str, most: int) -> tuple[int, ...]:
        """Return the degrees up to `most` that work, in order."""
        return tuple(degree for degree in range(1, most + 1) if self.allows_degree(axis, degree))

    def refuse(self, mesh: Mesh) -> MeshRefusal | None:
        """Return why the mesh is not possible, or None if it is."""
        for axis in (*AXES, *EXPERT_AXES):
            degree = mesh.degree(axis)
            if not self.allows_degree(axis, degree):
                return MeshRefusal(
                    axis, degree, self._explain_degree(axis, degree), self.degrees(axis, min(2 * degree, MOST))
                )
        return None

    def _explain_degree(self, axis: str, degree: int) -> str:
        if axis in self.inventory.unknown:
            return f"no table or rule says how {axis} cuts this model"
        if axis == "pp":
            return f"pp={degree} needs at least {degree} layers, but the model has {self.inventory.layers}"
        if axis == "cp":
            return f"cp={degree} divides a sequence into {2 * degree} equal parts, but it has {self.sequence} tokens"
        mesh = build_single_axis_mesh(axis, degree)
        for kind in self.kinds:
            try:
                check_cuts(kind.example, kind.shape, kind.spec, mesh)
            except PartitionError as error:
                return error.message
        raise AssertionError(f"placement cuts what {axis}={degree} cannot divide")


def list_sections(specs: Iterable[PartitionSpec]) -> Mapping[str, frozenset[PartitionSection]]:
    """List by axis what must be divided exactly."""
    found: dict[str, set[PartitionSection]] = {}
    alike = {(id(s.cuts), s.member and (s.member.axis, s.member.count)): s for s in specs}  # those share their cuts
    for spec in alike.values():
        if spec.member:
            found.setdefault(spec.member.axis, set()).add(PartitionSection(spec.member.count))
        for cut in (cut for dim in spec.cuts for cut in dim):
            found.setdefault(cut.axis, set()).update(cut.sections)
    return {axis: frozenset(sections) for axis, sections in found.items()}


def build_single_axis_mesh(axis: str, degree: int) -> Mesh:
    """Build a mesh that has nothing but the axis.

    The ranks that expert axes re-use are those of dp, which cuts nothing.
    """
    if axis in EXPERT_AXES:
        return Mesh.of(dp=degree, ep=degree if axis == "ep" else 1, etp=degree if axis == "etp" else 1)
    return Mesh.of(**{axis: degree}, etp=1)
