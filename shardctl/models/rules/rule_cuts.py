"""Reads and writes how a rule file says that tensors are cut: an entry for each dim, with the mesh axes that cut it.

`tp` cuts into equal parts; `tp of 32x128` keeps together what makes up each of 32 heads of 128 elements;
`tp of 32x128 + 8x128 shared` cuts each of two stretches by itself, and lets ranks share the heads of the second;
`tp unevenly` cuts into ceil-sized parts.
"""

from __future__ import annotations

import re
from typing import Final

from shardctl.base.errors import UsageError
from shardctl.base.value import value_class
from shardctl.tensors.mesh import EXPERT_AXES, EXPERT_FSDP
from shardctl.tensors.placement import AxisPartition, PartitionSection

CUTTING: Final = ("tp", "fsdp", "ep", "etp")
"""The mesh axes that can cut a dim."""
_UNPARTITIONED_AXIS_REASONS: Final = {
    "pp": "pp places whole layers: see [layers]",
    "dp": "dp holds copies",
    "cp": "cp holds copies",
}
_PARTITION_SECTION_PATTERN: Final = re.compile(r"(?P<count>[1-9]\d{0,11})x(?P<unit>[1-9]\d{0,11})(?P<shared> shared)?")


@value_class
class WrittenPartition:
    """One mesh axis that cuts one dim, as a rule file says it."""

    axis: str
    sections: tuple[PartitionSection, ...] | None = None
    """What is cut by itself, none for ceil-sized parts; None for the whole dim, whatever its extent."""

    def cut(self, extent: int, *, expert: bool) -> AxisPartition:
        """Return the cut of a dim of `extent`; fsdp cuts an `expert` by what ep and etp leave of it."""
        if self.axis == "fsdp":
            return AxisPartition(EXPERT_FSDP if expert else "fsdp")
        return AxisPartition(self.axis, (PartitionSection(extent),) if self.sections is None else self.sections)


@value_class
class Rule:
    """How the tensors whose names match are cut."""

    pattern: str
    """Over whole dotted parts; see `PatternList`."""
    dims: tuple[tuple[WrittenPartition, ...], ...]
    """For each dim, what cuts it, in the order of cutting; dims not mentioned are not cut."""

    def cuts(self, name: str, shape: tuple[int, ...], *, expert: bool = False) -> tuple[tuple[AxisPartition, ...], ...]:
        """Return the cuts of the tensor `name`; raises UsageError if the rule speaks of more dims than it has.

        A 0-d tensor is never cut. `fsdp` cuts unevenly, all other axes exactly unless the rule says otherwise.
        """
        if not shape:
            return ()
        if len(self.dims) > len(shape):
            raise UsageError(f"the rule {self.pattern!r} is for {len(self.dims)} dims, but {name} is {list(shape)}")
        expert = expert or any(written.axis in EXPERT_AXES for dim in self.dims for written in dim)
        every = (*self.dims, *((),) * (len(shape) - len(self.dims)))
        return tuple(
            tuple(written.cut(extent, expert=expert) for written in dim)
            for dim, extent in zip(every, shape, strict=True)
        )


def format_cut(cut: AxisPartition) -> str:
    """Return the words for a cut.

    >>> format_cut(AxisPartition("tp", (PartitionSection(64, 16), PartitionSection(32, 16, shared=True))))
    'tp of 4x16 + 2x16 shared'
    """
    if cut.axis in {"fsdp", EXPERT_FSDP}:
        return "fsdp"
    if not cut.sections:
        return f"{cut.axis} unevenly"
    if len(cut.sections) == 1 and cut.sections[0].unit == 1:
        return cut.axis
    parts = [f"{s.size // s.unit}x{s.unit}{' shared' if s.shared else ''}" for s in cut.sections]
    return f"{cut.axis} of {' + '.join(parts)}"


def parse_rule(pattern: str, dims: object, path: str) -> Rule:
    """Return one rule; raises UsageError for axes that are unknown, repeated, or in an impossible order."""
    where = f"the rule {pattern!r} of {path}"
    if not isinstance(dims, list):
        raise UsageError(f"{where} is not a list with one entry a dim", hint='write ["tp", "fsdp"], or [] for none')
    rule = Rule(pattern, tuple(tuple(_parse_cut(word, where) for word in _list_words(dim, where)) for dim in dims))
    flat = [written.axis for dim in rule.dims for written in dim]
    for axis in flat:
        if axis not in CUTTING:
            why = f"; {_UNPARTITIONED_AXIS_REASONS[axis]}" if axis in _UNPARTITIONED_AXIS_REASONS else ""
            raise UsageError(f"{where} names {axis!r}, which cuts no dim{why}", hint=f'use {", ".join(CUTTING)} or ""')
        if flat.count(axis) > 1:
            raise UsageError(f"{where} cuts with {axis} twice")
    for dim in rule.dims:
        if any(written.axis != "fsdp" for written in dim[1:]):
            raise UsageError(
                f"{where} cuts one dim by {' then '.join(written.axis for written in dim)}",
                hint="only fsdp can follow another axis, because the others divide a whole dim exactly",
            )
    return rule


def _list_words(dim: object, where: str) -> list[str]:
    words = ([dim] if dim else []) if isinstance(dim, str) else dim
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise UsageError(f"{where} is not a pattern or a list of patterns")
    return words


def _parse_cut(text: str, where: str) -> WrittenPartition:
    """Return one axis of one dim; raises UsageError for words that mean nothing."""
    axis, _, rest = text.partition(" ")
    if not rest or axis not in CUTTING:
        return WrittenPartition(text if axis not in CUTTING else axis)
    if rest == "unevenly":
        return WrittenPartition(axis, ())
    found = [_PARTITION_SECTION_PATTERN.fullmatch(part) for part in rest.removeprefix("of ").split(" + ")]
    if not rest.startswith("of ") or not all(found):
        raise UsageError(
            f"{where} has the cut {text!r}, which is not understood",
            hint='write "tp", "tp unevenly", or "tp of 32x128 + 8x128 shared": how many heads of how many elements',
        )
    return WrittenPartition(
        axis,
        tuple(
            PartitionSection(int(m["count"]) * int(m["unit"]), int(m["unit"]), bool(m["shared"])) for m in found if m
        ),
    )
