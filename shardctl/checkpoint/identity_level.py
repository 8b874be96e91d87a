"""Compares every element of a checkpoint with its source: tensors, casts, configs and auxiliary files."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from shardctl.amounts import format_plural
from shardctl.checkpoint.companion_comparison import check_companions, compare_companions
from shardctl.checkpoint.merge_comparison import explain_merge_differences
from shardctl.checkpoint.merging import MERGED
from shardctl.checkpoint.opening import in_file_order
from shardctl.checkpoint.record_crcs import build_crc_tracker, check_crcs
from shardctl.dtype import CASTABLE, SMALL_FLOATS
from shardctl.errors import format_first_few
from shardctl.record import RECORD
from shardctl.storage.crc_tracker import CrcReader
from shardctl.training import split_state_name
from shardctl.verify import content
from shardctl.verify.finding import CheckFinding
from shardctl.verify.level import LevelResult

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from shardctl.checkpoint.opening import OpenedCheckpoint
    from shardctl.manifest import Tensor
    from shardctl.workers import ExecutionOptions


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
) -> LevelResult:
    """Return the level: what of `checkpoint` is not as in `other`, which messages call `against`.

    `full` says that all of the checkpoint was read before, `merged` that an adapter was merged into `other`. Tensors
    in files that are known to be `equal` are not read.
    """
    level, began = LevelResult("identity", strict=strict), time.monotonic()
    level.add(list_warnings(other, f"in {against}: "))
    if not merged and _has_merged(checkpoint) and not _has_merged(other):
        assert checkpoint.record is not None  # noqa: S101 - asked before
        message = f"the adapter {checkpoint.record.options[MERGED]} was merged into it; name it with --merge"
        level.add(iter([CheckFinding("warning", "identity", message)]))
    if other.part:
        level.notes.append(f"compared with a part of {against}: {other.part}")
    mine, theirs = checkpoint.manifest.tensors, other.manifest.tensors
    if checkpoint.record is not None and any(map(split_state_name, checkpoint.record.tensors)):  # states were kept
        mine, theirs = checkpoint.whole.tensors, other.whole.tensors
    filtered = checkpoint.record is not None and checkpoint.record.filtered
    retyped = [name for name, tensor in mine.items() if name in theirs and tensor.dtype != theirs[name].dtype]
    pairs, cast = [], checkpoint.record is None or _has_cast(checkpoint)
    if checkpoint.record is None and retyped:
        example = f"{mine[retyped[0]].dtype} here and {theirs[retyped[0]].dtype} there"
        message = (
            f"{format_first_few(retyped)} have other element types than the source ({example}), and there is no "
            f"{RECORD} that says why: the source was cast to the types here before it was compared"
        )
        level.add(iter([CheckFinding("warning", "identity", message)]))
    companions = compare_companions(checkpoint, other, cast=_has_cast(checkpoint) or bool(retyped or other.encoded))
    level.add(check_companions(checkpoint, companions))
    level.notes += companions.notes
    for name in [*mine, *(n for n in theirs if n not in mine)]:
        problem = _check_pair(name, mine.get(name), theirs.get(name), filtered=filtered, cast=cast)
        if problem:
            level.add(iter([problem]))
        elif name in mine:
            pairs.append((mine[name], theirs[name]))
    alike = [pair for pair in pairs if _lie_in_equal_files(*pair, equal)]
    if alike:
        pairs = [pair for pair in pairs if not _lie_in_equal_files(*pair, equal)]
        level.equal_files = tuple(sorted(equal))
        level.notes.append(
            f"{format_plural(len(alike), 'tensor')} were not read from {against}, because "
            f"{format_plural(len(equal), 'file')} here have the hashes that it states"
        )
    tracker = build_crc_tracker(other)
    theirs_read = CrcReader(other.source.read_at, tracker)
    in_file_order(pairs, checkpoint, other)
    differences = content.compare_tensors(pairs, checkpoint.source, theirs_read, effort, "identity")
    differences, explained = explain_merge_differences(checkpoint, other, differences)
    level.add(explained)
    for d in differences:
        message = f"{d.tensor} differs from {against} in {d.count:,} elements, first at {d.first} in {d.file}"
        message += f" ({d.distance})" if d.distance is not None else ""
        level.add(iter([CheckFinding("error", "identity", message, d.tensor, d.file, str(d.first))]))
    level.add(check_crcs(other, tracker, effort, unread=full and not alike, whose=f"in {against}: "))
    level.tensors, level.nbytes = len(alike) + len(pairs), sum(t.nbytes for t, _ in pairs)
    level.seconds = time.monotonic() - began
    return level


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
