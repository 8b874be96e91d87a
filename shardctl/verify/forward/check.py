"""Runs the forward pass and gives its verdict: in this process or one for each rank, and with a second opinion."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardctl.verify.finding import CheckFinding
from shardctl.verify.forward.by_processes import compare_by_processes
from shardctl.verify.forward.comparison import ForwardOptions, compare_in_process
from shardctl.verify.forward.result import ForwardResult
from shardctl.verify.forward.second_opinion import add_opinion, ask_second_opinion
from shardctl.verify.processes import NotStartedError, RankError

if TYPE_CHECKING:
    from shardctl.verify.forward.sides import CandidateCheckpoint, OriginalCheckpoint


def compare_forward_passes(
    candidate: CandidateCheckpoint, original: OriginalCheckpoint, options: ForwardOptions | None = None
) -> ForwardResult:
    """Compare what the shards compute with what the source computes, part by part and end to end.

    Raises nothing that says something of the checkpoints: a class that is not there, or weights that cannot be run
    here, are `skipped` with the reason; a rank that lacks its part and values that differ are `failed`.
    """
    options = options or ForwardOptions()
    world = candidate.mesh.world if candidate.mesh is not None and candidate.model is not None else 1
    known = candidate.model is not None and bool(candidate.model.family)
    if known and 1 < world <= options.processes:
        try:
            result = compare_by_processes(candidate, original, options)
        except RankError as error:
            found = CheckFinding(
                "error", "processes", f"{error.message}; {error.hint}" if error.hint else error.message
            )
            engine = f"{world} processes"
            result = ForwardResult("failed", "", engine, options.dtype, options.device, findings=(found,))
        except NotStartedError as error:
            result = compare_in_process(candidate, original, options)
            note = f"all ranks ran in one process: {error.message}"
            result = replace(result, notes=(note, *result.notes))
    else:
        result = compare_in_process(candidate, original, options)
    if options.second_opinion and result.status != "skipped":
        result = add_opinion(result, ask_second_opinion(candidate, original, options))
    return result
