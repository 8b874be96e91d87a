"""Runs the levels of `verify` that use devices: loads every rank, and runs the model that they form."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.amounts import format_plural
from shardctl.base.dtype import FLOATS
from shardctl.base.errors import MachineError, MemoryBudgetError, PartitionError, UnsupportedError, UsageError
from shardctl.base.value import state_class
from shardctl.base.workers import split_into_batches
from shardctl.checkpoint.companion_comparison import compare_model_configs
from shardctl.estimate.model.inventory import build_inventory
from shardctl.estimate.model.rank_shards import list_rank_shards
from shardctl.models import find_quantization_config
from shardctl.running.device_choice import DeviceChoice
from shardctl.running.machine_failure import release_frames
from shardctl.running.state_dict import list_expert_names
from shardctl.tensors.cast import has_cast
from shardctl.tensors.digest import compute_tensor_digest
from shardctl.tensors.mesh import build_holding_key
from shardctl.tensors.record import DERIVED, OVERFLOWED, RECORD
from shardctl.verify import rank_files
from shardctl.verify.finding import CheckFinding
from shardctl.verify.level import LevelResult, LoadedRank

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from shardctl.base.workers import ExecutionOptions, ProgressWatcher
    from shardctl.checkpoint.opening import OpenedCheckpoint
    from shardctl.options import VerifyOptions
    from shardctl.running.dispatch import CheckpointDispatch
    from shardctl.running.forward import CandidateCheckpoint, OriginalCheckpoint
    from shardctl.running.load import LoadedTensors
    from shardctl.running.loaded import Array, LoadedBox, LoadedDigests, Parts
    from shardctl.tensors.manifest import Chunk, Tensor
    from shardctl.verify.forward_result import ForwardResult
    from shardctl.verify.golden import GoldenOutput


_LOAD_BATCH_BYTES: Final = 256 << 20
"""Bytes that are loaded at once where nobody named a device, so that little of its memory is enough."""
_MACHINE_ERROR_TYPES: Final = (MachineError, MemoryBudgetError)
"""What says something of the machine and nothing of the checkpoint."""


def run_load_level(
    checkpoint: OpenedCheckpoint,
    other: OpenedCheckpoint | None,
    digests: Mapping[str, str],
    verify_options: VerifyOptions,
    effort: ExecutionOptions,
    *,
    strict: bool,
    dispatch: CheckpointDispatch | None = None,
) -> LevelResult:
    """Load what each rank holds onto its device, and compare it there with `other`, or by the digests.

    `digests` are those that the level before measured, of tensors that no record has. Ranks follow one another, each on
    the device of its number modulo that of devices; replicas by dp and cp are loaded once. Where that device lacks
    memory or fails, another is taken that was not excluded by name; without one, the level is `unfinished`.

    With a `dispatch`, the blocks of a whole checkpoint go where it places them, and stay there.
    """
    level, began = LevelResult("load", strict=strict), time.monotonic()
    try:
        if dispatch is not None:
            _load_blocks(level, checkpoint, other, digests, dispatch, effort)
            level.seconds = time.monotonic() - began
            return level
        devices = DeviceChoice.of(verify_options.device)
        began = time.monotonic()  # importing torch is no part of it
        if devices.places == ["cpu"] and devices.bounded:
            level.notes.append(
                "there is no CUDA device, so each rank was loaded on the CPU in parts; --load cpu loads it whole"
            )
        elif devices.bounded:
            level.notes.append("no device was named, so each rank was loaded in parts; --load cuda loads it whole")
        _load_ranks(level, checkpoint, other, digests, devices, verify_options.device_memory, effort)
        level.notes += devices.notes
    except UnsupportedError as error:
        level.skip(_format_reason(error))
    level.seconds = time.monotonic() - began
    return level


def _format_reason(error: UnsupportedError) -> str:
    return f"{error.message}; {error.hint}" if error.hint else error.message


def _load_ranks(
    level: LevelResult,
    checkpoint: OpenedCheckpoint,
    other: OpenedCheckpoint | None,
    digests: Mapping[str, str],
    devices: DeviceChoice,
    limit: int | None,
    effort: ExecutionOptions,
) -> None:
    from shardctl.running.device import empty_device_cache
    from shardctl.running.loaded import LoadedDigests, collect_arrays, find_array_parts

    every, planned, summed = collect_arrays(checkpoint.stored), compute_planned_bytes(checkpoint), LoadedDigests()
    ranks = list(_list_rank_arrays(checkpoint, every))
    nbytes = sum(every[key].dtype.nbytes(every[key].box.shape) for _, held in ranks for key in held)
    effort.watcher.begin(2 * nbytes, phase="load")  # what is loaded is compared
    parts = find_array_parts(checkpoint.manifest, every)
    run = _LoadRun(checkpoint, other, every, parts, summed, _LOAD_BATCH_BYTES if devices.bounded else None, effort)
    tensors = {name: tensor.digest for name, tensor in checkpoint.record.tensors.items()} if checkpoint.record else {}
    for rank, held in ranks:
        effort.watcher.work_on(_name_holder(checkpoint, rank))
        places = devices.list_for(rank)
        for device, following in zip(places, [*places[1:], None], strict=True):
            told = LoadedRank(rank, _format_rank_label(checkpoint, rank), device, 0, 0.0, 0, planned.get(rank))
            found: list[CheckFinding] = []
            try:
                told = run.load(told, held, found)
            except _MACHINE_ERROR_TYPES as error:
                release_frames(error)
                empty_device_cache(device)
                if following is not None:
                    devices.leave(device, f"{_name_holder(checkpoint, rank)} was loaded", error, following)
                    continue
                level.add(iter(found))
                level.give_up(type(error)(f"{_name_holder(checkpoint, rank)}: {error.message}", hint=error.hint))
                break
            level.add(iter(found))
            level.nbytes += told.nbytes
            level.ranks.append(told)
            level.add(_find_over_budget(told, limit))
            empty_device_cache(device)
            break
    level.tensors = len(checkpoint.manifest.tensors)
    if level.trouble is None:
        level.add(_find_digest_changes(checkpoint, other, summed, {**digests, **tensors}))


def _load_blocks(
    level: LevelResult,
    checkpoint: OpenedCheckpoint,
    other: OpenedCheckpoint | None,
    digests: Mapping[str, str],
    dispatch: CheckpointDispatch,
    effort: ExecutionOptions,
) -> None:
    """Load each block where the dispatch places it; where a device fails, place them again without it."""
    from shardctl.running.device import empty_device_cache, is_cuda_device
    from shardctl.running.dispatch import DISK
    from shardctl.running.loaded import LoadedDigests

    effort.watcher.begin(2 * sum(block.nbytes for block in dispatch.blocks), phase="load")
    failed: list[str] = []
    tensors = {name: tensor.digest for name, tensor in checkpoint.record.tensors.items()} if checkpoint.record else {}
    while True:
        summed, found, loaded, place = LoadedDigests(), list[CheckFinding](), list[LoadedRank](), ""
        run = _LoadRun(checkpoint, other, dispatch.arrays, dispatch.parts, summed, None, effort)
        try:
            placed = dispatch.plan(failed)
            level.placement = dispatch.placements
            for place, blocks in placed.items():
                effort.watcher.work_on(place)
                label = format_plural(len(blocks), "block") if len(placed) > 1 else ""
                planned = compute_planned_bytes(checkpoint).get(None) if len(placed) == 1 else None
                one = LoadedRank(None, label, place, 0, 0.0, 0, planned)
                keys = [key for block in blocks for key in block.arrays]
                one = run.load(one, keys, found, dispatch)
                if place == DISK:  # one array after another was in host memory
                    one = replace(one, peak_bytes=max(map(dispatch.measure, keys), default=0))
                loaded.append(one)
        except _MACHINE_ERROR_TYPES as error:
            release_frames(error)
            dispatch.release()
            if is_cuda_device(place) and place not in failed and dispatch.may_place_again:
                empty_device_cache(place)
                failed.append(place)
                dispatch.notes.append(f"blocks were placed again without {place}, because {error.message}")
                continue
            level.give_up(error)
        else:
            dispatch.finish()
            level.ranks = loaded
            level.nbytes = sum(each.nbytes for each in loaded)
            level.tensors = len(checkpoint.manifest.tensors)
        level.notes += dispatch.notes
        level.add(iter(found))
        if level.trouble is None:
            level.add(_find_digest_changes(checkpoint, other, summed, {**digests, **tensors}))
        return


@state_class
class _LoadRun:
    """What loading the ranks of a checkpoint one after another needs to know."""

    checkpoint: OpenedCheckpoint
    other: OpenedCheckpoint | None
    every: Mapping[Array, Chunk]
    parts: Parts
    summed: LoadedDigests
    most: int | None
    """Bytes that are loaded at once; all if None."""
    effort: ExecutionOptions

    def load(
        self,
        told: LoadedRank,
        held: Sequence[Array],
        found: list[CheckFinding],
        dispatch: CheckpointDispatch | None = None,
    ) -> LoadedRank:
        """Load what a rank holds onto its device; returns what that took, and adds to `found` what is wrong.

        A `dispatch` keeps what it has placed there. What goes to its folder passes through host memory array by array,
        and is compared as it is read back.
        """
        from shardctl.running.device import use_device
        from shardctl.running.dispatch import DISK, HOST
        from shardctl.running.load import WantedTensor, load_tensors
        from shardctl.running.loaded import place_loaded_arrays
        from shardctl.running.machine_failure import tell_machine_errors

        device, most = (HOST, 0) if told.device == DISK else (told.device, self.most)

        def count_bytes(key: Array) -> int:
            chunk = self.every[key]
            return chunk.dtype.nbytes(chunk.box.shape)

        for batch in split_into_batches(held, most, count_bytes):
            wanted = {key: WantedTensor.part(key[1], [self.every[key]]) for key in batch}
            loaded = load_tensors(wanted, self.checkpoint.source, device, self.effort)
            told = _add_loaded(told, loaded)
            with tell_machine_errors(device), use_device(device):
                tensors = dispatch.keep(told.device, loaded.tensors) if dispatch is not None else loaded.tensors
                del loaded
                boxes = list(place_loaded_arrays(self.parts, self.every, tensors))
                found += _find_differences(
                    self.checkpoint, self.other, told.rank, boxes, self.summed, device, self.effort
                )
            del tensors, boxes
        return told


def _add_loaded(told: LoadedRank, loaded: LoadedTensors[Array]) -> LoadedRank:
    """Add up the groups in which a rank was loaded: it takes as much as all of them."""
    return replace(
        told,
        nbytes=told.nbytes + loaded.nbytes,
        seconds=told.seconds + loaded.seconds,
        peak_bytes=told.peak_bytes + loaded.peak_bytes,
    )


def _list_rank_arrays(
    checkpoint: OpenedCheckpoint, every: Mapping[Array, Chunk]
) -> Iterator[tuple[int | None, list[Array]]]:
    """List each rank that holds something of its own, and the arrays that it holds."""
    from shardctl.running.loaded import identify_array

    dialect = checkpoint.stored.dialect
    if dialect is not None and len(dialect.ranks) > 1:
        own: dict[int, list[Array]] = {rank: [] for rank in dialect.ranks}
        ranks = {prefix: rank for rank, prefix in dialect.ranks.items()}
        for name, tensor in checkpoint.stored.tensors.items():
            rank = next(number for prefix, number in ranks.items() if name.startswith(prefix))
            own[rank] += [identify_array(chunk) for chunk in tensor.chunks if hasattr(chunk.where, "file")]
        yield from own.items()
        return
    if not rank_files.list_ranks(checkpoint.stored):
        yield None, list(every)
        return
    mesh, divided = checkpoint.mesh, list_expert_names(checkpoint)
    for rank in rank_files.list_distinct_ranks(checkpoint.stored, mesh):
        chunks = rank_files.list_held_chunks(rank, checkpoint.stored, mesh, divided)
        yield rank, [identify_array(chunk) for _, chunk in chunks if hasattr(chunk.where, "file")]


def _format_rank_label(checkpoint: OpenedCheckpoint, rank: int | None) -> str:
    dialect = checkpoint.stored.dialect
    mesh = checkpoint.mesh or (dialect.mesh if dialect is not None else None)
    return mesh.label(rank) if mesh is not None and rank is not None else ""


def _find_over_budget(loaded: LoadedRank, limit: int | None) -> Iterator[CheckFinding]:
    if limit is not None and loaded.peak_bytes > limit:
        rank = f"rank {loaded.rank} ({loaded.label})" if loaded.rank is not None else "the checkpoint"
        message = f"{rank} took {loaded.peak_bytes:,} bytes of {loaded.device}, of which it may take {limit:,}"
        yield CheckFinding("error", "memory", message)


def _find_differences(
    checkpoint: OpenedCheckpoint,
    other: OpenedCheckpoint | None,
    rank: int | None,
    parts: list[LoadedBox],
    summed: LoadedDigests,
    device: str,
    effort: ExecutionOptions,
) -> Iterator[CheckFinding]:
    """Find what of a rank's memory is not as in the source, or not as in the first rank that holds the same."""
    from shardctl.running.loaded import compare_loaded

    who = _name_holder(checkpoint, rank)
    compared = [part for part in parts if other is not None and _is_comparable(part.tensor, other)]
    rest = parts if other is None else [part for part in parts if not _is_comparable(part.tensor, other)]
    for one in summed.add(rest, effort):
        message = f"{one.tensor} {one.first} on {who}, from {one.file}, differs from another rank's copy"
        yield CheckFinding("error", "load", message, one.tensor, one.file, str(one.first))
    if other is None:
        return
    for one in compare_loaded(compared, other.manifest, other.source, device, effort):
        message = (
            f"{one.tensor} on {who}, from {one.file}, differs from the source in {one.count:,} elements, "
            f"first at {one.first}"
        )
        yield CheckFinding("error", "load", message, one.tensor, one.file, str(one.first))


