"""The formulas of a pipeline's in-flight microbatches and its bubble are what playing the schedule gives."""

from __future__ import annotations

from itertools import groupby

import pytest
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from shardctl.base.errors import UsageError
from shardctl.estimate.training.schedule import compute_bubble, count_in_flight, count_losses

FORWARD, BACKWARD = 1, 2
"""Time of one microbatch through one stage."""


def orders(stages, microbatches, schedule, virtual=1):
    """Of each stage, its work in order: `(forward or backward, microbatch, chunk)`."""
    if schedule == "gpipe":
        both = [(FORWARD, m, 0) for m in range(microbatches)] + [(BACKWARD, m, 0) for m in range(microbatches)]
        return [both] * stages
    turns = [
        (m, chunk)
        for group in range(0, microbatches, stages if virtual > 1 else 1)
        for chunk in range(virtual)
        for m in range(group, min(group + (stages if virtual > 1 else 1), microbatches))
    ]
    forward = [(FORWARD, m, chunk) for m, chunk in turns]
    backward = [(BACKWARD, m, virtual - 1 - chunk) for m, chunk in turns]
    found = []
    for stage in range(stages):
        ahead = stages - stage - 1
        warm = min(len(turns), 2 * ahead + (virtual - 1) * stages if virtual > 1 else ahead)
        steady = [work for pair in zip(forward[warm:], backward, strict=False) for work in pair]
        found.append([*forward[:warm], *steady, *backward[len(turns) - warm :]])
    return found


def play(order, virtual=1):
    """The time all takes, and the most activations that each stage holds, in microbatches of the whole stage."""
    stages, last = len(order), (len(order) - 1, virtual - 1)
    done, clocks, at = {}, [0.0] * stages, [0] * stages

    def needs(stage, kind, m, chunk):
        if kind == FORWARD:
            before = (stage - 1, chunk) if stage else (stages - 1, chunk - 1)
            return None if (stage, chunk) == (0, 0) else (FORWARD, m, *before)
        after = (stage + 1, chunk) if stage < stages - 1 else (0, chunk + 1)
        return (FORWARD, m, *last) if (stage, chunk) == last else (BACKWARD, m, *after)

    while any(i < len(work) for i, work in zip(at, order, strict=True)):
        moved = False
        for stage, work in enumerate(order):
            while at[stage] < len(work):
                kind, m, chunk = work[at[stage]]
                need = needs(stage, kind, m, chunk)
                if need is not None and need not in done:
                    break
                start = max(clocks[stage], done[need] if need else 0)
                clocks[stage] = done[kind, m, stage, chunk] = start + kind / virtual
                at[stage] += 1
                moved = True
        assert moved, "the schedule waits for itself"
    peaks = []
    for work in order:
        live, most = 0, 0
        for kind, _, _ in work:
            live += 1 if kind == FORWARD else -1
            most = max(most, live)
        assert live == 0
        peaks.append(most / virtual)
    return max(clocks), peaks


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 8, 13])
def test_plain_schedules(schedule, stages, microbatches):
    time, peaks = play(orders(stages, microbatches, schedule))
    assert [count_in_flight(k, stages, microbatches, schedule) for k in range(stages)] == peaks
    work = microbatches * (FORWARD + BACKWARD)
    assert (time - work) / work == pytest.approx(compute_bubble(stages, microbatches, schedule))


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("virtual", [2, 3, 4])
def test_interleaved_schedule(stages, rounds, virtual):
    microbatches = rounds * stages
    time, peaks = play(orders(stages, microbatches, "interleaved", virtual), virtual)
    assert [count_in_flight(k, stages, microbatches, "interleaved", virtual) for k in range(stages)] == peaks
    work = microbatches * (FORWARD + BACKWARD)
    assert (time - work) / work == pytest.approx(compute_bubble(stages, microbatches, "interleaved", virtual))


@pytest.mark.parametrize(("schedule", "virtual"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (2, 8), (4, 4), (4, 12)])
def test_the_last_stage_holds_logits(schedule, stages, microbatches, virtual):
    live, most = 0, 0
    for kind, _, chunk in orders(stages, microbatches, schedule, virtual)[-1]:
        if chunk == virtual - 1:
            live += 1 if kind == FORWARD else -1
            most = max(most, live)
    assert count_losses(stages, microbatches, schedule) == most


@pytest.mark.parametrize(("stages", "microbatches", "virtual"), [(2, 4, 2), (4, 8, 2), (4, 4, 3)])
def test_interleaved_schedule_as_torch_orders_it(stages, microbatches, virtual):
    """torch.distributed.pipelining makes the same order of work from Megatron's warm-up count."""

    class Stage:
        has_backward, is_first, is_last, group_size = True, False, False, stages

        def __init__(self, index):
            self.stage_index, self.num_stages, self.group_rank, self.group = index, stages * virtual, 0, None

    chunks = [Stage(chunk * stages) for chunk in range(virtual)]
    chunks[0].is_first = True
    made = ScheduleInterleaved1F1B(chunks, microbatches, loss_fn=lambda *_: None).pipeline_order
    for stage in range(stages):
        live = most = 0
        for action in filter(None, made[stage]):
            live += 1 if action.computation_type.name == "FORWARD" else -1
            most = max(most, live)
        assert most / virtual == count_in_flight(stage, stages, microbatches, "interleaved", virtual)


@pytest.mark.parametrize(("stages", "virtual"), [(2, 2), (4, 3), (8, 2), (16, 6)])
def test_the_first_stage_holds_what_korthikanti_says(stages, virtual):
    """Korthikanti et al. 2022, sec. 4.2.3: interleaving multiplies by `1 + (p - 1) / (p m)`, m the chunks there."""
    plain = count_in_flight(0, stages, 4 * stages)
    assert count_in_flight(0, stages, 4 * stages, "interleaved", virtual) == pytest.approx(
        plain * (1 + (stages - 1) / (stages * virtual))
    )


def test_one_stage_runs_forward_and_backward_in_turn():
    for schedule in ("gpipe", "1f1b", "interleaved"):
        assert count_in_flight(0, 1, 8, schedule) == 1
        assert compute_bubble(1, 8, schedule) == 0


def test_what_no_schedule_does_is_refused():
    with pytest.raises(UsageError, match="needs a multiple of 4 microbatches") as raised:
        count_in_flight(0, 4, 6, "interleaved", 2)
    assert raised.value.hint == "use --microbatches 8"
    with pytest.raises(UsageError, match="several model chunks"):
        compute_bubble(4, 8, "interleaved")
    with pytest.raises(UsageError, match="no pipeline stage 4"):
        count_in_flight(4, 4, 8)
    with pytest.raises(UsageError, match="0 microbatches"):
        compute_bubble(4, 0)


def test_the_oracle_sees_a_schedule_that_waits_for_itself():
    backward_first = [sorted(work, reverse=True) for work in orders(2, 2, "gpipe")]
    assert [kind for kind, _ in groupby(w[0] for w in backward_first[0])] == [BACKWARD, FORWARD]
    with pytest.raises(AssertionError, match="waits for itself"):
        play(backward_first)
