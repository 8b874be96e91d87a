"""Renders ways to share a model's states, and estimates beside measurements, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardctl.base.amounts import format_file_size, format_memory_size, format_plural
from shardctl.report.grid import render_line, render_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from shardctl.estimate.search.advice import FewestDevices
    from shardctl.estimate.training.calibrate import FittedCalibration
    from shardctl.estimate.training.comparison import ShardingStrategy
    from shardctl.planning.advice import PlanAdvice


def render_comparison(strategies: Sequence[ShardingStrategy]) -> list[RenderableType]:
    """Render what plain data parallelism and each stage of ZeRO leave on a device, and what they send."""
    devices = int(strategies[0].inputs["N"])
    head = f"states of the model on each of {format_plural(devices, 'device')}, with data parallelism only"
    rows = [("", "memory", "reduction", "sent each step", "", "formula")]
    for one in strategies:
        relative = f"{one.relative:.2g}x"
        held, sent = format_memory_size(one.nbytes), format_file_size(one.sent_bytes)
        rows.append((one.name, held, f"{one.reduction:.2f}x", sent, relative, one.formula))
    return [render_line(head, "bold"), render_table(rows, right=frozenset({1, 2, 3, 4}), indent=2)]


def render_advice(counsel: PlanAdvice) -> list[RenderableType]:
    """Render what was tried where it does not fit, and how few devices each type needs."""
    parts: list[RenderableType] = []
    if counsel.advice:
        parts.append(render_line("what would have to change (each tried)", "bold"))
        rows = [(one.verdict, format_memory_size(one.nbytes), one.options, one.change) for one in counsel.advice]
        parts.append(render_table(rows, right=frozenset({1}), indent=2))
    if counsel.types:
        parts.append(render_line(format_fewest_by_type(counsel.types)))
    return parts


def format_fewest_by_type(types: Sequence[FewestDevices]) -> str:
    """Format how few devices each type of the weights needs."""
    if all(one.devices is None for one in types):
        return f"in none of {', '.join(one.dtype for one in types)} is any number of devices enough that was tried"
    return f"by type: {'; '.join(map(_format_fewest, types))}"


def _format_fewest(one: FewestDevices) -> str:
    if one.devices is None or one.candidate is None:
        return f"{one.dtype} fits no number of devices that was tried"
    if one.devices == 1:
        return f"{one.dtype} fits one device"
    return f"{one.dtype} needs {one.devices:,} devices ({one.candidate.mesh})"


def render_calibration(fitted: FittedCalibration) -> list[RenderableType]:
    """Render each measured peak beside what was estimated, before and after."""
    head = (
        f"fitted to {format_plural(len(fitted.lines), 'measured peak')}: activations x {fitted.scale:.3f}, "
        f"overhead {format_memory_size(fitted.overhead)}; worst error {fitted.worst_before:.1%}, now "
        f"{fitted.worst_after:.1%}"
    )
    rows = [("line", "mesh", "counter", "measured", "before", "", "after", "")]
    for one in fitted.lines:
        run = one.measurement
        before, after = f"{one.error_before:+.1%}", f"{one.error_after:+.1%}"
        measured = format_memory_size(run.peak)
        rows.append(
            (
                str(run.line),
                str(run.mesh),
                run.counter,
                measured,
                format_memory_size(one.before),
                before,
                format_memory_size(one.after),
                after,
            )
        )
    return [render_line(head, "bold"), render_table(rows, right=frozenset({0, 3, 4, 5, 6, 7}), indent=2)]
