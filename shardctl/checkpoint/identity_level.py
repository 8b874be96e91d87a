"""Compares every element of a checkpoint with its source: tensors, casts, configs and auxiliary files."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from shardctl.base.amounts import format_plural
from shardctl.base.dtype import BY_NAME, CASTABLE, FLOATS, SMALL_FLOATS
from shardctl.base.errors import SourceError, UsageError, format_first_few
from shardctl.checkpoint.adapters.merge_comparison import explain_merge_differences
from shardctl.checkpoint.adapters.merging import MERGED
from shardctl.checkpoint.companion_comparison import check_companions, compare_companions
from shardctl.checkpoint.computed_source import ComputedSource
from shardctl.checkpoint.opening import in_file_order
from shardctl.checkpoint.quantization.dequantizing import QUANTIZED, dequantize_checkpoint
from shardctl.checkpoint.record_crcs import build_crc_tracker, check_crcs
from shardctl.checkpoint.state_comparison import check_optimizer_settings, pair_states
from shardctl.libraries.files.extra_tensors import add_extra_tensors, is_extra_name
from shardctl.storage.crc_tracker import CrcReader
from shardctl.tensors.record import OVERFLOWED, RECORD
from shardctl.verify import content
from shardctl.verify.cast_losses import CastLosses
from shardctl.verify.finding import CheckFinding
from shardctl.verify.level import LevelResult
from shardctl.verify.partial_casts import CHECK as CAST
from shardctl.verify.partial_casts import find_partial_casts

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from shardctl.base.workers import ExecutionOptions
    from shardctl.checkpoint.opening import OpenedCheckpoint
    from shardctl.tensors.manifest import Tensor

_Pair = tuple["Tensor", "Tensor"]


def list_warnings(checkpoint: OpenedCheckpoint, whose: str = "") -> Iterator[CheckFinding]:
    """List what was odd when headers were read, and `whose` they are if not the verified checkpoint's."""
    for warning in checkpoint.manifest.warnings:
        yield CheckFinding("warning", "reading", f"{whose}{warning}")


def run_identity_level(
    checkpoint: OpenedCheckpoint,
    other: OpenedCheckpoint,
    against: str,
    effort: ExecutionOptions,
    *,
    strict: bool,
    full: bool,
    merged: bool,
    equal: Collection[str],
    unquantized: OpenedCheckpoint | None = None,
) -> LevelResult:
    """Return the level: what of `checkpoint` is not as in `other`, which messages call `against`.

    `full` says that all of the checkpoint was read before, `merged` that an adapter was merged into `other`. Tensors
    in files that are known to be `equal` are not read. `unquantized` is `other` before it was quantized as `checkpoint`
    is, if it was.
    """
    level, began = LevelResult("identity", strict=strict), time.monotonic()
    level.add(list_warnings(other, f"in {against}: "))
    if not merged and _has_merged(checkpoint) and not _has_merged(other):
        assert checkpoint.record is not None  # noqa: S101 - asked before
        message = f"the adapter {checkpoint.record.options[MERGED]} was merged into it; name it with --merge"
        level.add(iter([CheckFinding("warning", "identity", message)]))
    if other.part:
        level.notes.append(f"compared with a part of {against}: {other.part}")
    pairs = _pair_tensors(level, checkpoint, other, against)
    alike = [pair for pair in pairs if _lie_in_equal_files(*pair, equal)]
    if alike:
        pairs = [pair for pair in pairs if not _lie_in_equal_files(*pair, equal)]
        level.equal_files = tuple(sorted(equal))
        level.notes.append(
            f"{format_plural(len(alike), 'tensor')} were not read from {against}, because "
            f"{format_plural(len(equal), 'file')} here have the hashes that it states"
        )
    _compare_values(level, checkpoint, other, pairs, against, effort, merged=merged, unread=full and not alike)
    if full and unquantized is not None and unquantized is not other:
        _measure_quantization(level, checkpoint, unquantized, effort)
    level.tensors, level.nbytes = len(alike) + len(pairs), sum(t.nbytes for t, _ in pairs)
    level.seconds = time.monotonic() - began
    return level


