"""What `plan` says, as one self-contained HTML page: no script, no network, readable on paper."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from shardctl import __version__
from shardctl.amounts import count, file_size, memory_size, plural
from shardctl.memory.term import CATEGORIES, Category, total
from shardctl.mesh import HOLDING
from shardctl.report.memory_bars import heaviest, number
from shardctl.report.planning import beyond, moved, room, verdict, workload
from shardctl.report.search_table import row
from shardctl.report.strategies import by_type
from shardctl.report.visible import visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardctl.memory.estimate import Estimate, RankEstimate
    from shardctl.memory.term import Term
    from shardctl.verbs.plan import Planned

_COLOURS: Final[dict[Category, str]] = {
    "weights": "#3b6fb6",
    "gradients": "#4aa5b5",
    "optimizer": "#8a5fb0",
    "activations": "#d9a441",
    "kv cache": "#5a9e58",
    "workspace": "#c45b4d",
    "runtime": "#8c8c8c",
}
_DRAWN: Final = 512
"""Ranks in the picture of the mesh; beyond, one line says how many more there are."""
_WIDE: Final = 16
"""Ranks of one line of it."""
_STYLE: Final = """
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem;border-bottom:1px solid #ddd}
table{border-collapse:collapse;width:100%}td,th{padding:.25rem .6rem;text-align:left;vertical-align:top}
th{font-weight:600;border-bottom:1px solid #bbb}tr:nth-child(even) td{background:#f7f7f7}
.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}.dim{color:#666;font-size:.87em}
.yes{color:#276b2d;font-weight:600}.no{color:#a32018;font-weight:600}
.bar{position:relative;display:flex;height:1.6rem;background:#eee;margin:.15rem 0 .6rem}
.bar span{display:block;height:100%}.limit{position:absolute;top:-3px;bottom:-3px;width:2px;background:#a32018}
.key{display:inline-block;width:.8rem;height:.8rem;margin:0 .3rem 0 1rem;vertical-align:-1px}
.mesh{display:grid;gap:3px}.mesh div{border:1px solid #ccc;padding:.15rem .3rem;font-size:.78em;text-align:center}
code{font-size:.92em}@media print{body{margin:0;max-width:none}}
"""


def page(planned: Planned) -> str:
    """The whole page."""
    title = f"{planned.architecture or 'checkpoint'} on {planned.mesh}"
    parts = [
        *_head(planned),
        *_memory(planned),
        *_mesh(planned),
        *_changes(planned),
        *_strategies(planned),
        *_alternatives(planned),
        *_formulas(planned),
        *_conversion(planned),
    ]
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n"
        f'<p class="dim">shardctl {__version__}. Exact numbers are counted from headers; modelled ones carry the '
        "interval to be expected.</p>\n</body></html>\n"
    )


def _head(planned: Planned) -> Iterator[str]:
    seen = planned.forecast
    yield f"<h1>{_text(planned.path)}</h1>"
    facts = [planned.architecture, f"{count(planned.parameters)} parameters", memory_size(planned.weight_bytes)]
    world = planned.mesh.world
    facts.append(f"{planned.mesh} = {plural(world, 'rank')}" if world > 1 else "one device")
    yield f"<p>{_text(' · '.join(filter(None, facts)))}</p>"
    if seen.work is None:
        if seen.device is not None:
            yield _verdict(planned)
        yield f"<p>Memory besides weights is not modelled: {_text(seen.unmodelled)}</p>"
        return
    yield f"<p>{_text(workload(planned) + beyond(seen))}</p>"
    if seen.device is not None and (text := room(seen)):
        yield f"<p>{_text(text)}</p>"
    yield _verdict(planned)
    for text in moved(seen):
        yield f"<p>{_text(text)}</p>"
    if seen.estimate.partial:
        yield f"<p>Activations are not modelled: {_text(seen.unmodelled)}</p>"


def _verdict(planned: Planned) -> str:
    style = {True: "yes", False: "no", None: ""}[planned.forecast.estimate.fits]
    return f'<p class="{style}">{_text(verdict(planned))}</p>'


def _memory(planned: Planned) -> Iterator[str]:
    estimate = planned.forecast.estimate
    yield "<h2>Memory of each stage and group of ranks</h2>"
    shown = [c for c in CATEGORIES if any(total(r.terms, category=c).nbytes for r in estimate.distinct)]
    keys = "".join(f'<span class="key" style="background:{_COLOURS[c]}"></span>{c}' for c in shown)
    yield f'<p class="dim">{keys}</p>'
    full = max([estimate.budget or 0, *(rank.total().high for rank in estimate.distinct)], default=0) or 1
    for ranks in _groups(estimate):
        first, whole = ranks[0], ranks[0].total()
        held = sum(rank.holding.ranks for rank in ranks)
        layers = first.holding.layers
        what = f"layers {layers.start}-{layers.stop - 1}" if len(layers) > 1 else f"layer {layers.start}"
        who = f"stage {first.holding.stage}, {what if layers else 'no layers'}: {plural(held, 'rank')}"
        yield f"<div>{_text(who)}, from rank {first.holding.rank} ({_text(first.holding.label)}) on</div>"
        spans = "".join(_span(first, category, full) for category in shown)
        limit = f'<i class="limit" style="left:{100 * estimate.budget / full:.2f}%"></i>' if estimate.budget else ""
        yield f'<div class="bar">{spans}{limit}</div>'
        sure = "exact" if whole.exact else f"{memory_size(whole.low)} to {memory_size(whole.high)}"
        yield f'<div class="dim">{memory_size(whole.nbytes)} ({sure})</div>'


def _groups(estimate: Estimate) -> list[list[RankEstimate]]:
    """Ranks of one stage that need the same of everything."""
    groups: dict[tuple[object, ...], list[RankEstimate]] = {}
    for rank in estimate.ranks:
        key = (rank.holding.stage, *((term.name, term.nbytes) for term in rank.terms))
        groups.setdefault(key, []).append(rank)
    return list(groups.values())


def _span(rank: RankEstimate, category: Category, full: int) -> str:
    nbytes = total(rank.terms, category=category).nbytes
    note = f"{category}: {memory_size(nbytes)}"
    return f'<span style="width:{100 * nbytes / full:.2f}%;background:{_COLOURS[category]}" title="{note}"></span>'


def _mesh(planned: Planned) -> Iterator[str]:
    mesh = planned.mesh
    if mesh.world == 1:
        return
    yield f"<h2>The mesh: {_text(str(mesh))}</h2>"
    needs = {tuple(r.holding.coordinate[a] for a in HOLDING): r.total() for r in planned.forecast.estimate.ranks}
    inner = next((degree for _, degree in reversed(mesh.axes) if degree > 1), 1)
    yield f'<div class="mesh" style="grid-template-columns:repeat({min(inner, _WIDE)},1fr)">'
    for rank in range(min(mesh.world, _DRAWN)):
        at = mesh.coordinate(rank)
        need = needs[tuple(at[a] for a in HOLDING)]
        yield f"<div>{rank}<br>{_text(mesh.label(rank))}<br>{memory_size(need.nbytes)}</div>"
    yield "</div>"
    if mesh.world > _DRAWN:
        yield f'<p class="dim">and {mesh.world - _DRAWN:,} more ranks</p>'


def _changes(planned: Planned) -> Iterator[str]:
    if not planned.counsel.advice:
        return
    yield "<h2>What would have to change</h2>"
    rows = (
        (one.verdict, memory_size(one.nbytes), f"<code>{_text(one.options)}</code>", one.change)
        for one in planned.counsel.advice
    )
    yield from _table(("each was tried", "the heaviest rank", "option", "change"), rows)
    if planned.counsel.types:
        yield f"<p>{_text(by_type(planned.counsel.types))}</p>"


def _strategies(planned: Planned) -> Iterator[str]:
    strategies = planned.forecast.strategies
    if not strategies:
        return
    devices = plural(int(strategies[0].inputs["N"]), "device")
    yield f"<h2>States of the model on each of {devices}, by nothing but data parallelism</h2>"
    rows = (
        (one.name, memory_size(one.nbytes), f"{one.reduction:.2f}", file_size(one.sent_bytes), _text(one.formula))
        for one in strategies
    )
    yield from _table(("strategy", "memory", "times less", "sent each step", "formula"), rows)
    yield f'<p class="dim">{_text(strategies[0].source)}</p>'


def _alternatives(planned: Planned) -> Iterator[str]:
    if planned.explored is None:
        return
    found = planned.explored.found
    yield f"<h2>Alternatives on {plural(found.devices, 'device')}, the cheapest first: {len(found.ranked):,}</h2>"
    head = ("mesh", "memory", "to spare", "time of a step or token", "device-seconds per token", "of which")
    yield from _table(head, (map(_text, row(one)) for one in found.ranked))
    yield f"<h2>Not possible, or too large: {len(found.rejected):,}</h2>"
    yield from _table(("mesh", "why not"), ((_text(one.what), _text(one.reason)) for one in found.rejected))


def _formulas(planned: Planned) -> Iterator[str]:
    yield "<h2>Every term of the heaviest rank of each stage</h2>"
    for rank in heaviest(planned.forecast.estimate):
        yield f"<p>rank {rank.holding.rank} ({_text(rank.holding.label)}), stage {rank.holding.stage}</p>"
        rows = (_term(term) for term in rank.terms)
        yield from _table(("term", "bytes", "how sure", "formula and inputs", "source"), rows)


def _term(term: Term) -> tuple[str, ...]:
    given = ", ".join(f"{name} = {number(value)}" for name, value in term.inputs.items())
    sure = "exact" if term.exact else f"{memory_size(term.low)} to {memory_size(term.high)}"
    name = term.name if term.tier == "device" else f"{term.name} on {term.tier}"
    formula = "; ".join(filter(None, (term.formula, given))) or "from headers"
    return _text(name), f"{term.nbytes:,}", sure, f"<code>{_text(formula)}</code>", _text(term.source)


def _conversion(planned: Planned) -> Iterator[str]:
    cost = planned.conversion
    if cost is None:
        return
    yield "<h2>The conversion</h2>"
    yield (
        f"<p>read {file_size(cost.read_bytes)}, write {file_size(cost.write_bytes)} in {plural(cost.files, 'file')}, "
        f"peak host memory {memory_size(cost.peak_memory_bytes)}</p>"
    )


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """A table; a cell that begins with a digit is aligned to the right, and cells are HTML already."""
    yield "<table><tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>"
    for line in rows:
        cells = (f'<td class="n">{cell}</td>' if cell[:1].isdigit() else f"<td>{cell}</td>" for cell in line)
        yield "<tr>" + "".join(cells) + "</tr>"
    yield "</table>"


def _text(text: str) -> str:
    """Text that is neither markup nor a control character, whatever a file's name is."""
    return escape(visible(text))
