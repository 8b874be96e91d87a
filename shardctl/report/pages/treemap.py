"""Draws the parameters of a model as a treemap: areas are bytes, tensors of one name in all layers are one area."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Final

from shardctl.base.amounts import format_memory_size
from shardctl.report.pages.svg import draw_box, draw_frame, draw_picture, draw_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from markupsafe import Markup

    from shardctl.estimate.model.inventory import TensorInventory, TensorKind

_PICTURE_HEIGHT_PIXELS: Final = 300
_PAGE_WIDTH_PIXELS: Final = 700.0
"""Pixels that a page is taken to be wide when areas are given their shapes."""
_MAX_AREAS_SHOWN: Final = 20
_LEGEND_LABELS_BY_CLASS: Final = {
    "layer": "in layers",
    "expert": "experts",
    "outside": "outside of layers",
    "other": "others",
}
_NUMBER_PATTERN: Final = re.compile(r"(?<![A-Za-z_0-9])\d+(?![A-Za-z_0-9])")

Cell = tuple[float, float, float, float]
"""Left, top, width and height."""


NamedArea = tuple[str, str, int]
"""Name, look and bytes."""


def draw_parameters(inventory: TensorInventory) -> Markup | None:
    """Draw the tensors of a model by their bytes; None where there are none."""
    return draw_areas(list_areas_by_name(inventory), label="the model's tensors by their bytes")


def draw_areas(areas: Sequence[NamedArea], *, label: str) -> Markup | None:
    """Draw areas, the largest first, each with its name and its share; None where there is no byte."""
    whole = sum(nbytes for _, _, nbytes in areas)
    if not whole:
        return None
    scale = _PAGE_WIDTH_PIXELS * _PICTURE_HEIGHT_PIXELS / whole
    cells = lay_out_areas(
        [nbytes * scale for _, _, nbytes in areas], (0.0, 0.0, _PAGE_WIDTH_PIXELS, float(_PICTURE_HEIGHT_PIXELS))
    )
    parts: list[str] = []
    for (name, look, nbytes), (left, top, width, height) in zip(areas, cells, strict=True):
        size = f"{format_memory_size(nbytes)}, {100 * nbytes / whole:.1f} %"
        place = 100 * left / _PAGE_WIDTH_PIXELS, top, 100 * width / _PAGE_WIDTH_PIXELS, height
        parts.append(draw_box(*place, look=f"area {look}", title=f"{name}: {size}"))
        if height > 18:  # noqa: PLR2004 - a line of text
            lines = [draw_text(0, 14, f"\u00a0{_shorten_name(name)}", look="area-name")]
            lines += [draw_text(0, 29, f"\u00a0{size}", look="area-size")] * (height > 34)  # noqa: PLR2004 - two lines
            parts.append(draw_frame(*place, lines))
    said = "; ".join(f"{name}: {format_memory_size(nbytes)}" for name, _, nbytes in areas)
    return draw_picture(parts, height=_PICTURE_HEIGHT_PIXELS, label=f"{label}. {said}")


def rank_areas(sizes: Counter[tuple[str, str]]) -> list[NamedArea]:
    """List the bytes by name and look, the largest first, the rest as one."""
    ranked = [(name, look, nbytes) for (name, look), nbytes in sizes.most_common() if nbytes]
    rest = sum(nbytes for *_, nbytes in ranked[_MAX_AREAS_SHOWN:])
    return ranked[:_MAX_AREAS_SHOWN] + ([(f"{len(ranked) - _MAX_AREAS_SHOWN} others", "other", rest)] if rest else [])


def join_numbered_names(name: str) -> str:
    """Return a name with a star for each number of a layer or an expert.

    >>> join_numbered_names("model.layers.11.mlp.experts.3.up_proj.weight")
    'model.layers.*.mlp.experts.*.up_proj.weight'
    """
    return _NUMBER_PATTERN.sub("*", name)


def list_areas_by_name(inventory: TensorInventory) -> list[NamedArea]:
    """List name, look and bytes of tensors that are named alike but for numbers, the largest first, the rest as one."""
    sizes: Counter[tuple[str, str]] = Counter()
    for kind in inventory.kinds:
        sizes[join_numbered_names(kind.example), _choose_look(kind)] += kind.count * kind.dtype.nbytes(kind.shape)
    return rank_areas(sizes)


def list_looks(inventory: TensorInventory) -> list[tuple[str, str]]:
    """List what the colours stand for, each with its look, as far as there are any."""
    there = {look for _, look, _ in list_areas_by_name(inventory)}
    return [(name, look) for look, name in _LEGEND_LABELS_BY_CLASS.items() if look in there]


def _choose_look(kind: TensorKind) -> str:
    if kind.spec.of_expert:
        return "expert"
    return "layer" if kind.layers else "outside"


def _shorten_name(name: str) -> str:
    """Leave out what all names begin and end with."""
    parts = name.removesuffix(".weight").split(".*.")
    return parts[-1] if len(parts) > 1 and not parts[-1].isdigit() else parts[0].removeprefix("model.")


def lay_out_areas(areas: Sequence[float], place: Cell) -> list[Cell]:
    """Lay out areas, the largest first, in rows of cells that are as square as can be (Bruls et al. 2000).

    >>> lay_out_areas([2.0, 1.0, 1.0], (0.0, 0.0, 2.0, 2.0))
    [(0.0, 0.0, 1.0, 2.0), (1.0, 0.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0)]
    """
    cells: list[Cell] = []
    rest = list(areas)
    while rest:
        short = min(place[2], place[3])
        taken = 1
        while taken < len(rest) and _rate_row(rest[: taken + 1], short) <= _rate_row(rest[:taken], short):
            taken += 1
        row, rest = rest[:taken], rest[taken:]
        placed, place = _place_row(row, place)
        cells += placed
    return cells


def _rate_row(row: Sequence[float], short: float) -> float:
    """Return how far the worst cell of a row is from a square."""
    whole = sum(row)
    return max(max(short * short * area / whole**2, whole**2 / (short * short * area)) for area in row)


def _place_row(row: Sequence[float], place: Cell) -> tuple[list[Cell], Cell]:
    """Place a row along the shorter side; return its cells and what is left."""
    left, top, width, height = place
    whole, cells = sum(row), list[Cell]()
    if width >= height:
        thick, at = whole / height, top
        for area in row:
            cells.append((left, at, thick, area / thick))
            at += area / thick
        return cells, (left + thick, top, width - thick, height)
    thick, at = whole / width, left
    for area in row:
        cells.append((at, top, area / thick, thick))
        at += area / thick
    return cells, (left, top + thick, width, height - thick)