def _is_comparable(tensor: Tensor, other: OpenedCheckpoint) -> bool:
    """Return whether the source has a tensor in a type that can be cast to this one's; codes of its own it has not."""
    theirs = other.manifest.tensors.get(tensor.name)
    return theirs is not None and has_cast(theirs.dtype, tensor.dtype)


def _find_digest_changes(
    checkpoint: OpenedCheckpoint, other: OpenedCheckpoint | None, summed: LoadedDigests, digests: Mapping[str, str]
) -> Iterator[CheckFinding]:
    """Find tensors that have other sums than their digest, of those that were not compared with the source."""
    for name, tensor in checkpoint.manifest.tensors.items():
        if other is not None and _is_comparable(tensor, other):
            continue
        found = compute_tensor_digest(summed.of(tensor), tensor.dtype, tensor.shape)
        if digests.get(name, found) != found:
            message = f"{name} as loaded has digest {found}, not {digests[name]}; it is in {', '.join(tensor.files)}"
            yield CheckFinding("error", "load", message, name, next(iter(tensor.files), ""))


def compute_planned_bytes(checkpoint: OpenedCheckpoint) -> dict[int | None, int]:
    """Compute bytes that `plan` says each rank's weights take, by rank; empty where nobody can say."""
    mesh = checkpoint.mesh
    tensors = checkpoint.manifest.tensors
    if checkpoint.stored.dialect is not None and len(checkpoint.stored.dialect.ranks) > 1:
        return {}  # what other libraries repeat and pad is not what `plan` counts
    if not rank_files.list_ranks(checkpoint.stored):
        return {None: sum(tensor.nbytes for tensor in tensors.values())}
    model = checkpoint.find_placement(mesh) if mesh is not None else None
    if mesh is None or model is None or not tensors.keys() <= model.tensors.keys():
        return {}
    specs = {name: model.tensors[name].spec for name in tensors}
    try:
        holdings = list_rank_shards(build_inventory(tensors.values(), specs, model.layers), mesh, checkpoint.stages)
    except PartitionError:  # cut by rules that are not known here
        return {}
    by_place = {build_holding_key(holding.coordinate): holding.nbytes for holding in holdings}
    return {rank: by_place[build_holding_key(mesh.coordinate(rank))] for rank in range(mesh.world)}


