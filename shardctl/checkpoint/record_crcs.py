"""Compares the records of zip archives with their stated CRC-32s while they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import ChangedError, format_first_few
from shardctl.base.workers import run_in_threads
from shardctl.libraries import registry as formats
from shardctl.libraries.torch_save.zip_records import describe_record_damage
from shardctl.storage.crc_tracker import CrcReader, CrcTracker
from shardctl.tensors.manifest import Region
from shardctl.verify.finding import CheckFinding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardctl.base.workers import ExecutionOptions
    from shardctl.checkpoint.opening import OpenedCheckpoint
    from shardctl.storage.crc_tracker import CrcDamage

_MAX_NAMES_SHOWN: Final = 4
"""Tensors of one record, or files, in a message."""


def build_crc_tracker(
    checkpoint: OpenedCheckpoint, on_damage: Callable[[OpenedCheckpoint, CrcDamage], None] | None = None
) -> CrcTracker:
    """Build what compares all that is read of a checkpoint's files; `on_damage` is told of a damaged record at once."""
    lists = formats.stated_crcs(checkpoint.source, checkpoint.stored)
    if on_damage is None:
        return CrcTracker(lists)
    return CrcTracker(lists, lambda damage: on_damage(checkpoint, damage))


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
        for tensor in checkpoint.whole.tensors.values()
        if any(
            isinstance(c.where, Region) and c.where.file == damage.file and start <= c.where.offset < stop
            for c in tensor.chunks
        )
    ]
