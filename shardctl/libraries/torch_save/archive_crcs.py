"""Reads the CRC-32s that a checkpoint's zip archives state, when they are first needed."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from shardctl.libraries.torch_save.zip_records import read_archive
from shardctl.libraries.torch_save.zip_signatures import CENTRAL_MAGIC, LOCAL_MAGIC
from shardctl.storage import read_bytes
from shardctl.storage.crc_tracker import CrcRange

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardctl.storage import Source
    from shardctl.tensors.manifest import CheckpointFile

_DIRECTORY_ENTRY_STRUCT: Final = struct.Struct("<16xI8x3H12x")
"""Of an entry of the directory the CRC-32, and the lengths of name, extra field and comment (APPNOTE 4.3.12)."""
_ENTRY_CRC_OFFSET: Final = 16
"""Bytes of an entry before its CRC-32."""
_MAX_COMPARED_DIRECTORY_BYTES: Final = 64 << 10
"""Bytes of a directory that is compared with that of an archive of the same size: those of a distributed save are
alike, each has one tensor, and one read instead of five is a fifth of the time where they are small or far away."""


class _KnownDirectory(NamedTuple):
    """An archive that was read in full."""

    tail: bytes
    """All from its directory to its end, without CRC-32s."""
    crcs: tuple[int, ...]
    """Where in the tail they were."""
    ranges: tuple[CrcRange, ...]
    """With offsets from the start of the archive, and in place of the CRC-32 the number of its entry."""


class ArchiveCrcs:
    """The ranges of zip archives: their records, each of which has a CRC-32 that the directory states."""

    def __init__(self, source: Source, files: Mapping[str, CheckpointFile], *, saved: bool) -> None:
        """`saved` says that files are torch.save's even where the manifest says nothing of archives in them."""
        self._source = source
        self._files = files
        self._saved = saved
        self._known: dict[int, _KnownDirectory] = {}

    def containers(self, path: str) -> Sequence[tuple[int, int]]:
        """Return offset and size of each archive in a file."""
        file = self._files.get(path)
        if file is None or file.archives or not self._saved:
            return file.archives if file is not None else ()
        head = read_bytes(self._source, path, 0, min(file.size, len(LOCAL_MAGIC)))
        return ((0, file.size),) if head == LOCAL_MAGIC else ()

    def ranges(self, path: str, offset: int, size: int) -> Sequence[CrcRange]:
        """Return the records of one of them; raises as `read_archive`."""
        known = self._known.get(size)
        if known is not None:
            tail = read_bytes(self._source, path, offset + size - len(known.tail), len(known.tail))
            if _blank_crcs(tail, known.crcs) == known.tail:
                return [
                    each._replace(offset=offset + each.offset, crc=_parse_crc(tail, known.crcs[each.crc]))
                    for each in known.ranges
                ]
        elif read_bytes(self._source, path, offset, min(size, len(LOCAL_MAGIC))) != LOCAL_MAGIC:
            return ()  # what was saved is no archive, and nobody reads it as one
        return self._read(path, offset, size)

    def _read(self, path: str, offset: int, size: int) -> Sequence[CrcRange]:
        archive = read_archive(self._source, path, start=offset, size=size)
        records = sorted(archive.records.values(), key=lambda record: record.offset)
        if offset + size - archive.directory <= _MAX_COMPARED_DIRECTORY_BYTES:
            self._cache_directory(archive.directory, path, offset, size, [(r.name, r.offset, r.size) for r in records])
        return [CrcRange(record.name, record.offset, record.size, record.crc) for record in records]

    def _cache_directory(
        self, directory: int, path: str, offset: int, size: int, records: Sequence[tuple[str, int, int]]
    ) -> None:
        tail = read_bytes(self._source, path, directory, offset + size - directory)
        crcs: list[int] = []
        names: dict[str, int] = {}
        at = 0
        while tail[at : at + 4] == CENTRAL_MAGIC:
            _, named, extra, remark = _DIRECTORY_ENTRY_STRUCT.unpack_from(tail, at)
            full = tail[at + _DIRECTORY_ENTRY_STRUCT.size : at + _DIRECTORY_ENTRY_STRUCT.size + named].decode()
            names[full.partition("/")[2]] = len(crcs)
            crcs.append(at + _ENTRY_CRC_OFFSET)
            at += _DIRECTORY_ENTRY_STRUCT.size + named + extra + remark
        ranges = tuple(CrcRange(name, start - offset, length, names[name]) for name, start, length in records)
        self._known[size] = _KnownDirectory(_blank_crcs(tail, crcs), tuple(crcs), ranges)


def _blank_crcs(tail: bytes, crcs: Sequence[int]) -> bytes:
    data = bytearray(tail)
    for at in crcs:
        data[at : at + 4] = bytes(4)
    return bytes(data)


def _parse_crc(tail: bytes, at: int) -> int:
    return int.from_bytes(tail[at : at + 4], "little")
