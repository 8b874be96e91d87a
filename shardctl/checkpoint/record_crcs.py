"""Compares the records of zip archives with their stated CRC-32s while they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import ChangedError, format_first_few
from shardctl.base.value import value_class
from shardctl.base.workers import run_in_threads
from shardctl.checkpoint.computed_source import ComputedSource
from shardctl.libraries import registry as formats
from shardctl.libraries.torch_save.zip_records import describe_record_damage
from shardctl.storage.crc_tracker import CrcReader, CrcTracker
from shardctl.tensors.manifest import Region
from shardctl.verify.finding import CheckFinding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardctl.base.workers import ExecutionOptions
    from shardctl.checkpoint.opening import OpenedCheckpoint
    from shardctl.storage.crc_tracker import CrcDamage, CrcLists, CrcRange

_MAX_NAMES_SHOWN: Final = 4
"""Tensors of one record, or files, in a message."""


def build_crc_tracker(
    checkpoint: OpenedCheckpoint, on_damage: Callable[[OpenedCheckpoint, CrcDamage], None] | None = None
) -> CrcTracker:
    """Build what compares all that is read of a checkpoint's files; `on_damage` is told of a damaged record at once."""
    lists: CrcLists = formats.stated_crcs(checkpoint.source, checkpoint.stored)
    if checkpoint.inputs:
        others = {key: formats.stated_crcs(each.source, each.stored) for key, each in checkpoint.inputs.items()}
        lists = _InputCrcs(lists, others)
    tracker = CrcTracker(lists, (lambda damage: on_damage(checkpoint, damage)) if on_damage is not None else None)
    if isinstance(checkpoint.source, ComputedSource):
        checkpoint.source.track_reads(tracker)  # which reads files that the caller does not know of
    return tracker


@value_class
class _InputCrcs:
    """What the files of a checkpoint state, and those of the others that it is computed from."""

    first: CrcLists
    others: Mapping[str, CrcLists]
    """By the first component of the paths that their files have."""

    def containers(self, path: str) -> Sequence[tuple[int, int]]:
        """Return offset and size of each container in a file."""
        lists, own = self._find(path)
        return lists.containers(own)

    def ranges(self, path: str, offset: int, size: int) -> Sequence[CrcRange]:
        """Return the ranges of one of them."""
        lists, own = self._find(path)
        return lists.ranges(own, offset, size)

    def _find(self, path: str) -> tuple[CrcLists, str]:
        key, _, own = path.partition("/")
        return (self.others[key], own) if key in self.others else (self.first, path)


def refuse_damage(checkpoint: OpenedCheckpoint, damage: CrcDamage) -> None:
    """Raise ChangedError: what was made of the record is to be thrown away, since the next reading may be right."""
    raise ChangedError(_describe_damage(checkpoint, damage), hint="the file is damaged; fetch or copy it again")


def checked_reader(checkpoint: OpenedCheckpoint) -> CrcReader:
    """Reads the files of a checkpoint; raises as `refuse_damage` once a record was read whole and is damaged."""
    return CrcReader(checkpoint.source.read_at, build_crc_tracker(checkpoint, refuse_damage))


def check_crcs(
    checkpoint: OpenedCheckpoint, tracker: CrcTracker, effort: ExecutionOptions, *, unread: bool, whose: str = ""
) -> Iterator[CheckFinding]:
    """Yield the damaged records, and how many have nothing to compare with; `unread` reads what nobody has read yet.

    `whose` begins messages, if the checkpoint is not the one that is verified.
    """
    if unread:
        _read_rest(checkpoint, tracker, effort)
    for damage in tracker.damages:
        names = _list_damaged_tensors(checkpoint, damage)
        message = f"{whose}{_describe_damage(checkpoint, damage)}"
        yield CheckFinding("error", "crc32", message, names[0] if names else "", damage.file)
    if tracker.unstated and checkpoint.record is None:  # which has digests and hashes of all of it
        number, files = sum(tracker.unstated.values()), sorted(tracker.unstated)
        message = (
            f"{whose}{number:,} records in {format_first_few(files, _MAX_NAMES_SHOWN)} were written without a CRC-32"
        )
        yield CheckFinding("warning", "crc32", f"{message}: damage to them cannot be seen here", file=files[0])


def _read_rest(checkpoint: OpenedCheckpoint, tracker: CrcTracker, effort: ExecutionOptions) -> None:
    def stretches() -> Iterator[tuple[str, int, int]]:
        for path in checkpoint.stored.files:
            for offset, size in tracker.unread(path):
                for at in range(offset, offset + size, effort.block):
                    yield path, at, min(effort.block, offset + size - at)

    def worker() -> Callable[[tuple[str, int, int]], None]:
        buffer = memoryview(bytearray(effort.block))
        reader = CrcReader(checkpoint.source.read_at, tracker)

        def handle(stretch: tuple[str, int, int]) -> None:
            path, offset, size = stretch
            reader.read_at(path, offset, buffer[:size])

        return handle

    run_in_threads(stretches(), worker, effort.threads, effort.stop)


def _describe_damage(checkpoint: OpenedCheckpoint, damage: CrcDamage) -> str:
    names = _list_damaged_tensors(checkpoint, damage)
    holds = format_first_few(names, _MAX_NAMES_SHOWN) if names else "no tensor uses it"
    return f"{damage.file}: {describe_record_damage(damage.stated.name, damage.found, damage.stated.crc, holds)}"


def _list_damaged_tensors(checkpoint: OpenedCheckpoint, damage: CrcDamage) -> list[str]:
    """List the tensors that have elements in a record."""
    start, stop = damage.stated.offset, damage.stated.offset + damage.stated.size
    return [
        tensor.name
        for tensor in (*checkpoint.whole.tensors.values(), *checkpoint.encoded, *checkpoint.adapted)
        if any(
            isinstance(c.where, Region) and c.where.file == damage.file and start <= c.where.offset < stop
            for c in tensor.chunks
        )
    ]
