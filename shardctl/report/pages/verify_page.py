"""Shows what `verify` found as a page: the verdict, each level, where the findings are, and what was not looked at."""

from __future__ import annotations

import shlex
from collections import Counter
from typing import TYPE_CHECKING, Final

from shardctl.base.amounts import format_duration, format_file_size, format_memory_size, format_plural
from shardctl.report.pages.amounts_picture import NamedAmount, draw_amounts
from shardctl.report.pages.page import render_page
from shardctl.report.pages.svg import draw_box, draw_frame, draw_picture, draw_text
from shardctl.report.verification import build_engine_rows, build_forward_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from markupsafe import Markup

    from shardctl.verify.level import LevelResult, VerifyResult

_MAX_FINDINGS_SHOWN: Final = 1000
"""Findings of a page; one with more could not be read, and `--json` has them all."""
_PICTURE_HEIGHT_PIXELS: Final = 54


def render_verify_page(verified: VerifyResult, command: Sequence[str]) -> str:
    """Return the whole page as HTML; `command` made it."""
    facts = {
        "title": f"{verified.verdict}: {verified.path}",
        "verified": verified,
        "verdict": verified.verdict,
        "levels": draw_levels(verified.levels),
        "rows": [_build_level_row(level) for level in verified.levels],
        "notes": [f"{level.name}: {note}" for level in verified.levels for note in level.notes],
        "ran": [(level.name, *row) for level in verified.levels for row in _list_run_rows(level)],
        "files": draw_amounts(_count_by_file(verified), label="findings by file"),
        "findings": verified.findings[:_MAX_FINDINGS_SHOWN],
        "more": max(len(verified.findings) - _MAX_FINDINGS_SHOWN, 0),
        "loaded": draw_amounts(_list_loaded(verified), label="memory of each rank that was loaded"),
        "further": _list_next_steps(verified),
    }
    return render_page("verify.html.jinja", facts, command)


def draw_levels(levels: Sequence[LevelResult]) -> Markup | None:
    """Draw the levels in their order, each with its outcome; None where there are none."""
    if not levels:
        return None
    width = 100 / len(levels)
    parts: list[str] = []
    for number, level in enumerate(levels):
        place = number * width, 0, width, _PICTURE_HEIGHT_PIXELS
        about = f"{level.name}: {level.status}" + (f": {level.reason}" if level.reason else "")
        parts.append(draw_box(*place, look=f"area {level.status}", title=about))
        words = [draw_text(50, 23, level.name, anchor="middle", look="area-name")]
        words.append(draw_text(50, 41, level.status, anchor="middle", look="area-size"))
        parts.append(draw_frame(*place, words))
    label = ", ".join(f"{level.name} {level.status}" for level in levels)
    return draw_picture(parts, height=_PICTURE_HEIGHT_PIXELS, label=f"the levels of checks: {label}")


def _build_level_row(level: LevelResult) -> tuple[str, ...]:
    return (
        level.name,
        f"{level.status}: {level.reason}" if level.reason else level.status,
        f"{level.tensors:,}",
        format_file_size(level.nbytes),
        format_duration(level.seconds),
        f"{len(level.findings):,}",
    )


def _list_run_rows(level: LevelResult) -> list[tuple[str, str]]:
    """List what a level that runs the model says besides its outcome."""
    rows = build_forward_rows(level.forward) if level.forward is not None else []
    rows += build_engine_rows(level.engine) if level.engine is not None else []
    return rows + ([("reader", line) for line in level.library.describe()] if level.library is not None else [])


def _count_by_file(verified: VerifyResult) -> list[NamedAmount]:
    counts = Counter(one.file or "no one file" for one in verified.findings)
    return [
        NamedAmount(name, count, format_plural(count, "finding"), "failed-bar") for name, count in counts.most_common()
    ]


def _list_loaded(verified: VerifyResult) -> list[NamedAmount]:
    rows = []
    for loaded in (one for level in verified.levels for one in level.ranks):
        planned = f", planned {format_memory_size(loaded.planned_bytes)}" if loaded.planned_bytes is not None else ""
        name = "the checkpoint" if loaded.rank is None else f"rank {loaded.rank} ({loaded.label})"
        text = f"peak {format_memory_size(loaded.peak_bytes)}{planned}, on {loaded.device}"
        rows.append(NamedAmount(name, loaded.peak_bytes, text))
    return rows


def _list_next_steps(verified: VerifyResult) -> list[tuple[str, str]]:
    """List what to do next, each with a command."""
    path = shlex.quote(verified.path)
    names = {level.name for level in verified.levels}
    if verified.error or verified.findings:
        source = shlex.quote(verified.against) if verified.against else "SRC"
        return [("See every tensor that differs from the source", f"shardctl diff {path} {source}")]
    if "content" not in names:
        return [("Read every byte", f"shardctl verify {path} --level full")]
    if not verified.against:
        return [("Compare it with its source", f"shardctl verify {path} --level full --against SRC")]
    if "load" not in names:
        return [("Load every rank", f"shardctl verify {path} --load cpu --against {shlex.quote(verified.against)}")]
    return []