def _name_holder(checkpoint: OpenedCheckpoint, rank: int | None) -> str:
    if rank is None:
        return "the device"
    label = _format_rank_label(checkpoint, rank)
    return f"rank {rank} ({label})" if label else f"rank {rank}"


def run_forward_level(
    checkpoint: OpenedCheckpoint,
    other: OpenedCheckpoint | None,
    verify_options: VerifyOptions,
    watcher: ProgressWatcher,
    *,
    strict: bool,
    dispatch: CheckpointDispatch | None = None,
    golden: GoldenOutput | None = None,
    unquantized: OpenedCheckpoint | None = None,
    threads: int = 1,
) -> LevelResult:
    """Run the model that the shards form beside the one of `other`, or of their own elements put together again.

    With a `dispatch` whose blocks were all loaded, each runs where it was placed, unless its weights are quantized. A
    `golden` output is compared with that of the shards. Quantized weights are decoded by `threads` when a block needs
    them, and `unquantized` is what `other` was before it was quantized.
    """
    level, began = LevelResult("forward", strict=strict), time.monotonic()
    try:
        if dispatch is not None and not dispatch.complete:
            level.notes.append("the blocks were not all loaded, so the model was read from the files again")
            dispatch = None
        before: OpenedCheckpoint | None = None
        if _is_quantized(checkpoint):
            checkpoint, other, before = _decode_weights(level, checkpoint, other, unquantized, threads)
            if dispatch is not None:
                level.notes.append(
                    "the model did not run where the level load placed its blocks: their weights are quantized, so "
                    "they were read from the files again and decoded, and one device computed with them"
                )
                dispatch.release()
                dispatch = None
        _run_forward(level, checkpoint, other, before, verify_options, watcher, dispatch, golden)
    except UnsupportedError as error:
        level.skip(_format_reason(error))
    except MachineError as error:
        release_frames(error)
        level.give_up(error)
    level.seconds = time.monotonic() - began
    return level


