"""Checks that the model in the shards computes what the source computes.

`forward(candidate, original, options)` gives a `ForwardResult` and speaks of checkpoints that are open already:

    with opened(path, reading) as shards, opened(against, reading) as source:
        record = shards.record
        result = forward(
            Candidate(shards.manifest, shards.source, shards.model, record.mesh, record.stages),  # no record: leave out
            Original(source.stored, source.manifest, source.source, source.config, source.model, source.source.folder),
            ForwardOptions(dtype="fp32", device="cpu", prompt="", tokens=16, processes=4),
        )

With `processes=N`, meshes of up to N ranks run with one process per rank, else all ranks run in this one; the result's
`engine` says which; where the system starts no processes, that is noted. A rank whose files cannot be read makes the
result `failed` with a finding that names it; one that dies or hangs, or a machine without memory, raises MachineError.
With `second_opinion=True`, `result.opinion` says what transformers' own tensor parallelism makes of the shards.

`lens(manifest, source, model=None)` is the lazy state dict that `from_pretrained(None, config=..., state_dict=...)`
takes. torch and transformers are imported only by calls.
"""

from __future__ import annotations

from shardctl.running.forward.by_processes import choose_process_count
from shardctl.running.forward.check import compare_forward_passes, runs_in_processes
from shardctl.running.forward.compared_checkpoints import CandidateCheckpoint, OriginalCheckpoint
from shardctl.running.forward.comparison import ForwardOptions
from shardctl.running.forward.lazy_state_dict import (
    FusedTensor,
    LazyStateDict,
    LazyTensor,
    StoredTensor,
    build_lazy_state_dict,
)
from shardctl.verify.forward_result import BlockError, ForwardResult, GeneratedTexts, PromptContinuation, SecondOpinion
from shardctl.verify.tolerance import DistanceTolerance

__all__ = [
    "BlockError",
    "CandidateCheckpoint",
    "DistanceTolerance",
    "ForwardOptions",
    "ForwardResult",
    "FusedTensor",
    "GeneratedTexts",
    "LazyStateDict",
    "LazyTensor",
    "OriginalCheckpoint",
    "PromptContinuation",
    "SecondOpinion",
    "StoredTensor",
    "build_lazy_state_dict",
    "choose_process_count",
    "compare_forward_passes",
    "runs_in_processes",
]
