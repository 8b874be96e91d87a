"""Runs the forward pass and gives its verdict: in this process or one for each rank, and with a second opinion."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import CoverageError, MachineError, Mismatch, SourceError, UnsupportedError, format_first_few
from shardctl.running.device import has_cuda_device, measure_host_memory
from shardctl.running.forward.by_processes import attach_readers, compare_by_processes, detach_readers
from shardctl.running.forward.comparison import ForwardComparison, ForwardOptions, compare_in_process
from shardctl.running.forward.lazy_state_dict import LazyStateDict
from shardctl.running.forward.shards import CheckpointShards
from shardctl.running.forward.verdict import select_output
from shardctl.running.machine_failure import tell_machine_errors
from shardctl.running.processes import NotStartedError, RankError, run_ranks
from shardctl.running.worker_process import build_environment
from shardctl.verify.finding import CheckFinding
from shardctl.verify.forward_result import ForwardResult, SecondOpinion
from shardctl.verify.tolerance import measure_distance
from shardctl.verify.transformers_classes import build_config, get_model_class, list_versions, silence_transformers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.running.forward.compared_checkpoints import CandidateCheckpoint, OriginalCheckpoint
    from shardctl.running.processes import Start
    from shardctl.running.worker_process import RankProcess

_Torch = Any
_MEMORY_SHARE_DIVISOR: Final = 2
"""The weights in fp32 may take one part in so many of the memory that is there: here they are all held at once."""
_MAX_MESSAGE_CHARACTERS: Final = 200
"""Characters of what transformers says."""
_MAX_RELATIVE_DISTANCE: Final = 1e-4
"""Of the relative distance of the outputs, as for our own."""


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
        result = _add_opinion(result, _ask_second_opinion(candidate, original, options))
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


def _ask_second_opinion(
    candidate: CandidateCheckpoint, original: OriginalCheckpoint, options: ForwardOptions
) -> SecondOpinion:
    """Return what transformers' tensor parallelism makes of the shards; never raises because of it."""
    degree = candidate.mesh.degree("tp") if candidate.mesh is not None else 1
    if degree == 1 or candidate.model is None:
        return SecondOpinion("skipped", "the mesh has no tp" if degree == 1 else "the model is not known")
    needed = 4 * sum(prod(tensor.shape) for tensor in candidate.manifest.tensors.values())
    there = measure_host_memory()
    if needed * _MEMORY_SHARE_DIVISOR > there:
        reason = f"transformers holds all ranks' weights at once, {needed:,} bytes, and there are {there:,}"
        return SecondOpinion("skipped", reason)
    try:
        work = partial(_compare_with_native, *detach_readers(candidate, original), replace(options, device="cpu"))
        environment = build_environment(1) | {"CUDA_VISIBLE_DEVICES": "", "WORLD_SIZE": str(degree)}
        # What the others are copied from may have asked for GPUs before they are hidden from transformers.
        start: Start = "spawn" if has_cuda_device() else "forkserver"
        (found,) = run_ranks(work, 1, start=start, environment=environment, idle=30.0)
    except (UnsupportedError, NotStartedError) as error:
        return SecondOpinion("skipped", error.message)
    except RankError as error:
        told = error.message.replace("rank 0 raised ", "transformers raised ").splitlines()[0]
        return SecondOpinion(
            "skipped", told[:_MAX_MESSAGE_CHARACTERS] + ("..." if len(told) > _MAX_MESSAGE_CHARACTERS else "")
        )
    return SecondOpinion(**found)


def _add_opinion(result: ForwardResult, opinion: SecondOpinion) -> ForwardResult:
    """Return the result with a second opinion, which fails it only if it is one of these very shards."""
    if opinion.status == "differs":
        found = CheckFinding("error", "second opinion", opinion.reason)
        return replace(result, status="failed", opinion=opinion, findings=(*result.findings, found))
    if opinion.status == "skipped":
        return replace(result, opinion=opinion, notes=(*result.notes, f"no second opinion: {opinion.reason}"))
    return replace(result, opinion=opinion)