def _is_quantized(checkpoint: OpenedCheckpoint) -> bool:
    return checkpoint.stored_quantization is not None or find_quantization_config(checkpoint.config or {}) is not None


def _decode_weights(
    level: LevelResult,
    checkpoint: OpenedCheckpoint,
    other: OpenedCheckpoint | None,
    unquantized: OpenedCheckpoint | None,
    threads: int,
) -> tuple[OpenedCheckpoint, OpenedCheckpoint | None, OpenedCheckpoint | None]:
    """Decode the weights of a quantized checkpoint, and those of its source, when they are read.

    Returns the two, and the source before it was quantized. A source that is not quantized, and from whose weights
    alone the codes do not follow, is that, too: then the checkpoint is compared with itself. Raises UnsupportedError
    for weights that nobody here can decode.
    """
    from shardctl.checkpoint.quantization.dequantizing import dequantize_checkpoint

    def decode(quantized: OpenedCheckpoint) -> OpenedCheckpoint:
        try:
            return dequantize_checkpoint(quantized, FLOATS["fp32"], threads)
        except UsageError as error:
            raise UnsupportedError(f"the weights are quantized and cannot be run: {error.message}") from error

    decoded = decode(checkpoint)
    level.notes.append(
        "quantized weights were decoded to fp32, block by block, and the model computed with their values"
    )
    if rank_files.list_ranks(checkpoint.stored):
        level.notes.append("the parts of ranks were joined before they were decoded, so no rank computed by itself")
    if other is not None and not _is_quantized(other):
        return decoded, None, other
    before = unquantized if unquantized is not None and not _is_quantized(unquantized) else None
    return decoded, decode(other) if other is not None else None, before