def _pair_tensors(
    level: LevelResult, checkpoint: OpenedCheckpoint, other: OpenedCheckpoint, against: str
) -> list[_Pair]:
    """Pair the tensors of both whose values can be compared; what else differs is added to `level`."""
    states = pair_states(checkpoint, other)
    level.add(check_optimizer_settings(states))
    mine = {**add_extra_tensors(checkpoint.manifest).tensors, **states.ours}
    theirs = {**add_extra_tensors(other.manifest).tensors, **states.theirs}
    level.notes += _note_absent_extra(mine, theirs, against)
    theirs = {name: tensor for name, tensor in theirs.items() if name in mine or not is_extra_name(name)}
    filtered = checkpoint.record is not None and checkpoint.record.filtered
    retyped = [name for name, tensor in mine.items() if name in theirs and tensor.dtype != theirs[name].dtype]
    cast = checkpoint.record is None or _has_cast(checkpoint)
    if checkpoint.record is None and retyped:
        example = f"{mine[retyped[0]].dtype} here and {theirs[retyped[0]].dtype} there"
        message = (
            f"{format_first_few(retyped)} have other element types than the source ({example}), and there is no "
            f"{RECORD} that says why: the source was cast to the types here before it was compared"
        )
        level.add(iter([CheckFinding("warning", "identity", message)]))
        level.add(find_partial_casts([(mine[name], theirs[name]) for name in mine if name in theirs]))
    level.add(_find_unrecorded_casts(checkpoint, mine, theirs))
    companions = compare_companions(checkpoint, other, cast=_has_cast(checkpoint) or bool(retyped or other.encoded))
    level.add(check_companions(checkpoint, companions))
    level.notes += companions.notes
    if companions.alone:
        level.notes.append(f"auxiliary files were not compared: {other.source.name} is one file")
    pairs = []
    for name in [*mine, *(n for n in theirs if n not in mine)]:
        problem = _check_pair(name, mine.get(name), theirs.get(name), filtered=filtered, cast=cast)
        if problem:
            level.add(iter([problem]))
        elif name in mine:
            pairs.append((mine[name], theirs[name]))
    return pairs


def _find_unrecorded_casts(
    checkpoint: OpenedCheckpoint, mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]
) -> Iterator[CheckFinding]:
    """Find tensors of other types than the recorded cast gives; layouts that choose types of their own are left out."""
    options = checkpoint.record.options if checkpoint.record is not None else {}
    dtype = FLOATS.get(options.get("dtype", ""))
    if dtype is None or "retyped" in options or QUANTIZED in options:
        return
    for name, tensor in mine.items():
        if name not in theirs or tensor.dtype in (dtype, theirs[name].dtype) or tensor.dtype.name not in CASTABLE:
            continue
        message = f"{name} is {tensor.dtype}, but {RECORD} says that {theirs[name].dtype} was cast to {dtype}"
        yield CheckFinding("error", CAST, message, name)


def _compare_values(
    level: LevelResult,
    checkpoint: OpenedCheckpoint,
    other: OpenedCheckpoint,
    pairs: list[_Pair],
    against: str,
    effort: ExecutionOptions,
    *,
    merged: bool,
    unread: bool,
) -> None:
    """Compare the elements of the pairs, and what the files of `other` state of theirs."""
    tracker, losses = build_crc_tracker(other), CastLosses()
    theirs_read = CrcReader(other.source.read_at, tracker)
    in_file_order(pairs, checkpoint, other)
    differences = content.compare_tensors(pairs, checkpoint.source, theirs_read, effort, "identity", losses)
    if merged:
        differences, explained = explain_merge_differences(checkpoint, other, differences)
        level.add(explained)
    for d in differences:
        message = f"{d.tensor} differs from {against} in {d.count:,} elements, first at {d.first} in {d.file}"
        message += f" ({d.distance})" if d.distance is not None else ""
        level.add(iter([CheckFinding("error", "identity", message, d.tensor, d.file, str(d.first))]))
    level.add(_find_lost_values(checkpoint, other, losses))
    level.unrounded += filter(None, [losses.summarize("cast")])
    level.add(check_crcs(other, tracker, effort, unread=unread, whose=f"in {against}: "))


