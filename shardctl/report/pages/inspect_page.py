"""Shows what `inspect` found as a page: the bytes by module and dtype, files, ties, quantization and values."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.amounts import format_count, format_file_size, format_memory_size
from shardctl.report.inspection import format_statistics, list_inspection_facts
from shardctl.report.pages.amounts_picture import NamedAmount, draw_amounts
from shardctl.report.pages.page import render_page
from shardctl.report.pages.treemap import draw_areas, join_numbered_names, rank_areas

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardctl.verbs.inspect import InspectResult

_LOOKS: Final = ("layer", "expert", "outside")
"""The looks of the dtypes with most bytes; those of all others are one."""
_MAX_ROWS_SHOWN: Final = 400
"""Rows of a table; `--json` has all."""


def render_inspect_page(found: InspectResult, command: Sequence[str]) -> str:
    """Return the whole page as HTML; `command` made it, and is empty where a program did."""
    looks = {share.dtype: look for share, look in zip(found.dtypes, _LOOKS, strict=False)}
    modules = _count_modules(found)
    sizes = Counter({(f"{name} ({dtype})", looks.get(dtype, "other")): each[2] for (name, dtype), each in modules})
    ties = [(tie, tensor.name) for tensor in found.tensors for tie in tensor.ties]
    facts: dict[str, Any] = {
        "title": f"{found.verdict}: {found.path}",
        "found": found,
        "about": list(list_inspection_facts(found)),
        "areas": draw_areas(rank_areas(sizes), label="the tensors by module and dtype") if found.nbytes else None,
        "looks": [
            *looks.items(),
            *([("other types", "other")] if len(found.dtypes) > len(looks) else []),
        ],
        "modules": [
            (
                name,
                dtype,
                f"{tensors:,}",
                format_count(elements),
                format_memory_size(nbytes),
                _format_share(nbytes, found),
            )
            for (name, dtype), (tensors, elements, nbytes) in modules[:_MAX_ROWS_SHOWN]
        ],
        "more_modules": max(len(modules) - _MAX_ROWS_SHOWN, 0),
        "files": draw_amounts(
            [
                NamedAmount(name, size, format_file_size(size))
                for name, size in zip(found.files, found.file_sizes, strict=True)
            ],
            label="weight files by size",
        ),
        "ties": ties[:_MAX_ROWS_SHOWN],
        "more_ties": max(len(ties) - _MAX_ROWS_SHOWN, 0),
        "layers": _list_layer_rows(found),
        "further": _list_next_steps(found),
    }
    return render_page("inspect.html.jinja", facts, command)


def _count_modules(found: InspectResult) -> list[tuple[tuple[str, str], list[int]]]:
    """Count tensors, elements and bytes by name without numbers and dtype, those of most bytes first."""
    counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for tensor in found.tensors:
        elements = 1
        for extent in tensor.shape:
            elements *= extent
        row = counts[join_numbered_names(tensor.name), tensor.dtype]
        for place, amount in enumerate((1, elements, tensor.nbytes)):
            row[place] += amount
    return sorted(counts.items(), key=lambda item: (-item[1][2], item[0]))


def _format_share(nbytes: int, found: InspectResult) -> str:
    return f"{100 * nbytes / found.nbytes:.1f} %" if found.nbytes else ""


def _list_layer_rows(found: InspectResult) -> list[tuple[str, ...]]:
    if found.statistics is None:
        return []
    rows = [(layer.name, *format_statistics(layer.values)) for layer in found.statistics.layers]
    return [("all", *format_statistics(found.statistics.total)), *rows]


def _list_next_steps(found: InspectResult) -> list[tuple[str, str]]:
    """List what to do next, each with a command."""
    path = shlex.quote(found.path)
    if found.hypothetical:
        return [("See what it needs", f"shardctl plan {path} --gpu NAME")]
    steps = [("See what each device will hold", f"shardctl plan {path} --gpu NAME")]
    if found.statistics is None:
        steps.append(("Measure the values", f"shardctl inspect {path} --stats"))
    return [*steps, ("Read every byte", f"shardctl verify {path} --level full")]
