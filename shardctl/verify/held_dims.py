"""Says where in a tensor the logical dims lie that other tensors share, and what a rank has of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.base.value import value_class
from shardctl.tensors.mesh import EXPERT_FSDP

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from shardctl.models import Model, ModelTensor
    from shardctl.tensors.box import Box
    from shardctl.tensors.placement import Interval, PartitionSection

DimLabel = tuple[str, int]
"""A logical dim: what its units are, or its name in the table, and how many units there are."""
_FSDP_AXES: Final = frozenset({"fsdp", EXPERT_FSDP})
"""The axes whose ranks gather what they have before they compute."""
_MAX_INTERVALS_SHOWN: Final = 3
_BLOCKED_DIM_PATTERN: Final = re.compile(r"(.+)/(\d+)")
"""Of the dims of a quantized weight's arrays: the words of the weight's, and how many elements share an entry."""
_OF_BLOCKS: Final = "blocks of "
_INTERLEAVED_UNIT_PREFIX: Final = "pairs of gate and up "
"""How the unit of a dim begins that interleaves gate and up; a pair is one column of what follows it."""


@value_class
class DimRange:
    """Where in a tensor a logical dim lies: along one of its dims, alone or fused with others."""

    label: DimLabel
    dim: int
    start: int
    """Its first index along the dim."""
    size: int
    unit: int
    """Elements of one unit, of the label's dim."""
    spread: bool
    """Whether fsdp cuts the dim, so that a rank may have only a part of what it computes with."""
    scale: int = 1
    """Elements of the label's dim for which one index stands: those of a block that shares a scale."""
    most: int = 0
    """Elements of the label's dim, where the last block may be cut short; 0 where none is."""

    def of(self, span: Sequence[Interval]) -> tuple[Interval, ...]:
        """Return what lies in it of indices along its dim, in elements of the label's dim from its start."""
        stop = self.start + self.size
        inside = ((max(a, self.start) - self.start, min(b, stop) - self.start) for a, b in span)
        scaled = ((a * self.scale, b * self.scale) for a, b in inside if a < b)
        return tuple((a, min(b, self.most) if self.most else b) for a, b in scaled)


@value_class
class HeldDim:
    """What one holder has of a logical dim in one tensor."""

    tensor: str
    stretch: DimRange
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
        return self.intervals == self._convert_to_elements(units)

    def is_within(self, units: Iterable[Interval]) -> bool:
        """Return whether it is a part of these units."""
        outer = self._convert_to_elements(units)
        return all(any(a <= c and d <= b for a, b in outer) for c, d in self.intervals)

    def _convert_to_elements(self, units: Iterable[Interval]) -> tuple[Interval, ...]:
        unit = self.stretch.unit
        return tuple((a * unit, b * unit) for a, b in units)

    def __str__(self) -> str:
        return (
            format_intervals(self.units) if self.units is not None else f"elements {format_intervals(self.intervals)}"
        )


@value_class
class SharedWord:
    """A word of the table for a dim, of which arrays of quantized weights have blocks of several sizes."""

    label: DimLabel
    unit: int
    size: int
    """Its elements."""


def list_shared_words(model: Model) -> Mapping[str, SharedWord]:
    """List the words whose dims quantization cuts by blocks, with the heads that they have without it, if any.

    A word that means dims of several sizes in one model is left out.
    """
    words: dict[str, SharedWord | None] = {}
    blocked = set()
    for tensor in model.tensors.values():
        for word, scale, section in _list_sections(tensor):
            if scale != 1 or section.noun.startswith(_OF_BLOCKS):
                blocked.add(word)
            if scale != 1:
                continue
            plain = SharedWord((word, section.size), 1, section.size)
            if section.noun and not section.noun.startswith(_OF_BLOCKS):
                plain = SharedWord((section.noun, section.size // section.unit), section.unit, section.size)
            known = words.setdefault(word, plain)
            if known is not None and known.size != plain.size:
                words[word] = None
            elif known is not None and known.unit == 1:
                words[word] = plain
    return {word: found for word, found in words.items() if found is not None and word in blocked}


def list_stretches(known: ModelTensor, shared: Mapping[str, SharedWord]) -> Iterator[DimRange]:
    """List the logical dims of a tensor that an axis divides exactly: those that other tensors have too.

    What is cut by blocks of `shared` words is listed a second time, in elements of the word's dim.
    """
    words = known.row.dims.split()
    for dim, cuts in enumerate(known.spec.cuts):
        cut = next((cut for cut in cuts if cut.sections), None)
        if cut is None or len(words) != len(known.spec.cuts):
            continue
        names, scale = _split_word(words[dim])
        if len(names) != len(cut.sections):  # one word for several, or a rule file that speaks of the whole
            names, scale = [f"{words[dim]} of {known.row.name}"] * len(cut.sections), 1
        start, spread = 0, any(other.axis in _FSDP_AXES for other in cuts)
        for name, section in zip(names, cut.sections, strict=True):
            word = f"{name}/{scale}" if scale > 1 else name
            label = (section.noun.removeprefix(_INTERLEAVED_UNIT_PREFIX) or word, section.size // section.unit)
            yield DimRange(label, dim, start, section.size, section.unit, spread)
            common = shared.get(name)
            size = section.size
            whole = common is not None and size == -(-common.size // scale)  # not for 3 bits, 32 of which are 3 words
            if common is not None and whole and (common.label != label or scale > 1):
                yield DimRange(common.label, dim, start, size, common.unit, spread, scale, common.size)
            start += section.size


def _list_sections(tensor: ModelTensor) -> Iterator[tuple[str, int, PartitionSection]]:
    """List the words of a tensor's dims that an axis divides, the elements that share an entry, and the section."""
    words = tensor.row.dims.split()
    for word, cuts in zip(words, tensor.spec.cuts, strict=False):
        cut = next((cut for cut in cuts if cut.sections), None)
        names, scale = _split_word(word)
        if cut is not None and len(words) == len(tensor.spec.cuts) and len(names) == len(cut.sections):
            yield from ((name, scale, section) for name, section in zip(names, cut.sections, strict=True))


def _split_word(word: str) -> tuple[list[str], int]:
    """Split what the table has for one dim.

    >>> _split_word("q+kv+kv/16"), _split_word("hidden")
    ((['q', 'kv', 'kv'], 16), (['hidden'], 1))
    """
    found = _BLOCKED_DIM_PATTERN.fullmatch(word)
    return (found[1].split("+"), int(found[2])) if found is not None else (word.split("+"), 1)


def merge_intervals(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Return the same indices in as few intervals as can be, in order."""
    found: list[Interval] = []
    for start, stop in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        elif start < stop:
            found.append((start, stop))
    return tuple(found)


def format_intervals(intervals: Sequence[Interval]) -> str:
    """Format the first few of some intervals."""
    shown = ", ".join(f"{a}:{b}" for a, b in intervals[:_MAX_INTERVALS_SHOWN])
    return (shown + (" and more" if len(intervals) > _MAX_INTERVALS_SHOWN else "")) or "none"
