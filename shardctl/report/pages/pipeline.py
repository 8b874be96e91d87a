"""Simulates a pipeline schedule pass by pass, and draws when each stage works and when it waits.

Passes of all stages take equal time, a backward pass twice that of a forward pass, and messages none, as in
Narayanan et al. 2021, sec. 2.2; the order of interleaved passes is that of Megatron-LM's
`megatron/core/pipeline_parallel/schedules.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.value import value_class
from shardctl.report.pages.svg import draw_box, draw_frame, draw_picture, draw_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from markupsafe import Markup

    from shardctl.estimate.workload import Schedule

_ROW_HEIGHT_PIXELS: Final = 26
_STAGE_COLUMN_PERCENT: Final = 6.0
"""Percent of the width for the names of stages."""
_MAX_PASSES_DRAWN: Final = 3000
"""Passes of a picture; a page with more of them would be slow."""
_MIN_LABEL_WIDTH_PERCENT: Final = 2.4
"""Percent of the width from which a pass has its number."""
_BACKWARD_FORWARD_TIME_RATIO: Final = 2.0
"""The time of a backward pass in that of a forward pass."""


@value_class
class PipelinePass:
    """One pass of a microbatch through a chunk of a stage."""

    stage: int
    microbatch: int
    chunk: int
    backward: bool
    start: float
    end: float


@value_class
class _Step:
    microbatch: int
    chunk: int
    backward: bool


def simulate_pipeline(stages: int, microbatches: int, schedule: Schedule, virtual: int = 1) -> list[PipelinePass]:
    """Simulate one optimizer step; the unit of time is one microbatch's forward pass through a stage.

    >>> passes = simulate_pipeline(4, 8, "1f1b")
    >>> max(one.end for one in passes) / (8 * 3) - 1  # what `compute_bubble` says
    0.375
    """
    chunks = virtual if schedule == "interleaved" and stages > 1 else 1
    orders = [_list_steps(stage, stages, microbatches, schedule, chunks) for stage in range(stages)]
    done: dict[tuple[int, _Step], float] = {}
    free, turns, passes = [0.0] * stages, [0] * stages, list[PipelinePass]()
    while any(turn < len(order) for turn, order in zip(turns, orders, strict=True)):
        before = len(passes)
        for stage, order in enumerate(orders):
            while turns[stage] < len(order):
                step = order[turns[stage]]
                needed = _find_input(stage, step, stages, chunks)
                if needed is not None and needed not in done:
                    break
                start = max(free[stage], done[needed] if needed is not None else 0.0)
                free[stage] = start + (_BACKWARD_FORWARD_TIME_RATIO if step.backward else 1.0) / chunks
                done[stage, step] = free[stage]
                passes.append(PipelinePass(stage, step.microbatch, step.chunk, step.backward, start, free[stage]))
                turns[stage] += 1
        if len(passes) == before:
            raise RuntimeError(f"a pipeline of {stages} stages waits for itself")
    return passes


def _list_steps(stage: int, stages: int, microbatches: int, schedule: Schedule, chunks: int) -> list[_Step]:
    """List the passes of a stage in their order: a warm-up, one forward and one backward in turn, and the rest."""
    total = microbatches * chunks
    forward = [_number_step(n, stages, chunks, backward=False) for n in range(total)]
    backward = [_number_step(n, stages, chunks, backward=True) for n in range(total)]
    warm_up = total
    if schedule != "gpipe":
        ahead = stages - stage - 1
        warm_up = min(total, ahead if chunks == 1 else 2 * ahead + (chunks - 1) * stages)
    steps = forward[:warm_up]
    for ahead_step, behind_step in zip(forward[warm_up:], backward, strict=False):
        steps += [ahead_step, behind_step]
    return steps + backward[total - warm_up :]


def _number_step(number: int, stages: int, chunks: int, *, backward: bool) -> _Step:
    """Return the pass of that number: a group of as many microbatches as there are stages goes through each chunk."""
    if chunks == 1:
        return _Step(number, 0, backward)
    group, inside = divmod(number, stages * chunks)
    chunk = inside // stages
    return _Step(group * stages + inside % stages, chunks - 1 - chunk if backward else chunk, backward)


def _find_input(stage: int, step: _Step, stages: int, chunks: int) -> tuple[int, _Step] | None:
    """Find what a pass waits for; None for the first of all."""
    if not step.backward:
        if stage:
            return stage - 1, step
        return (stages - 1, _Step(step.microbatch, step.chunk - 1, False)) if step.chunk else None
    if stage < stages - 1:
        return stage + 1, step
    if step.chunk < chunks - 1:
        return 0, _Step(step.microbatch, step.chunk + 1, True)
    return stage, _Step(step.microbatch, step.chunk, False)


def draw_pipeline(stages: int, microbatches: int, schedule: Schedule, virtual: int = 1) -> Markup | None:
    """Draw one step, a row for each stage; None for more passes than a page should have."""
    if 2 * stages * microbatches * virtual > _MAX_PASSES_DRAWN:
        return None
    passes = simulate_pipeline(stages, microbatches, schedule, virtual)
    end = max(one.end for one in passes)
    parts: list[str] = []
    for stage in range(stages):
        top = stage * _ROW_HEIGHT_PIXELS
        parts.append(draw_text(_STAGE_COLUMN_PERCENT - 1, top + 17, str(stage), look="name", anchor="end"))
        parts.append(
            draw_box(_STAGE_COLUMN_PERCENT, top + 2, 100 - _STAGE_COLUMN_PERCENT, _ROW_HEIGHT_PIXELS - 4, look="waits")
        )
    parts += [part for one in passes for part in _draw_pass(one, end)]
    label = f"{schedule} schedule of {stages} stages and {microbatches} microbatches: when each stage works and waits"
    return draw_picture(parts, height=stages * _ROW_HEIGHT_PIXELS, label=label)


def _draw_pass(one: PipelinePass, end: float) -> Sequence[str]:
    scale = (100 - _STAGE_COLUMN_PERCENT) / end
    left, width, top = (
        _STAGE_COLUMN_PERCENT + one.start * scale,
        (one.end - one.start) * scale,
        one.stage * _ROW_HEIGHT_PIXELS + 2,
    )
    what = f"{'backward' if one.backward else 'forward'} pass of microbatch {one.microbatch}"
    look = f"{'backward' if one.backward else 'forward'} chunk{one.chunk % 2}"
    box = draw_box(
        left, top, width, _ROW_HEIGHT_PIXELS - 4, look=look, title=f"stage {one.stage}, chunk {one.chunk}: {what}"
    )
    if width < _MIN_LABEL_WIDTH_PERCENT:
        return [box]
    return [
        box,
        draw_frame(left, top, width, _ROW_HEIGHT_PIXELS - 4, [draw_text(50, 15, str(one.microbatch), anchor="middle")]),
    ]
