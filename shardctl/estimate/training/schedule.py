"""Computes what pipeline schedules hold and waste: microbatches in flight on each stage, and the bubble.

GPipe: Huang et al. 2019; 1F1B and interleaved 1F1B: Narayanan et al. 2021, sec. 2.2; the warm-up of the interleaved
schedule as in Megatron-LM's `megatron/core/pipeline_parallel/schedules.py`, `get_pp_rank_microbatches`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardctl.base.errors import UsageError

if TYPE_CHECKING:
    from shardctl.estimate.workload import Schedule


def count_in_flight(
    stage: int,
    stages: int,
    microbatches: int,
    schedule: Schedule = "1f1b",
    virtual: int = 1,
    *,
    overlapped: bool = False,
) -> float:
    """Count the most microbatches whose activations stage `stage` of `stages` holds at once.

    The unit is one microbatch through all layers of the stage; with `virtual` chunks of a stage, each counts for one
    part of that. One stage alone runs forward and backward in turn.

    Interleaved, stage k runs `2 (p - k - 1) + (v - 1) p` chunks forward before its first backward pass and holds one
    more: on the first stage `p (1 + (p - 1) / (p v))` (Korthikanti et al. 2022, sec. 4.2.3).

    Where the all-to-all of experts is `overlapped` with another microbatch's computation, one more pass forward runs
    before the first backward (`get_pp_rank_microbatches`, `overlap_moe_expert_parallel_comm`).

    >>> [count_in_flight(k, 4, 8) for k in range(4)], count_in_flight(0, 4, 8, "interleaved", 2)
    ([4, 3, 2, 1], 5.5)
    """
    _check_schedule(stages, microbatches, schedule, virtual)
    if not 0 <= stage < stages:
        raise UsageError(f"there is no pipeline stage {stage} among {stages}")
    if stages == 1:
        return min(microbatches, 1 + overlapped)
    if schedule == "gpipe":
        return microbatches
    if schedule == "1f1b":
        return min(microbatches, stages - stage + overlapped)
    warm_up = 2 * (stages - stage - 1) + (virtual - 1) * stages + overlapped
    return min(microbatches * virtual, warm_up + 1) / virtual


def count_losses(stages: int, microbatches: int, schedule: Schedule = "1f1b") -> int:
    """Count the most microbatches whose logits the last stage holds at once.

    But for GPipe, the backward pass of a microbatch follows its last chunk's forward pass.

    >>> count_losses(4, 8, "gpipe"), count_losses(4, 8, "interleaved")
    (8, 1)
    """
    return microbatches if schedule == "gpipe" and stages > 1 else 1


def compute_bubble(stages: int, microbatches: int, schedule: Schedule = "1f1b", virtual: int = 1) -> float:
    """Compute the time a stage waits in one step, as a fraction of the time it works.

    Narayanan et al. 2021, sec. 2.2: `(p - 1) / m`, interleaved `(p - 1) / (v m)`. Stages are taken to need equal time
    and messages none.

    >>> compute_bubble(4, 8), compute_bubble(4, 8, "interleaved", 3)
    (0.375, 0.125)
    """
    _check_schedule(stages, microbatches, schedule, virtual)
    return (stages - 1) / (microbatches * (virtual if schedule == "interleaved" else 1))


def _check_schedule(stages: int, microbatches: int, schedule: Schedule, virtual: int) -> None:
    for name, number in (("stages", stages), ("microbatches", microbatches), ("virtual stages", virtual)):
        if number < 1:
            raise UsageError(f"a pipeline of {number} {name} does nothing")
    if schedule != "interleaved" or stages == 1:
        return
    if virtual == 1:
        raise UsageError("an interleaved schedule needs several model chunks per stage", hint="give --vp 2")
    if microbatches % stages:
        raise UsageError(
            f"an interleaved schedule needs a multiple of {stages} microbatches (the number of "
            f"stages), not {microbatches}",
            hint=f"use --microbatches {-(-microbatches // stages) * stages}",
        )
