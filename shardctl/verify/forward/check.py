"""Runs the forward pass and gives its verdict: in this process or one for each rank, and with a second opinion."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardctl.verify.finding import Finding
from shardctl.verify.forward.by_processes import forward_by_processes
from shardctl.verify.forward.comparison import ForwardOptions, compared
from shardctl.verify.forward.result import ForwardResult
from shardctl.verify.forward.second_opinion import ask, with_opinion
from shardctl.verify.processes import NotStartedError, RankError

if TYPE_CHECKING:
    from shardctl.verify.forward.sides import Candidate, Original


def forward(candidate: Candidate, original: Original, options: ForwardOptions | None = None) -> ForwardResult:
    """Compare what the shards compute with what the source computes, part by part and end to end.

    Raises nothing that says something of the checkpoints: a class that is not there, or weights that cannot be run
    here, are `skipped` with the reason; a rank that lacks its part and values that differ are `failed`.
    """
    options = options or ForwardOptions()
    world = candidate.mesh.world if candidate.mesh is not None and candidate.model is not None else 1
    if 1 < world <= options.processes:
        try:
            result = forward_by_processes(candidate, original, options)
        except RankError as error:
            found = Finding("error", "processes", f"{error.message}; {error.hint}" if error.hint else error.message)
            engine = f"{world} processes"
            result = ForwardResult("failed", "", engine, options.dtype, options.device, findings=(found,))
        except NotStartedError as error:
            result = compared(candidate, original, options)
            note = f"no process for each rank, all of them in this one: {error.message}"
            result = replace(result, notes=(note, *result.notes))
    else:
        result = compared(candidate, original, options)
    if options.second_opinion and result.status != "skipped":
        result = with_opinion(result, ask(candidate, original, options))
    return result
