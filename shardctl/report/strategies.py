"""Ways to share a model's states, and an estimate held against measurements, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardctl.amounts import file_size, memory_size, plural
from shardctl.report.grid import line, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from shardctl.memory.advice import Needed
    from shardctl.memory.calibrate import Calibration
    from shardctl.memory.comparison import Strategy
    from shardctl.verbs.advising import Counsel


def comparison(strategies: Sequence[Strategy]) -> list[RenderableType]:
    """What plain data parallelism and each stage of ZeRO leave on a device, and what they send."""
    devices = int(strategies[0].inputs["N"])
    head = f"states of the model on each of {plural(devices, 'device')}, by nothing but data parallelism"
    rows = [("", "memory", "reduction", "sent each step", "", "formula")]
    for one in strategies:
        relative = f"{one.relative:.2g}x"
        held, sent = memory_size(one.nbytes), file_size(one.sent_bytes)
        rows.append((one.name, held, f"{one.reduction:.2f}x", sent, relative, one.formula))
    return [line(head, "bold"), table(rows, right=frozenset({1, 2, 3, 4}), indent=2)]


def advice(counsel: Counsel) -> list[RenderableType]:
    """What was tried where it does not fit, and how few devices each type needs."""
    parts: list[RenderableType] = []
    if counsel.advice:
        parts.append(line("what would have to change (each tried)", "bold"))
        rows = [(one.verdict, memory_size(one.nbytes), one.options, one.change) for one in counsel.advice]
        parts.append(table(rows, right=frozenset({1}), indent=2))
    if counsel.types:
        parts.append(line(by_type(counsel.types)))
    return parts


def by_type(types: Sequence[Needed]) -> str:
    """How few devices each type of the weights needs."""
    if all(one.devices is None for one in types):
        return f"in none of {', '.join(one.dtype for one in types)} is any number of devices enough that was tried"
    return f"by type: {'; '.join(map(_needed, types))}"


def _needed(one: Needed) -> str:
    if one.devices is None or one.candidate is None:
        return f"{one.dtype} fits no number of devices that was tried"
    if one.devices == 1:
        return f"{one.dtype} fits one device"
    return f"{one.dtype} needs {one.devices:,} devices ({one.candidate.mesh})"


def calibration(fitted: Calibration) -> list[RenderableType]:
    """Each measured peak beside what was estimated, before and after."""
    head = (
        f"fitted to {plural(len(fitted.lines), 'measured peak')}: activations x {fitted.scale:.3f}, "
        f"overhead {memory_size(fitted.overhead)}; worst error {fitted.worst_before:.1%}, now {fitted.worst_after:.1%}"
    )
    rows = [("line", "mesh", "measured", "before", "", "after", "")]
    for one in fitted.lines:
        run = one.measurement
        before, after = f"{one.error_before:+.1%}", f"{one.error_after:+.1%}"
        measured = memory_size(run.peak)
        rows.append(
            (str(run.line), str(run.mesh), measured, memory_size(one.before), before, memory_size(one.after), after)
        )
    return [line(head, "bold"), table(rows, right=frozenset({0, 2, 3, 4, 5, 6}), indent=2)]
