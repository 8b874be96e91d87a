"""Proves a checkpoint: that its structure holds, that its content is what was recorded, that it equals its source."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardctl.digest import checkpoint_digest, tensor_digest
from shardctl.dtype import CASTABLE
from shardctl.errors import UsageError, some
from shardctl.execute.interrupt import stopping
from shardctl.manifest import Region, first_byte
from shardctl.options import SourceOptions, VerifyOptions
from shardctl.record import RECORD
from shardctl.storage.crc_tracker import CrcReader
from shardctl.storage.local import LocalSource
from shardctl.training import split_state
from shardctl.verbs.level import LEVELS, Level, LoadedRank, Verified
from shardctl.verbs.on_devices import forward_level, load_level
from shardctl.verbs.opening import Checkpoint, in_file_order, opened
from shardctl.verbs.record_crcs import check_crcs, crc_tracker
from shardctl.verify import alignment, content, structure
from shardctl.verify.checksums import check_downloads, check_sums
from shardctl.verify.finding import Finding
from shardctl.workers import Effort

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardctl.manifest import Tensor
    from shardctl.record import Record
    from shardctl.storage import Source

_PLACES = 16
"""Places of one tensor in a message: any of its files may be the wrong one."""
__all__ = ["LEVELS", "Level", "LoadedRank", "Verified", "VerifyOptions", "verify"]


class _NotAsRecordedError(Exception):
    """The files are not those of the record: headers cannot be trusted to be all there."""


def verify(
    path: str | Path,
    *,
    level: str = "quick",
    against: str | Path | None = None,
    require: str | None = None,
    trial: VerifyOptions | None = None,
    reading: SourceOptions | None = None,
    effort: Effort | None = None,
) -> Verified:
    """Check the checkpoint at `path`; every finding is in the result, and only an unreadable source raises.

    `against` compares every element, and every copy of it, with another checkpoint, in whatever layouts the two are.
    `require` is a level that must not be skipped, as one is that lacks what it needs; it is run if `level` is lower.
    `trial` says how the levels `load` and `forward` are run, and may ask for one of them.
    """
    for asked in filter(None, (level, require)):
        if asked not in LEVELS:
            raise UsageError(f"unknown level {asked!r}", hint=f"the levels are {', '.join(LEVELS)}")
    order = list(LEVELS)
    trial = trial or VerifyOptions()
    highest = max(level, require or level, trial.asked_level(), key=order.index)
    names = [n for n in LEVELS[highest] if n != "identity" or against is not None]
    if against is not None and "identity" not in names:
        names.append("identity")
    run = _Run(names, against, trial, replace(reading or SourceOptions(), kv_heads="replicate"), effort or Effort())
    levels, digest = run.of(path)
    return Verified(str(path), str(against or ""), digest, tuple(levels), LEVELS[require] if require else ())


@dataclass(slots=True)
class _Run:
    """One verification on its way."""

    names: list[str]
    """The levels to run, in order."""
    against: str | Path | None
    trial: VerifyOptions
    reading: SourceOptions
    effort: Effort

    @property
    def strict(self) -> bool:
        return self.reading.strict

    def of(self, path: str | Path) -> tuple[list[Level], str]:
        """The levels and the digest, which is empty if it was not computed."""
        first, began = Level("structure", strict=self.strict), time.monotonic()

        def recorded(source: Source, record: Record) -> None:
            first.add(structure.check_files(record, source.files()))
            if not first.errors:
                first.add(structure.check_hashes(record, source))
            if first.errors:
                raise _NotAsRecordedError

        try:
            with ExitStack() as stack:
                checkpoint = stack.enter_context(opened(path, self.reading, before=recorded))
                first.add(_structure(checkpoint))
                first.tensors = len(checkpoint.manifest.tensors)
                first.seconds = time.monotonic() - began
                if any(finding.check != alignment.CHECK for finding in first.errors):
                    return self._cut_short(first, "the structure is wrong"), ""
                other = None
                if self.against is not None:
                    other = stack.enter_context(opened(self.against, self.reading))
                rest, digest = self._rest(checkpoint, other)
                return [first, *rest], digest
        except _NotAsRecordedError:
            first.seconds = time.monotonic() - began
            return self._cut_short(first, "files are not as recorded"), ""

    def _rest(self, checkpoint: Checkpoint, other: Checkpoint | None) -> tuple[list[Level], str]:
        levels, digests = [], dict[str, str]()
        with stopping(self.effort.stop):
            for each in filter(None, (checkpoint, other)):
                each.source.heed(self.effort.stop)
            if "content" in self.names:
                level, digests = _content(checkpoint, self.effort, strict=self.strict)
                levels.append(level)
            if other is not None:
                full = "content" in self.names
                level = _identity(checkpoint, other, self.against, self.effort, strict=self.strict, full=full)
                if not full:
                    level.add(_copies(checkpoint, self.effort))
                levels.append(level)
            if "load" in self.names:
                levels.append(load_level(checkpoint, other, digests, self.trial, self.effort, strict=self.strict))
            for each in filter(None, (checkpoint, other) if levels else ()):
                each.prove()
                levels[-1].add(Finding("warning", "hash", text) for text in each.unverified())
        if "forward" in self.names:  # a signal ends it at once: there is nothing to keep
            levels.append(forward_level(checkpoint, other, self.trial, strict=self.strict))
        weights = checkpoint.manifest.tensors.values()
        if "content" not in self.names:
            return levels, ""
        return levels, checkpoint_digest((t.name, t.dtype, t.shape, digests[t.name]) for t in weights)

    def _cut_short(self, first: Level, reason: str) -> list[Level]:
        """The levels when a failed first one makes the others meaningless."""
        return [first, *(Level(name, "skipped", reason) for name in self.names[1:])]


def _odd(checkpoint: Checkpoint, whose: str = "") -> Iterator[Finding]:
    """What was odd when headers were read, and `whose` they are if not those of the checkpoint that is verified."""
    for warning in checkpoint.manifest.warnings:
        yield Finding("warning", "reading", f"{whose}{warning}")


def _structure(checkpoint: Checkpoint) -> Iterator[Finding]:
    yield from _odd(checkpoint)
    if isinstance(checkpoint.source, LocalSource):
        yield from structure.check_modes(checkpoint.source.root, checkpoint.source.files())
    yield from structure.check_coverage(checkpoint.whole)
    if checkpoint.record:
        yield from structure.check_record(checkpoint.record, checkpoint.whole)
    elif checkpoint.model is None and checkpoint.model_error is not None:
        yield Finding("warning", "model", f"names and shapes were not checked: {checkpoint.model_error.message}")
    if checkpoint.model is not None:
        mesh = checkpoint.record.mesh if checkpoint.record else None
        yield from alignment.check_alignment(checkpoint.manifest, checkpoint.model, mesh)


def _content(checkpoint: Checkpoint, effort: Effort, *, strict: bool) -> tuple[Level, dict[str, str]]:
    """The level, and the digest of each tensor as it is now."""
    level, began = Level("content", strict=strict), time.monotonic()
    tensors = list(checkpoint.whole.tensors.values())
    tracker = crc_tracker(checkpoint)
    found = content.measure(sorted(tensors, key=first_byte), CrcReader(checkpoint.source.read_at, tracker), effort)
    digests = {t.name: tensor_digest(found[t.name].sums, t.dtype, t.shape) for t in tensors}
    for tensor in tensors:
        level.add(_oddities(tensor, found[tensor.name]))
        recorded = checkpoint.record.tensors.get(tensor.name) if checkpoint.record else None
        if recorded and recorded.digest != digests[tensor.name]:
            level.add(iter([_changed(tensor, recorded.digest, digests[tensor.name])]))
    level.add(_copies(checkpoint, effort))
    level.add(check_crcs(checkpoint, tracker, effort, unread=True))
    level.add(check_sums(checkpoint.source, effort.stop))
    level.add(check_downloads(checkpoint.source, effort.stop))
    level.tensors, level.nbytes = len(tensors), sum(t.nbytes for t in tensors)
    level.seconds = time.monotonic() - began
    if not checkpoint.record:
        level.add(iter([Finding("warning", "digest", f"there is no {RECORD} to compare digests with")]))
    return level, digests


def _copies(checkpoint: Checkpoint, effort: Effort) -> Iterator[Finding]:
    differences = content.replicas(list(checkpoint.whole.tensors.values()), checkpoint.source, effort)
    for d in differences:
        message = f"{d.tensor}: copies differ in {d.count:,} elements, first at {d.first} in {d.file}"
        if d.other not in {"", d.file}:
            message += f" and {d.other}"
        yield Finding("error", "replicas", message, d.tensor, d.file, str(d.first))


def _oddities(tensor: Tensor, found: content.Content) -> Iterator[Finding]:
    size = tensor.size
    if found.nans:
        yield Finding("warning", "values", f"{tensor.name} holds {found.nans:,} NaN of {size:,} elements", tensor.name)
    if found.infinities:
        message = f"{tensor.name} holds {found.infinities:,} infinities of {size:,} elements"
        yield Finding("warning", "values", message, tensor.name)
    if found.zero and size > 1 and tensor.name.endswith("weight"):
        yield Finding("warning", "values", f"{tensor.name} is all zeros", tensor.name)


def _changed(tensor: Tensor, recorded: str, found: str) -> Finding:
    places = [f"{c.where.file} {c.box}" for c in tensor.chunks if isinstance(c.where, Region)]
    message = f"{tensor.name} has changed: digest {found}, recorded {recorded}; it is in {some(places, _PLACES)}"
    return Finding("error", "digest", message, tensor.name, next(iter(tensor.files), ""), str(tensor.chunks[0].box))


def _identity(
    checkpoint: Checkpoint, other: Checkpoint, against: str | Path | None, effort: Effort, *, strict: bool, full: bool
) -> Level:
    level, began = Level("identity", strict=strict), time.monotonic()
    level.add(_odd(other, f"in {against}: "))
    mine, theirs = checkpoint.manifest.tensors, other.manifest.tensors
    if checkpoint.record is not None and any(map(split_state, checkpoint.record.tensors)):  # states were kept
        mine, theirs = checkpoint.whole.tensors, other.whole.tensors
    filtered = checkpoint.record is not None and checkpoint.record.filtered
    pairs = []
    for name in [*mine, *(n for n in theirs if n not in mine)]:
        problem = _pair(name, mine.get(name), theirs.get(name), filtered=filtered, cast=_was_cast(checkpoint))
        if problem:
            level.add(iter([problem]))
        elif name in mine:
            pairs.append((mine[name], theirs[name]))
    tracker = crc_tracker(other)
    theirs_read = CrcReader(other.source.read_at, tracker)
    in_file_order(pairs, checkpoint, other)
    differences = content.compare(pairs, checkpoint.source, theirs_read, effort)
    for d in differences:
        message = f"{d.tensor} differs from {against} in {d.count:,} elements, first at {d.first} in {d.file}"
        level.add(iter([Finding("error", "identity", message, d.tensor, d.file, str(d.first))]))
    level.add(check_crcs(other, tracker, effort, unread=full, whose=f"in {against}: "))
    level.tensors, level.nbytes = len(pairs), sum(t.nbytes for t, _ in pairs)
    level.seconds = time.monotonic() - began
    return level


def _pair(name: str, mine: Tensor | None, theirs: Tensor | None, *, filtered: bool, cast: bool) -> Finding | None:
    if mine is None:
        return None if filtered else Finding("error", "identity", f"{name} is missing; the source has it", name)
    if theirs is None:
        return Finding("error", "identity", f"{name} is not in the source", name)
    if mine.shape != theirs.shape:
        return Finding("error", "identity", f"{name} is {list(mine.shape)}; the source has {list(theirs.shape)}", name)
    if mine.dtype != theirs.dtype and not (cast and {mine.dtype.name, theirs.dtype.name} <= CASTABLE):
        return Finding("error", "identity", f"{name} is {mine.dtype}; the source has {theirs.dtype}", name)
    return None


def _was_cast(checkpoint: Checkpoint) -> bool:
    return bool(checkpoint.record and not {"dtype", "retyped"}.isdisjoint(checkpoint.record.options))