def _run_forward(
    level: LevelResult,
    checkpoint: OpenedCheckpoint,
    other: OpenedCheckpoint | None,
    before: OpenedCheckpoint | None,
    verify_options: VerifyOptions,
    watcher: ProgressWatcher,
    dispatch: CheckpointDispatch | None,
    golden: GoldenOutput | None,
) -> None:
    from shardctl.running.forward import CandidateCheckpoint

    right = other or checkpoint
    if not _has_loadable_names(right) and not right.encoded:
        whose = "the source" if other is not None else "the checkpoint"
        level.notes += (f"{whose} has names of its own, which shardctl and not transformers translated",)
    original = replace(
        _build_original(right, checkpoint), before=_build_original(before, checkpoint) if before is not None else None
    )
    record, ranks = checkpoint.record, [] if checkpoint.encoded else rank_files.list_ranks(checkpoint.stored)
    model = checkpoint.model
    if record is not None and record.mesh is not None and record.options.get("rules") == DERIVED:
        model = checkpoint.find_placement(record.mesh)
    changed = _list_config_changes(checkpoint, other) if other is not None else ()
    candidate = CandidateCheckpoint(
        manifest=checkpoint.manifest,
        reader=checkpoint.source,
        model=model,
        mesh=checkpoint.mesh if ranks else None,
        stages=checkpoint.stages,
        config=checkpoint.config if changed else None,
        config_changes=changed,
        overflow_allowed=record is not None and OVERFLOWED in record.options,
        dispatch=dispatch,
    )
    result = _compare_on_devices(level, candidate, original, verify_options, watcher, golden)
    level.forward = result
    if result.status != "skipped":
        level.notes += _note_limits(checkpoint, other, before, ranks, golden)
    level.notes += result.notes
    level.tensors, level.nbytes = len(checkpoint.manifest.tensors), result.read_bytes
    level.add(iter(result.findings))
    if result.status == "skipped":
        level.skip(result.reason)
    elif result.status == "failed":
        level.status = "failed"


