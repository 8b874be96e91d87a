"""Proves a checkpoint: that its structure holds, that its content is what was recorded, that it equals its source."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from shardctl.digest import checkpoint_digest, tensor_digest
from shardctl.dtype import CASTABLE
from shardctl.errors import Interrupted, UsageError
from shardctl.execute.interrupt import stopping
from shardctl.manifest import Region
from shardctl.record import RECORD, Record, load
from shardctl.storage.local import LocalSource
from shardctl.verbs.opening import Checkpoint, Reading, opened
from shardctl.verify import content, structure
from shardctl.verify.checksums import check_sums
from shardctl.verify.finding import Finding
from shardctl.workers import Effort, Stop

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.manifest import Tensor

LEVELS: Final = ("quick", "full")
"""In order; each implies the former."""


@dataclass(slots=True)
class Level:
    """The outcome of one level of checks."""

    name: str
    """`structure`, `content` or `identity`."""
    status: Literal["passed", "failed", "skipped"] = "passed"
    reason: str = ""
    """Why it was skipped."""
    findings: list[Finding] = field(default_factory=list)
    tensors: int = 0
    """Tensors checked."""
    nbytes: int = 0
    """Bytes of tensors read."""
    seconds: float = 0.0
    strict: bool = False
    """Makes every warning an error."""

    def add(self, findings: Iterator[Finding]) -> None:
        """Note findings; an error fails the level."""
        self.findings += (replace(found, severity="error") if self.strict else found for found in findings)
        if self.errors:
            self.status = "failed"

    @property
    def errors(self) -> list[Finding]:
        """The findings that fail the level."""
        return [finding for finding in self.findings if finding.severity == "error"]


@dataclass(frozen=True, slots=True)
class Verified:
    """Everything `verify` found."""

    path: str
    against: str
    digest: str
    """Of the elements as they are now; empty below level full."""
    levels: tuple[Level, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return all(level.status != "failed" for level in self.levels)

    @property
    def findings(self) -> list[Finding]:
        """All findings, errors first."""
        return sorted((f for level in self.levels for f in level.findings), key=lambda f: f.severity)


def verify(
    path: str | Path,
    *,
    level: str = "quick",
    against: str | Path | None = None,
    reading: Reading | None = None,
    effort: Effort | None = None,
) -> Verified:
    """Check the checkpoint at `path`; every finding is in the result, and only an unreadable source raises.

    `against` compares every element, and every copy of it, with another checkpoint, in whatever layouts the two are.
    """
    if level not in LEVELS:
        raise UsageError(f"unknown level {level!r}", hint=f"the levels are {', '.join(LEVELS)}")
    effort, strict = effort or Effort(), bool(reading and reading.strict)
    first = Level("structure", strict=strict)
    began = time.monotonic()
    record = _record(Path(path))
    if record is not None:
        with closing(LocalSource(Path(path))) as source:
            first.add(structure.check_files(record, source.files()))
            if not first.errors:
                first.add(structure.check_hashes(record, source.root))
    if first.errors:  # the headers cannot be trusted to be all there
        first.seconds = time.monotonic() - began
        return _cut_short(path, level, against, first, "files are not as recorded")
    with opened(path, reading) as checkpoint:
        first.add(_structure(checkpoint))
        first.tensors, first.seconds = len(checkpoint.manifest.tensors), time.monotonic() - began
        if first.errors:
            return _cut_short(path, level, against, first, "the structure is wrong")
        levels, digest = [first], ""
        with stopping(effort.stop):
            if level == "full":
                second, digest = _content(checkpoint, effort, strict=strict)
                levels.append(second)
            if against is not None:
                third = _identity(checkpoint, against, reading, effort)
                if level != "full":
                    third.add(_copies(checkpoint, effort))
                levels.append(third)
        return Verified(str(path), str(against or ""), digest, tuple(levels))


def _cut_short(path: str | Path, level: str, against: str | Path | None, first: Level, reason: str) -> Verified:
    """The result when a failed first level makes the others meaningless."""
    names = (["content"] if level == "full" else []) + (["identity"] if against is not None else [])
    skipped = (Level(name, "skipped", reason) for name in names)
    return Verified(str(path), str(against or ""), "", (first, *skipped))


def _record(path: Path) -> Record | None:
    file = path / RECORD
    return load(file.read_bytes()) if file.is_file() else None


def _structure(checkpoint: Checkpoint) -> Iterator[Finding]:
    for warning in checkpoint.manifest.warnings:
        yield Finding("warning", "source", warning)
    yield from structure.check_modes(checkpoint.source.root, checkpoint.source.files())
    yield from structure.check_coverage(checkpoint.whole)
    if checkpoint.record:
        yield from structure.check_record(checkpoint.record, checkpoint.whole)
    elif checkpoint.model is None and checkpoint.model_error is not None:
        yield Finding("warning", "model", f"names and shapes were not checked: {checkpoint.model_error.message}")


def _content(checkpoint: Checkpoint, effort: Effort, *, strict: bool) -> tuple[Level, str]:
    level, began = Level("content", strict=strict), time.monotonic()
    tensors = list(checkpoint.whole.tensors.values())
    found = content.measure(tensors, checkpoint.source, effort)
    _ended(effort.stop)
    digests = {t.name: tensor_digest(found[t.name].sums, t.dtype, t.shape) for t in tensors}
    for tensor in tensors:
        level.add(_oddities(tensor, found[tensor.name]))
        recorded = checkpoint.record.tensors.get(tensor.name) if checkpoint.record else None
        if recorded and recorded.digest != digests[tensor.name]:
            level.add(iter([_changed(tensor, recorded.digest, digests[tensor.name])]))
    level.add(_copies(checkpoint, effort))
    level.add(check_sums(checkpoint.source, effort.stop))
    _ended(effort.stop)
    level.tensors, level.nbytes = len(tensors), sum(t.nbytes for t in tensors)
    level.seconds = time.monotonic() - began
    if not checkpoint.record:
        level.add(iter([Finding("warning", "digest", f"there is no {RECORD} to compare digests with")]))
    weights = checkpoint.manifest.tensors.values()
    return level, checkpoint_digest((t.name, t.dtype, t.shape, digests[t.name]) for t in weights)


def _copies(checkpoint: Checkpoint, effort: Effort) -> Iterator[Finding]:
    differences = content.replicas(list(checkpoint.whole.tensors.values()), checkpoint.source, effort)
    _ended(effort.stop)
    for d in differences:
        message = f"{d.tensor}: copies differ in {d.count:,} elements, first at {d.first} in {d.file}"
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
    shown = ", ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")  # noqa: PLR2004
    message = f"{tensor.name} has changed: digest {found}, recorded {recorded}; it is in {shown}"
    return Finding("error", "digest", message, tensor.name, next(iter(tensor.files), ""), str(tensor.chunks[0].box))


def _identity(
    checkpoint: Checkpoint,
    against: str | Path,
    reading: Reading | None,
    effort: Effort,
) -> Level:
    level, began = Level("identity", strict=bool(reading and reading.strict)), time.monotonic()
    with opened(against, reading) as other:
        mine, theirs = checkpoint.manifest.tensors, other.manifest.tensors
        if checkpoint.manifest.training is not None and checkpoint.record is not None:  # they were kept
            mine, theirs = checkpoint.whole.tensors, other.whole.tensors
        filtered = checkpoint.record is not None and checkpoint.record.filtered
        pairs = []
        for name in [*mine, *(n for n in theirs if n not in mine)]:
            problem = _pair(name, mine.get(name), theirs.get(name), filtered=filtered, cast=_was_cast(checkpoint))
            if problem:
                level.add(iter([problem]))
            elif name in mine:
                pairs.append((mine[name], theirs[name]))
        differences = content.compare(pairs, checkpoint.source, other.source, effort)
        _ended(effort.stop)
        for d in differences:
            message = f"{d.tensor} differs from {against} in {d.count:,} elements, first at {d.first} in {d.file}"
            level.add(iter([Finding("error", "identity", message, d.tensor, d.file, str(d.first))]))
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
    return bool(checkpoint.record and "dtype" in checkpoint.record.options)


def _ended(stop: Stop) -> None:
    if stop:
        raise Interrupted("interrupted before the end; nothing is proved", signal=stop.signal)