def _find_lost_values(
    checkpoint: OpenedCheckpoint, other: OpenedCheckpoint, losses: CastLosses
) -> Iterator[CheckFinding]:
    """Find the tensors that are infinite where those of the source are finite."""
    computed = other.source.list_overflows() if isinstance(other.source, ComputedSource) else {}
    allowed = checkpoint.record is not None and OVERFLOWED in checkpoint.record.options
    for name, count in sorted({**computed, **losses.overflowed}.items()):
        message = f"{name} is infinite in {format_plural(count, 'element')} in which the source is finite"
        if allowed:
            message += f"; {RECORD} says that this was allowed"
        yield CheckFinding("warning" if allowed else "error", "values", message, name)


def _measure_quantization(
    level: LevelResult, checkpoint: OpenedCheckpoint, unquantized: OpenedCheckpoint, effort: ExecutionOptions
) -> None:
    """Note how far quantized weights, once decoded, are from those of the source."""
    try:
        decoded = dequantize_checkpoint(checkpoint, BY_NAME["F32"], effort.threads)
        theirs = unquantized.manifest.tensors
        pairs = [
            (tensor, theirs[name])
            for name, tensor in decoded.manifest.tensors.items()
            if tensor.encoded_bytes is not None and name in theirs and tensor.shape == theirs[name].shape
        ]
        in_file_order(pairs, decoded, unquantized)
        found = content.measure_distances(pairs, decoded.source, unquantized.source, effort, "unquantized source")
    except (SourceError, UsageError) as error:
        level.notes.append(f"the distance from the source before it was quantized was not measured: {error.message}")
        return
    level.unrounded += filter(None, [found.summarize("quantized")])


def _note_absent_extra(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor], against: str) -> list[str]:
    """Note which extra tensors were not compared, because only the source has them."""
    absent = [tensor.chunks[0].name for name, tensor in theirs.items() if is_extra_name(name) and name not in mine]
    return [f"not compared, because only {against} has them: {format_first_few(absent)}"] if absent else []


def _lie_in_equal_files(mine: Tensor, theirs: Tensor, equal: Collection[str]) -> bool:
    """Return whether two tensors are the same bytes of files that are known to be equal."""
    return mine.chunks == theirs.chunks and mine.dtype == theirs.dtype and set(equal).issuperset(mine.files)


def _check_pair(
    name: str, mine: Tensor | None, theirs: Tensor | None, *, filtered: bool, cast: bool
) -> CheckFinding | None:
    if mine is None:
        return None if filtered else CheckFinding("error", "identity", f"{name} is missing; the source has it", name)
    if theirs is None:
        return CheckFinding("error", "identity", f"{name} is not in the source", name)
    if mine.shape != theirs.shape:
        return CheckFinding(
            "error", "identity", f"{name} is {list(mine.shape)}; the source has {list(theirs.shape)}", name
        )
    castable = mine.dtype.name in CASTABLE and theirs.dtype.name in CASTABLE | SMALL_FLOATS
    if mine.dtype != theirs.dtype and not (cast and castable):
        return CheckFinding("error", "identity", f"{name} is {mine.dtype}; the source has {theirs.dtype}", name)
    return None


def _has_cast(checkpoint: OpenedCheckpoint) -> bool:
    return bool(checkpoint.record and not {"dtype", "retyped"}.isdisjoint(checkpoint.record.options))


def _has_merged(checkpoint: OpenedCheckpoint) -> bool:
    return bool(checkpoint.record and MERGED in checkpoint.record.options)
