"""How the arrays of a quantised weight are cut: where the weight is cut, and only between its blocks.

fsdp is no exact cut. It spreads bytes over ranks that gather them again before they are used, each array by itself as
`torch.chunk` would; a packed integer is one element and stays whole, but a scale may be on another rank than its block.
"""

from __future__ import annotations

from itertools import accumulate
from math import lcm
from typing import TYPE_CHECKING, Final

from shardctl.mesh import EXPERT_FSDP
from shardctl.models.quantisation.storage import Along
from shardctl.placement import Cut, Section, Spec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardctl.models.quantisation.storage import Form

_SPREADING: Final = ("fsdp", EXPERT_FSDP)


def blocks(forms: Iterable[Form]) -> dict[int, int]:
    """For each dim of the weight, how many of its elements every array has together.

    >>> blocks([(Along(0), Along(1, 8)), (Along(0), Along(1, 12))])
    {0: 1, 1: 24}
    """
    found: dict[int, int] = {}
    for along in (extent for form in forms for extent in form if isinstance(extent, Along)):
        found[along.dim] = lcm(found.get(along.dim, 1), along.block)
    return found


def following(
    weight: Spec, shape: Sequence[int], form: Form, together: Mapping[int, int], uncut: Mapping[int, str]
) -> Spec:
    """The spec of an array of `form` whose weight, of `shape`, has the spec `weight`.

    `together` is what `blocks` says of all arrays of the weight, `uncut` the dims that may not be cut, and why.
    """
    cuts: list[tuple[Cut, ...]] = []
    for extent in form:
        mine = weight.cuts[extent.dim] if isinstance(extent, Along) else ()
        exact = (
            _followed(cut, shape[extent.dim], extent, together[extent.dim], uncut.get(extent.dim, ""))
            for cut in mine
            if isinstance(extent, Along) and cut.axis not in _SPREADING
        )
        cuts.append(tuple(exact))
    if any(isinstance(extent, Along) for extent in form):
        cuts[0] += tuple(cut for cut in weight.cuts[0] if cut.axis in _SPREADING)
    return Spec(tuple(cuts), weight.where, weight.member)


def refusing(weight: Spec, shape: Sequence[int], noun: str) -> Spec:
    """The spec of an array of `shape` that every cut of its weight is an error for; `noun` says what it is."""
    axes = dict.fromkeys(cut.axis for cuts in weight.cuts for cut in cuts)
    whole = tuple(Cut(axis, (Section(shape[0], max(shape[0], 1), noun=noun),)) for axis in axes)
    return Spec((whole, *((),) * (len(shape) - 1)), weight.where, weight.member)


def _followed(cut: Cut, size: int, along: Along, together: int, why: str) -> Cut:
    """`cut` of the weight's dim of `size` as a cut of the array's dim."""
    if why:
        return Cut(cut.axis, (_whole(along.extent(size), why),))
    if not cut.sections and together == 1:
        return cut
    sections = cut.sections or (Section(size),)
    *starts, _ = accumulate(section.size for section in sections)
    if any(start % together for start in starts):
        return Cut(
            cut.axis, (_whole(along.extent(size), f"stretch, whose parts do not begin at blocks of {together}"),)
        )
    return Cut(cut.axis, tuple(_section(section, along, together) for section in sections))


def _section(section: Section, along: Along, together: int) -> Section:
    """A section of the weight's dim in elements of the array; units grow to whole blocks."""
    unit, extent = lcm(section.unit, together), along.extent(section.size)
    if section.size % unit:
        return _whole(extent, f"stretch of {section.size}, which blocks of {unit} do not divide")
    if unit == section.unit:
        return Section(extent, along.extent(unit), section.shared, section.noun)
    return Section(extent, along.extent(unit), noun=f"blocks of {unit}")


def _whole(extent: int, noun: str) -> Section:
    return Section(extent, max(extent, 1), noun=noun)
