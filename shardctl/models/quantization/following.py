"""Cuts the arrays of a quantized weight where the weight is cut, and only between its blocks.

fsdp is no exact cut. It spreads bytes over ranks that gather them again before they are used, each array by itself as
`torch.chunk` would; a packed integer is one element and stays whole, but a scale may be on another rank than its block.
"""

from __future__ import annotations

from itertools import accumulate
from math import lcm
from typing import TYPE_CHECKING, Final

from shardctl.models.quantization.storage import AlongDim
from shardctl.tensors.mesh import EXPERT_FSDP
from shardctl.tensors.placement import AxisPartition, PartitionSection

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardctl.models.quantization.storage import Form

Cuts = tuple[tuple[AxisPartition, ...], ...]
"""For each dim, the cuts in the order they are made."""
_FSDP_AXES: Final = ("fsdp", EXPERT_FSDP)


def compute_blocks(forms: Iterable[Form]) -> dict[int, int]:
    """For each dim of the weight, how many of its elements every array has together.

    >>> compute_blocks([(AlongDim(0), AlongDim(1, 8)), (AlongDim(0), AlongDim(1, 12))])
    {0: 1, 1: 24}
    """
    found: dict[int, int] = {}
    for along in (extent for form in forms for extent in form if isinstance(extent, AlongDim)):
        found[along.dim] = lcm(found.get(along.dim, 1), along.block)
    return found


def follow_cuts(
    weight: Cuts, shape: Sequence[int], form: Form, together: Mapping[int, int], uncut: Mapping[int, str]
) -> Cuts:
    """Return the cuts of an array of `form`, where its weight, of `shape`, has the cuts `weight`.

    `together` is what `compute_blocks` says of all arrays of the weight, `uncut` the dims that may not be cut, and why.
    """
    cuts: list[tuple[AxisPartition, ...]] = [
        tuple(
            _follow_cut(cut, shape[extent.dim], extent, together[extent.dim], uncut.get(extent.dim, ""))
            for cut in weight[extent.dim]
            if cut.axis not in _FSDP_AXES
        )
        if isinstance(extent, AlongDim)
        else ()
        for extent in form
    ]
    if any(isinstance(extent, AlongDim) for extent in form):
        cuts[0] += tuple(cut for cut in weight[0] if cut.axis in _FSDP_AXES)
    return tuple(cuts)


def refuse_cuts(weight: Cuts, shape: Sequence[int], noun: str) -> Cuts:
    """Return cuts of an array of `shape` of which each is an error, for every axis that cuts its weight.

    `noun` is why.
    """
    axes = dict.fromkeys(cut.axis for cuts in weight for cut in cuts)
    return (
        tuple(AxisPartition(axis, (_build_uncut_section(shape[0], noun),)) for axis in axes),
        *((),) * (len(shape) - 1),
    )


def _follow_cut(cut: AxisPartition, size: int, along: AlongDim, together: int, why: str) -> AxisPartition:
    """Return `cut` of the weight's dim of `size` as a cut of the array's dim."""
    if why:
        return AxisPartition(cut.axis, (_build_uncut_section(along.extent(size), why),))
    if not cut.sections and together == 1:
        return cut
    sections = cut.sections or (PartitionSection(size),)
    *starts, _ = accumulate(section.size for section in sections)
    if any(start % together for start in starts):
        return AxisPartition(
            cut.axis,
            (_build_uncut_section(along.extent(size), f"stretch, whose parts do not begin at blocks of {together}"),),
        )
    return AxisPartition(cut.axis, tuple(_follow_section(section, along, together) for section in sections))


def _follow_section(section: PartitionSection, along: AlongDim, together: int) -> PartitionSection:
    """Return a section of the weight's dim in elements of the array; units grow to whole blocks."""
    unit, extent = lcm(section.unit, together), along.extent(section.size)
    if section.size % unit:
        return _build_uncut_section(extent, f"stretch of {section.size}, which blocks of {unit} do not divide")
    if unit == section.unit:
        return PartitionSection(extent, along.extent(unit), section.shared, section.noun)
    return PartitionSection(extent, along.extent(unit), noun=f"blocks of {unit}")


def _build_uncut_section(extent: int, noun: str) -> PartitionSection:
    return PartitionSection(extent, max(extent, 1), noun=noun)
