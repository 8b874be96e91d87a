"""Runs the forward pass and gives its verdict: in this process or one for each rank, and with a second opinion."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardctl.base.errors import MachineError, Mismatch, SourceError
from shardctl.running.forward.by_processes import compare_by_processes
from shardctl.running.forward.comparison import ForwardOptions, compare_in_process
from shardctl.running.forward.second_opinion import add_opinion, ask_second_opinion
from shardctl.running.machine_failure import tell_machine_errors
from shardctl.running.processes import NotStartedError, RankError
from shardctl.verify.finding import CheckFinding
from shardctl.verify.forward_result import ForwardResult

if TYPE_CHECKING:
    from shardctl.running.forward.compared_checkpoints import CandidateCheckpoint, OriginalCheckpoint


def compare_forward_passes(
    candidate: CandidateCheckpoint, original: OriginalCheckpoint, options: ForwardOptions | None = None
) -> ForwardResult:
    """Compare what the shards compute with what the source computes, part by part and end to end.

    What says something of the checkpoints is in the result: a class that is not there, or weights that cannot be run
    here, are `skipped` with the reason; a rank that lacks its part and values that differ are `failed`. Raises
    MachineError for a machine that lacks memory, a device that fails, and a rank that dies or hangs.
    """
    options = options or ForwardOptions()
    with tell_machine_errors(options.device):
        result = _compare_passes(candidate, original, options)
    if options.second_opinion and result.status != "skipped":
        result = add_opinion(result, ask_second_opinion(candidate, original, options))
    return result


def runs_in_processes(candidate: CandidateCheckpoint, options: ForwardOptions) -> bool:
    """Return whether each rank is to have a process of its own."""
    known = candidate.model is not None and bool(candidate.model.family)
    return known and candidate.mesh is not None and 1 < candidate.mesh.world <= options.processes


def _compare_passes(
    candidate: CandidateCheckpoint, original: OriginalCheckpoint, options: ForwardOptions
) -> ForwardResult:
    if not runs_in_processes(candidate, options):
        return compare_in_process(candidate, original, options)
    try:
        return compare_by_processes(candidate, original, options)
    except RankError as error:
        if error.exit_code == MachineError.exit_code:
            message = error.message.replace(f" raised {MachineError.__name__}:", ":")
            raise MachineError(message, hint=error.hint) from error
        if error.exit_code not in {SourceError.exit_code, Mismatch.exit_code}:
            raise
        message = f"{error.message}; {error.hint}" if error.hint else error.message
        found = CheckFinding("error", "processes", message)
        engine = f"processes ({candidate.mesh})"
        return ForwardResult("failed", "", engine, None, options.dtype, options.device, findings=(found,))
    except NotStartedError as error:
        result = compare_in_process(candidate, original, options)
        note = f"all ranks ran in one process: {error.message}"
        return replace(result, notes=(note, *result.notes))