def _build_original(right: OpenedCheckpoint, checkpoint: OpenedCheckpoint) -> OriginalCheckpoint:
    """Build what the forward pass knows of a checkpoint that is right; what it lacks is that of `checkpoint`."""
    from shardctl.running.forward import OriginalCheckpoint

    loadable = _has_loadable_names(right) and not right.adapted and not right.encoded
    return OriginalCheckpoint(
        stored=right.stored if loadable else right.manifest,
        manifest=right.manifest,
        reader=right.source,
        config=right.config or checkpoint.config,
        model=right.model or checkpoint.model,
        folder=right.source.folder or checkpoint.source.folder,  # side files travel along
    )


def _has_loadable_names(checkpoint: OpenedCheckpoint) -> bool:
    """Return whether a class of transformers understands the stored names, as far as the model's table knows.

    Other libraries have arrays of their own, and trainers put wrappers before the names.
    """
    if checkpoint.stored.dialect is not None:
        return False
    names = {
        name
        for tensor in checkpoint.manifest.tensors.values()
        for name in (tensor.name, *tensor.ties, *(tensor.spelling or ()))
    }
    known = checkpoint.model is None and checkpoint.record is not None
    return known or names >= checkpoint.stored.tensors.keys()


def _compare_on_devices(
    level: LevelResult,
    candidate: CandidateCheckpoint,
    original: OriginalCheckpoint,
    verify_options: VerifyOptions,
    watcher: ProgressWatcher,
    golden: GoldenOutput | None,
) -> ForwardResult:
    """Compare where that was asked for; where a device lacks memory or fails, on another that may be used.

    Raises MachineError if there is none, and what `list_devices` raises.
    """
    from shardctl.running.device import empty_device_cache
    from shardctl.running.forward import ForwardOptions, choose_process_count, compare_forward_passes, runs_in_processes

    devices = DeviceChoice.of(verify_options.device)
    nbytes = sum(tensor.nbytes for tensor in candidate.manifest.tensors.values())
    processes = 0 if verify_options.virtual else verify_options.processes
    options = ForwardOptions(
        dtype=golden.dtype if golden is not None else verify_options.dtype,
        device=devices.places[0],
        places=tuple(devices.places),
        prompt=verify_options.prompt or "",
        tokens=verify_options.tokens,
        second_opinion=verify_options.second_opinion,
        processes=processes if processes is not None else choose_process_count(devices.places, nbytes),
        seq_len=verify_options.seq_len,
        decode=verify_options.decode or 0,
        text=read_sample_text(verify_options.text) if verify_options.text is not None else "",
        golden=golden,
        sketched=verify_options.write_golden is not None,
        watcher=watcher,
    )
    if candidate.dispatch is not None:
        main = candidate.dispatch.main_device
        options = replace(options, device=main, places=(main,), processes=0)
        return compare_forward_passes(candidate, original, options)
    attempts = [replace(options, device=place, places=(place,)) for place in devices.list_for(0)]
    if runs_in_processes(candidate, options):
        alone = [replace(attempt, processes=0) for attempt in attempts]
        attempts = [options] if processes is not None else [options, *alone]
    for number, attempt in enumerate(attempts, 1):
        try:
            return compare_forward_passes(candidate, original, attempt)
        except MachineError as error:
            if number == len(attempts):
                raise
            release_frames(error)
            empty_device_cache(attempt.device)
            devices.leave(attempt.device, "the model was run", error, f"{attempts[number].device}, in one process")
        finally:
            level.notes += [note for note in devices.notes if note not in level.notes]
    raise AssertionError  # there is always a device