def _compare_with_native(
    candidate: CandidateCheckpoint, original: OriginalCheckpoint, options: ForwardOptions, rank: RankProcess
) -> dict[str, object]:
    """Compare in a process of its own."""
    from shardctl.running.forward.inputs import build_inputs

    candidate, original = attach_readers(candidate, original)
    rank.report_heartbeat()
    check = ForwardComparison(candidate, original, options)
    kind = get_model_class(str(check.config["architectures"][0]))
    executor = check.executor(kind, "fp32")
    source, _ = check.sides.fill(executor)
    inputs = build_inputs(executor.skeleton.model, "cpu")
    expected = select_output(executor.run(inputs, source))[1]
    try:
        outputs, foreign = _run_native_ranks(kind, check.config, candidate, inputs)
    except CoverageError as error:
        return {"status": "differs", "reason": f"transformers' tensor parallelism finds: {error.message}"}
    apart = max(measure_distance(expected, output) for output in outputs)
    if foreign:
        cuts = (
            f"layout differs from that of transformers {list_versions()['transformers']} at {format_first_few(foreign)}"
        )
        return {"status": "skipped", "reason": f"{cuts}; it computed from several ranks' files", "error": apart}
    if apart > _MAX_RELATIVE_DISTANCE:
        reason = (
            f"transformers' tensor parallelism computes something else: {apart:.2e}, at most {_MAX_RELATIVE_DISTANCE:g}"
        )
        return {"status": "differs", "reason": reason, "error": apart}
    return {"status": "agrees", "error": apart}


def _run_native_ranks(
    kind: _Torch, config: Mapping[str, Any], candidate: CandidateCheckpoint, inputs: Mapping[str, _Torch]
) -> tuple[list[_Torch], dict[str, int]]:
    """Return each rank's output, and what of other ranks' files they needed."""
    import torch
    import torch.distributed as dist
    from torch.distributed import _local_tensor
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import distributed

    native: _Torch = distributed  # private or young: types that change from version to version
    local_tensor: _Torch = _local_tensor
    assert candidate.mesh is not None  # noqa: S101
    assert candidate.model is not None  # noqa: S101
    degree, local, foreign, model = candidate.mesh.degree("tp"), dict[str, dict[int, _Torch]](), dict[str, int](), None
    shape = (candidate.manifest, candidate.reader, candidate.model, candidate.mesh, candidate.stages)
    for index in reversed(range(degree)):  # the first is loaded last, and is the one that runs
        os.environ |= {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": str(degree)}
        dist.init_process_group("fake", rank=index, world_size=degree, store=FakeStore())
        shards = CheckpointShards.of(*shape)
        shards.index = index
        with silence_transformers():
            model = kind.from_pretrained(
                None,
                config=build_config(kind, config, torch.float32),
                state_dict=LazyStateDict(shards.entries()),
                dtype=torch.float32,
                attn_implementation="eager",
                distributed_config=native.DistributedConfig(tp_size=degree),
            )
        for name, parameter in model.named_parameters(remove_duplicate=False):
            data = parameter.data
            local.setdefault(name, {})[index] = data.to_local() if isinstance(data, DTensor) else data
        foreign |= shards.foreign
        if index:
            dist.destroy_process_group()
    assert model is not None  # noqa: S101 - there is at least one rank
    made: dict[int, _Torch] = {}
    with local_tensor.LocalTensorMode(degree), torch.no_grad():
        for name, parameter in list(model.named_parameters(remove_duplicate=False)):
            if id(parameter) not in made:
                every, data = local_tensor.LocalTensor(local[name]), parameter.data
                if isinstance(data, DTensor):
                    form: _Torch = {"shape": data.shape, "stride": data.stride()}
                    every = DTensor.from_local(every, data.device_mesh, data.placements, run_check=False, **form)
                made[id(parameter)] = torch.nn.Parameter(every, requires_grad=False)
            owner, _, attribute = name.rpartition(".")
            model.get_submodule(owner)._parameters[attribute] = made[id(parameter)]  # noqa: SLF001
        output: _Torch = select_output(model.eval()(**inputs, return_dict=True))[1]
        output = output.to_local() if isinstance(output, DTensor) else output
    every_rank = isinstance(output, local_tensor.LocalTensor)
    return list(output._local_tensors.values()) if every_rank else [output], foreign  # noqa: SLF001
