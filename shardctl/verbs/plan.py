"""Plans a mesh from headers only: what every rank holds and needs, whether it fits, what converting costs."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardctl.base.amounts import format_plural
from shardctl.base.errors import MemoryBudgetError, UnsupportedError, UsageError
from shardctl.base.garbage_collection import pause_garbage_collection
from shardctl.checkpoint.config_only import UNCOUNTED_LAYERS
from shardctl.checkpoint.name_selection import NameSelection
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.checkpoint.splitting import split_checkpoint
from shardctl.conversion import plan_file
from shardctl.conversion.conversion_plan import plan_conversion, prepare_source_options
from shardctl.conversion.measured_conversion import measure_conversion, measure_planned
from shardctl.estimate.serving.engine_budget import describe_unread_version
from shardctl.estimate.workload import ServingWorkload
from shardctl.libraries.gguf.reading import NAME as GGUF
from shardctl.options import PlanOptions, ReshardOptions, SourceOptions
from shardctl.options.sum_options import requests_sum
from shardctl.planning.estimated_model import (
    EstimatedModel,
    ExtraModel,
    build_beside_model,
    build_estimated_model,
    count_decoded_weights,
    count_mtp_layers,
    has_coded_weights,
)
from shardctl.planning.mesh_search import MeshExploration, explore_meshes
from shardctl.planning.plan_result import PlanResult, describe_conversion, describe_unstored_model
from shardctl.planning.tower_cuts import cut_towers
from shardctl.planning.workload import choose_tuning, decide_use
from shardctl.storage import read_bytes
from shardctl.tensors.mesh import Mesh

if TYPE_CHECKING:
    from shardctl.checkpoint.opening import OpenedCheckpoint

_MAX_PROBED_BYTES: Final = 256_000_000
"""Bytes that `--probe` reads at most: enough for a steady rate of a disk, and little of what is read later."""
_PROBE_BYTES: Final = 8 << 20
_NOTHING_TO_CONVERT_HINT: Final = "--out needs stored tensors and a type that reshard writes"


@pause_garbage_collection()
def plan(
    path: str | Path,
    reshard_options: ReshardOptions | None = None,
    *,
    source_options: SourceOptions | None = None,
    destination: str | Path | None = None,
    plan_options: PlanOptions | None = None,
) -> PlanResult:
    """Work out a conversion without doing it; `destination` says where free space is looked up.

    A memory limit that cannot hold it is a warning here: the plan is what one asks to learn what is needed.
    """
    reshard_options, plan_options = _settle_options(reshard_options or ReshardOptions(), plan_options or PlanOptions())
    asked = source_options.kv_heads if source_options is not None else None
    source_options = _choose_kv_heads(
        prepare_source_options(source_options, reshard_options), reshard_options, plan_options
    )
    selection = NameSelection.parse(reshard_options.include, reshard_options.exclude)
    options = replace(source_options, described=True, unpadded=True)
    with ExitStack() as stack:
        if requests_sum(reshard_options):
            whole = _open_sum(stack, path, reshard_options, plan_options, options)
        else:
            whole = stack.enter_context(open_checkpoint(path, options, selection=selection))
        checkpoint = split_checkpoint(whole, reshard_options.only)
        _refuse_division(checkpoint, reshard_options, plan_options)
        trained = decide_use(plan_options, reshard_options.mesh or Mesh.of()) == "train"
        counted = count_decoded_weights(checkpoint, reshard_options, trained=trained)
        checkpoint = counted if checkpoint.hypothetical else checkpoint
        seen, towers = cut_towers(counted, reshard_options, plan_options)
        about = _build_unstored_model(seen, reshard_options, plan_options)
        if plan_options.beside:
            about = about or build_estimated_model(counted, reshard_options)
            about = replace(about, beside=_build_beside_models(source_options, reshard_options, plan_options))
        explored = (
            explore_meshes(about or build_estimated_model(counted, reshard_options), plan_options, reshard_options.mesh)
            if plan_options.search
            else None
        )
        if explored is not None and reshard_options.mesh is None:
            reshard_options, plan_options = _apply_best_mesh(reshard_options, plan_options, explored)
            towers = cut_towers(checkpoint, reshard_options, plan_options)[1]
        reshard_options = _choose_even_stages(checkpoint, reshard_options, plan_options)
        if about is not None:
            if plan_options.out is not None:
                raise UsageError(f"there is nothing to convert for {plan_options.out}", hint=_NOTHING_TO_CONVERT_HINT)
            planned = describe_unstored_model(str(path), checkpoint, reshard_options, plan_options, about)
        else:
            near = Path(destination or path)
            about = build_estimated_model(seen, reshard_options)
            planned = _plan_stored_model(
                str(path), checkpoint, reshard_options, plan_options, source_options, near, about
            )
        if plan_options.probe:
            planned = _measure_rate(checkpoint, planned)
        shared = _note_shared_heads(checkpoint, planned) if asked is None else []
        assumed = [*shared, *towers, *_note_device_count(plan_options, planned), *_note_unread_version(planned)]
        strict = source_options.strict
        predicting = about.anatomy.predicting if about is not None and about.anatomy is not None else 0
        if predicting:
            rest = [text for text in planned.warnings if UNCOUNTED_LAYERS not in text]
            counted_layers = format_plural(predicting, "multi-token prediction layer")
            how = f"{counted_layers} counted, each as the last layer and one more loss; --mtp-layers 0 leaves them out"
            planned = replace(planned, warnings=(*rest, how))
        return replace(planned, explored=explored, strict=strict, warnings=(*planned.warnings, *assumed))


def _open_sum(
    stack: ExitStack,
    path: str | Path,
    reshard_options: ReshardOptions,
    plan_options: PlanOptions,
    source_options: SourceOptions,
) -> OpenedCheckpoint:
    """Open the sum of checkpoints that is to be converted."""
    from shardctl.conversion.preparing import open_input

    if plan_options.out is not None:
        raise UsageError("a plan file holds no sum of checkpoints", hint="leave --out out; reshard plans it itself")
    return open_input(stack, path, replace(reshard_options, consumer=None), source_options, None)[0]


def _build_beside_models(
    source_options: SourceOptions, reshard_options: ReshardOptions, plan_options: PlanOptions
) -> tuple[ExtraModel, ...]:
    """Build the models that ranks hold beside the one that is trained, each read by itself."""
    found = []
    for number, path in enumerate(plan_options.beside):
        own = SourceOptions(kv_heads=source_options.kv_heads, described=True)
        with open_checkpoint(path, own) as checkpoint:
            twice = path in plan_options.beside[:number]
            name = f"{path.name} ({number + 1})" if twice else path.name
            found.append(build_beside_model(name, checkpoint, replace(reshard_options, only=None)))
    return tuple(found)


def _refuse_division(checkpoint: OpenedCheckpoint, reshard_options: ReshardOptions, plan_options: PlanOptions) -> None:
    """Raise UnsupportedError for a mesh that divides a GGUF file: its tensors would be counted whole on every rank."""
    mesh = reshard_options.mesh or Mesh.of()
    divided = any(mesh.degree(axis) > 1 for axis in ("tp", "pp", "fsdp", "ep"))
    if checkpoint.stored.format == GGUF and (divided or plan_options.search):
        raise UnsupportedError(
            f"{checkpoint.source.name} is a GGUF file, and how its engines divide one over devices is not known",
            hint="leave the mesh out, or plan the checkpoint that the file was made from",
        )


def _choose_even_stages(
    checkpoint: OpenedCheckpoint, reshard_options: ReshardOptions, plan_options: PlanOptions
) -> ReshardOptions:
    """Megatron-LM gives stages equally many layers, where all others are balanced by bytes."""
    model, stages = checkpoint.model, (reshard_options.mesh or Mesh.of()).degree("pp")
    even = plan_options.profile == "megatron" and reshard_options.stages is None and stages > 1
    if not even or model is None or not model.layers or model.layers % stages:
        return reshard_options
    return replace(reshard_options, stages=",".join([str(model.layers // stages)] * stages))


def _choose_kv_heads(
    source_options: SourceOptions, reshard_options: ReshardOptions, plan_options: PlanOptions
) -> SourceOptions:
    """Engines that serve keep a key/value head on several ranks, unless something else is asked.

    vLLM does in `QKVParallelLinear`, SGLang in its namesake; transformers' tp and Megatron-LM refuse such a mesh.
    """
    serving = decide_use(plan_options, reshard_options.mesh or Mesh.of()) == "serve"
    return replace(source_options, kv_heads=source_options.kv_heads or ("replicate" if serving else None))


def _settle_options(reshard_options: ReshardOptions, plan_options: PlanOptions) -> tuple[ReshardOptions, PlanOptions]:
    """Return the options with what follows from each other; raises UsageError for those that contradict each other."""
    plan_options = _count_devices(plan_options)
    if plan_options.device is not None and (plan_options.devices or 1) > 1 and reshard_options.mesh is None:
        plan_options = replace(plan_options, search=True)  # devices without a mesh: the best one is chosen
    if plan_options.cast_type is not None:
        reshard_options = replace(reshard_options, dtype=plan_options.cast_type)
    if plan_options.probe and plan_options.disk_rate is not None:
        raise UsageError("--probe and --disk-rate are both given", hint="one measures what the other says")
    if plan_options.search and reshard_options.mesh is None and reshard_options.stages is not None:
        raise UsageError(
            "--stages applies to one mesh, but --search compares many", hint="name the mesh, or leave --stages out"
        )
    return reshard_options, plan_options


def _measure_rate(checkpoint: OpenedCheckpoint, planned: PlanResult) -> PlanResult:
    """Return a plan whose conversion is timed at the rate at which the first files of the source can be read now."""
    if planned.conversion is None:
        raise UsageError("--probe reads stored tensors, and there are none to convert", hint="leave --probe out")
    done, began = 0, time.monotonic()
    for path, file in checkpoint.stored.files.items():
        for offset in range(0, min(file.size, _MAX_PROBED_BYTES - done), _PROBE_BYTES):
            size = min(_PROBE_BYTES, file.size - offset, _MAX_PROBED_BYTES - done)
            done += len(read_bytes(checkpoint.source, path, offset, size))
    rate = max(1, round(done / max(time.monotonic() - began, 1e-6)))
    return replace(planned, conversion=replace(planned.conversion, rate_bytes=rate, rate_source="measured"))


def _count_devices(plan_options: PlanOptions) -> PlanOptions:
    """Return the options with the count of ``--gpu 2xNAME`` as that of `--gpus`; raises UsageError for another one."""
    device = plan_options.device
    if device is None or not device.count:
        return plan_options
    if plan_options.devices not in {None, device.count}:
        raise UsageError(
            f"--gpu names {format_plural(device.count, 'device')}, and --gpus says {plan_options.devices}",
            hint="leave one of them out",
        )
    return replace(plan_options, devices=device.count, device=replace(device, count=0))


def _note_unread_version(planned: PlanResult) -> list[str]:
    """Note that the rules are those of another version of the engine."""
    work = planned.forecast.work
    budget = work.budget if isinstance(work, ServingWorkload) else None
    note = describe_unread_version(budget) if budget is not None else ""
    return [note] if note else []


def _note_device_count(plan_options: PlanOptions, planned: PlanResult) -> list[str]:
    """Say that a plan is not of as many devices as `--gpus` says, which is then for the comparison alone."""
    count, world = plan_options.devices, planned.mesh.world
    if count is None or plan_options.search or count == world:
        return []
    said = f"this plan is for {format_plural(world, 'device')}, and only the comparison of ZeRO's stages is for {count}"
    return [f"{said}: to plan {count}, add --search, or a mesh such as --fsdp {count}"]


def _note_shared_heads(checkpoint: OpenedCheckpoint, planned: PlanResult) -> list[str]:
    """Say which heads several tp ranks hold because there are fewer heads than ranks."""
    tp = planned.mesh.degree("tp")
    if tp == 1 or checkpoint.model is None:
        return []
    alike = {id(tensor.spec.cuts): tensor.spec.cuts for tensor in checkpoint.model.own()}
    sections = {
        section
        for cuts in alike.values()
        for dim in cuts
        for cut in dim
        for section in cut.sections
        if cut.axis == "tp" and section.shared and section.size // section.unit % tp
    }
    counts = {section.noun: section.size // section.unit for section in sections}
    written = "; reshard --to ranks needs --kv-heads replicate" if planned.layout == "ranks" else ""
    return [
        f"{count} {noun} are fewer than {tp} tp ranks, so {tp // count} ranks hold each one, as in engines{written}"
        for noun, count in sorted(counts.items())
    ]


def _build_unstored_model(
    checkpoint: OpenedCheckpoint, reshard_options: ReshardOptions, plan_options: PlanOptions
) -> EstimatedModel | None:
    """Build the model if it would be other than stored: only described, quantized, or trained as it was before."""
    if checkpoint.hypothetical and reshard_options.quantize is not None:
        nearest = next((each for each in ("fp8", "int8", "int4") if reshard_options.quantize.startswith(each)), "fp8")
        raise UsageError(
            f"--quantize converts weights, and {checkpoint.source.name} is a config without weights",
            hint=f"--dtype {nearest} plans the model as if it were quantized",
        )
    trained = decide_use(plan_options, reshard_options.mesh or Mesh.of()) == "train"
    tuning = choose_tuning(plan_options)
    if trained and tuning is not None:
        return build_estimated_model(checkpoint, reshard_options, tuning=tuning)
    if (
        checkpoint.hypothetical
        or plan_options.quantized_type is not None
        or (trained and has_coded_weights(checkpoint))
    ):
        number = plan_options.mtp_layers
        if trained or number is not None:
            number = count_mtp_layers(checkpoint, number, megatron=plan_options.profile == "megatron")
        stages = reshard_options.mesh.degree("pp") if reshard_options.mesh is not None else 1
        about = build_estimated_model(
            checkpoint, reshard_options, trained=trained, mtp_layers=number or 0, mtp_embedding=stages > 1
        )
        return about.if_quantized(plan_options.quantized_type)
    if plan_options.mtp_layers:
        count_mtp_layers(checkpoint, plan_options.mtp_layers, megatron=False)
    return None


def _apply_best_mesh(
    reshard_options: ReshardOptions, plan_options: PlanOptions, explored: MeshExploration
) -> tuple[ReshardOptions, PlanOptions]:
    """Return the same for the mesh that a search found, or if none fits, for the one that comes closest."""
    found = explored.found.best
    if found is None or found.mesh is None:
        return reshard_options, plan_options
    stages = ",".join(map(str, found.stages)) if found.mesh.degree("pp") > 1 else None
    mesh = found.mesh if found.mesh.world > 1 else None
    return replace(reshard_options, mesh=mesh, stages=stages), explored.compared(plan_options, found.mesh)


def _plan_stored_model(
    path: str,
    checkpoint: OpenedCheckpoint,
    reshard_options: ReshardOptions,
    plan_options: PlanOptions,
    source_options: SourceOptions,
    near: Path,
    about: EstimatedModel,
) -> PlanResult:
    """Plan a model and its conversion, drafted for the least memory that can hold it where the limit is too low.

    A conversion of so many pieces that not even their list is made is left out of the result, which says so.
    """
    try:
        if plan_options.out is None:
            work = measure_conversion(checkpoint, reshard_options, least=True)
        else:
            planned_work = plan_conversion(checkpoint, reshard_options, least=True)
            plan_file.write_plan_file(plan_options.out, planned_work, source_options)
            work = measure_planned(planned_work)
    except MemoryBudgetError as error:
        if plan_options.out is not None:
            raise
        planned = describe_unstored_model(path, checkpoint, reshard_options, plan_options, about)
        left = f"the conversion is not worked out: {error.message}; {error.hint}"
        return replace(planned, warnings=(*planned.warnings, left))
    return describe_conversion(path, work, near, plan_options, about)