def read_sample_text(path: Path) -> str:
    """Read the text of `--text`; raises UsageError for what is not a file of UTF-8 text."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--text {path} cannot be read: {error}", hint="give a file of UTF-8 text") from error


def _list_config_changes(checkpoint: OpenedCheckpoint, other: OpenedCheckpoint) -> tuple[str, ...]:
    """List the settings that decide what a model computes and are not those of the source."""
    compared, _ = compare_model_configs(checkpoint, other, cast=True)  # the pass computes in a type of its own
    return tuple(change.key for change in compared.changes if not change.harmless) if compared is not None else ()


def _note_limits(
    checkpoint: OpenedCheckpoint,
    other: OpenedCheckpoint | None,
    before: OpenedCheckpoint | None,
    ranks: Sequence[int],
    golden: GoldenOutput | None,
) -> Iterator[str]:
    """Yield what the pass does not show."""
    if len(ranks) > 1 and checkpoint.mesh is None:
        yield (
            f"neither {RECORD} nor --mesh says which mesh the ranks form, so "
            "their parts were joined, and no rank computed by itself"
        )
    alone = len(ranks) < 2 or checkpoint.mesh is None or checkpoint.model is None  # noqa: PLR2004 - one rank is all
    if golden is not None:
        return
    if other is None and before is not None:
        yield (
            "the quantized weights do not follow from those of the source alone, so the model was compared with "
            "itself; only the distances from the outputs before the quantization compare it with the source"
        )
    elif other is None and alone:
        yield (
            "the model was compared with itself, which shows only that it runs; --against SRC compares with the source"
        )
    elif other is None:
        yield "the model was compared with the same elements on one device; --against SRC compares with the source"
