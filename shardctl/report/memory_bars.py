"""Renders an estimate as text: a picture of the mesh, a bar for the heaviest rank per stage, and its terms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.text import Text

from shardctl.base.amounts import format_memory_size
from shardctl.estimate.term import CATEGORIES, Category, sum_terms
from shardctl.report.grid import render_line, render_table
from shardctl.tensors.mesh import build_holding_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import RenderableType

    from shardctl.estimate.model.rank_shards import HeldPart
    from shardctl.estimate.rank_estimate import MeshEstimate, RankEstimate
    from shardctl.tensors.mesh import Mesh

FILLS: Final[dict[Category, tuple[str, str]]] = {
    "weights": ("█", "blue"),
    "gradients": ("▓", "cyan"),
    "optimizer": ("▒", "magenta"),
    "activations": ("░", "yellow"),
    "kv cache": ("▚", "green"),
    "workspace": ("+", "red"),
    "runtime": ("-", "bright_black"),
}
"""A character and a colour for each category; it must read without the colour."""
PICTURED: Final = 64
"""Up to this many ranks the mesh is drawn."""
_MAX_BAR_CHARACTERS: Final = 40
"""Characters of a bar as long as the budget, or as the heaviest rank needs."""
_LEAST_BAR: Final = 12
"""The same on a terminal that has room for no more."""
_COLUMN_GAP_CHARACTERS: Final = 2
"""Columns between those of a table, and before it."""


def render_bars(estimate: MeshEstimate, columns: int | None = None) -> list[RenderableType]:
    """Render a bar for the heaviest rank of each stage, and the legend; shorter if a terminal has few `columns`."""
    full = max([estimate.budget or 0, *(rank.total().nbytes for rank in estimate.distinct)], default=0)
    rows = []
    for rank in list_heaviest_ranks(estimate):
        whole = rank.total()
        share = f"{100 * whole.nbytes / estimate.budget:.0f} %" if estimate.budget else ""
        limit = f"/ {format_memory_size(estimate.budget)}" if estimate.budget else ""
        name = f"rank {rank.holding.rank}" + (f" ({rank.holding.label})" if rank.holding.label != "only" else "")
        rows.append((name, rank, format_memory_size(whole.nbytes), limit, share))
    beside = (
        sum(max(len(str(row[n])) for row in rows) + _COLUMN_GAP_CHARACTERS for n in (0, 2, 3, 4))
        + _COLUMN_GAP_CHARACTERS
    )
    long = _MAX_BAR_CHARACTERS if columns is None else max(_LEAST_BAR, min(_MAX_BAR_CHARACTERS, columns - beside))
    bars = [_render_bar(rank, full, estimate.budget, long) for _, rank, *_ in rows]
    drawn = [(name, bar, *rest) for bar, (name, _, *rest) in zip(bars, rows, strict=True)]
    every = (term for rank in estimate.distinct for term in rank.terms)
    needed = {term.category for term in every if term.nbytes and term.tier == "device"}
    seen = {c for c in CATEGORIES if any(FILLS[c][0] in bar.plain for bar in bars)}
    legend = "  ".join(f"{FILLS[c][0]} {c}" for c in CATEGORIES if c in seen)
    small = ", ".join(c for c in CATEGORIES if c in needed - seen)
    legend += f"  (too small to draw: {small})" if small else ""
    return [render_table(drawn, right=frozenset({2}), indent=2), render_line(f"  {legend}", "dim")]


def list_heaviest_ranks(estimate: MeshEstimate) -> list[RankEstimate]:
    """List the rank of each stage that needs most."""
    stages: dict[int, RankEstimate] = {}
    for rank in estimate.distinct:
        known = stages.get(rank.holding.stage)
        if known is None or rank.total().nbytes > known.total().nbytes:
            stages[rank.holding.stage] = rank
    return [stages[stage] for stage in sorted(stages)]


def _render_bar(rank: RankEstimate, full: int, budget: int | None, long: int) -> Text:
    """Render `long` characters for `full` bytes; each category is rounded where it ends, so that the whole is right."""
    bar, ends = Text(), 0
    place = 0
    for category in CATEGORIES:
        ends += sum_terms(rank.terms, category=category).nbytes
        until = round(long * ends / full) if full else 0
        fill, colour = FILLS[category]
        bar.append(fill * (until - place), style=colour)
        place = max(place, until)
    limit = round(long * budget / full) if budget and full else long
    bar.append("·" * max(limit - place, 0), style="dim")
    if limit < place:  # beyond the budget: the bar is broken where the device ends
        return Text.assemble(bar[:limit], ("│", "bold red"), bar[limit:])
    return bar


def render_mesh_picture(mesh: Mesh, estimate: MeshEstimate, columns: int | None = None) -> list[RenderableType]:
    """Render the mesh, one line of ranks for each outer coordinate, with what each rank needs.

    On a terminal of so many `columns` a line goes on in the next where it has no room for all its ranks. Nothing is
    drawn where all ranks of a stage need the same: the bars of the stages say it.
    """
    if not 1 < mesh.world <= PICTURED:
        return []
    needs = {build_holding_key(r.holding.coordinate): r.total().nbytes for r in estimate.ranks}
    by_stage = {(rank.holding.stage, rank.total().nbytes) for rank in estimate.ranks}
    if len(by_stage) == len({stage for stage, _ in by_stage}):
        return []
    inner = next((name for name, degree in reversed(mesh.axes) if degree > 1), "tp")
    width = mesh.degree(inner)
    rows = []
    for first in range(0, mesh.world, width):
        cells = []
        for rank in range(first, first + width):
            at = mesh.coordinate(rank)
            cells.append(f"[{rank:>3} {format_memory_size(needs[build_holding_key(at)]):>9}]")
        at = mesh.coordinate(first)
        rows.append(
            (" ".join(f"{name}{at[name]}" for name, degree in mesh.axes if degree > 1 and name != inner), cells)
        )
    most = width
    if columns is not None:
        taken = max(len(name) for name, _ in rows) + 2 * _COLUMN_GAP_CHARACTERS
        most = min(
            width,
            max(1, (columns - taken) // max(len(cell) + _COLUMN_GAP_CHARACTERS for _, cells in rows for cell in cells)),
        )
        most = next((even for even in range(most, most // 2, -1) if width % even == 0), most)
    folded = [
        ("" if start else name, *cells[start : start + most]) for name, cells in rows for start in range(0, width, most)
    ]
    return [render_table(folded, indent=2)]


def render_terms(rank: RankEstimate) -> RenderableType:
    """Render every addend of one rank, with its formula, its inputs and its source."""
    rows: list[Sequence[object]] = [("term", "bytes", "", "formula, with inputs and source")]
    for term in rank.terms:
        if not term.high:
            continue
        sure = "exact" if term.exact else f"{format_memory_size(term.low)} to {format_memory_size(term.high)}"
        where = f" on {term.tier}" if term.tier != "device" else ""
        rows.append(
            (
                term.name + where,
                format_memory_size(term.nbytes),
                sure,
                _format_explanation(term.formula, term.inputs.items()),
            )
        )
        if term.source:
            rows.append(("", "", "", render_line(term.source, "dim")))
    return render_table(rows, right=frozenset({1}), indent=2)


def _format_explanation(formula: str, inputs: Iterable[tuple[str, float | str]]) -> str:
    given = ", ".join(f"{name} = {format_number(value)}" for name, value in inputs)
    return f"{formula}; {given}" if formula and given else formula or given or "from headers"


def format_number(value: float | str) -> str:
    """Format the value of a symbol; counts that were reckoned with as floats are shown as counts.

    >>> format_number(2147483648.0), format_number(0.5), format_number(5.5), format_number("tp")
    ('2,147,483,648', '0.5', '5.5', 'tp')
    """
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"


def render_kinds(rank: RankEstimate) -> RenderableType:
    """Render every kind of tensor that one rank holds a part of, layers taken together: exact, from headers."""
    groups: dict[tuple[object, ...], list[HeldPart]] = {}
    for part in rank.holding.parts:
        kind = part.kind
        groups.setdefault((kind.shape, kind.dtype, kind.spec.cuts, kind.spec.member, part.elements), []).append(part)
    rows: list[Sequence[object]] = [("tensors", "first of them", "dtype", "whole", "held of each", "bytes")]
    for parts in groups.values():
        kind, number = parts[0].kind, sum(part.count for part in parts)
        shape = " x ".join(map(str, kind.shape)) or "scalar"
        held = f"{parts[0].elements:,} elements"
        rows.append(
            (number, kind.example, kind.dtype.name, shape, held, format_memory_size(sum(p.nbytes for p in parts)))
        )
    return render_table(rows, right=frozenset({0, 4, 5}), indent=2)
