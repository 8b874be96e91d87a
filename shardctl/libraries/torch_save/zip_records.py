"""Locates the records of an uncompressed zip archive by a strict reading of its directory.

Python's `zipfile` is lenient where two readers can disagree, takes a CRC-32 that torch left out for a wrong one, and
reads a local header only when the record is opened. Layout: PKWARE APPNOTE 6.3.9, sections 4.3 and 4.5.3.
"""

from __future__ import annotations

import re
import struct
import zlib
from typing import TYPE_CHECKING, Final, NoReturn

from shardctl.base.errors import HostileError, SourceError, UnsupportedError
from shardctl.base.value import value_class
from shardctl.libraries.torch_save.zip_signatures import (
    CENTRAL,
    CENTRAL_MAGIC,
    END,
    END64,
    END64_MAGIC,
    END_MAGIC,
    FULL2,
    FULL4,
    LOCAL,
    LOCAL_MAGIC,
    LOCATOR,
    LOCATOR_MAGIC,
)
from shardctl.storage import read_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardctl.storage import Source

_ENCRYPTION_FLAGS: Final = 1 << 0 | 1 << 6 | 1 << 13
_DATA_DESCRIPTOR_FLAG: Final = 1 << 3
"""Sizes and CRC follow the data, so the local header may have zeros."""
_MAX_DIRECTORY_BYTES: Final = 64 << 20
"""Largest central directory, in bytes; 100,000 records take 7 MB."""
_MAX_ARCHIVE_RECORDS: Final = 500_000
_HEADER_READ_BYTES: Final = 64 << 10
"""Bytes of file read at once for local headers that lie close together: a read costs more than this many bytes."""
_REFETCH_FILE_HINT: Final = "the file was truncated or its copy is incomplete; fetch it again"
_DRIVE_LETTER_PATTERN: Final = re.compile(r"[A-Za-z]:")


@value_class
class ZipRecord:
    """A stored record."""

    name: str
    """Its path below the archive's root folder."""
    offset: int
    """Absolute byte offset of its data in the file."""
    size: int
    """Bytes."""
    crc: int
    """CRC-32 of its data; 0 where the writer did not compute one, as torch after `set_crc32_options(False)` and under
    `skip_data`."""


@value_class
class ZipArchive:
    """All records of an archive."""

    path: str
    root: str
    """The one folder that all records lie in."""
    records: Mapping[str, ZipRecord]
    """By name, in the order of the directory."""
    directory: int
    """Absolute byte offset of the directory."""


def read_record(source: Source, path: str, record: ZipRecord) -> bytes:
    """Read the whole data of a record of the file `path`.

    Raises SourceError if its CRC-32 is not the one that the archive states.
    """
    data = read_bytes(source, path, record.offset, record.size)
    if record.crc and zlib.crc32(data) != record.crc:
        raise SourceError(
            f"{path}: {describe_record_damage(record.name, zlib.crc32(data), record.crc)}",
            hint="fetch or copy the file again",
        )
    return data


def describe_record_damage(name: str, found: int, stated: int, holds: str = "") -> str:
    """Return what messages say of a record whose bytes are not the ones that were written.

    `holds` is what it is for.
    """
    what = f"the record {_format_record_name(name.encode())}{f' ({holds})' if holds else ''}"
    return f"{what} is damaged: its CRC-32 is {found:08x}, and {stated:08x} was written"


@value_class
class _DirectoryEntry:
    """What the central directory says of a record."""

    full: bytes
    flags: int
    method: int
    crc: int
    size: int
    header: int
    """Offset of the local header from the archive's start."""


def read_archive(source: Source, path: str, *, start: int = 0, size: int | None = None) -> ZipArchive:
    """Read the directory of the archive in `size` bytes (default: the rest) of a file from byte `start`.

    Raises:
        SourceError: truncated or malformed, duplicate records, or a record described in two different ways.
        HostileError: a name that leaves the root folder, or records that overlap.
        UnsupportedError: compressed, encrypted or spread over several disks.
    """
    if size is None:
        size = source.files()[path].size - start
    return _ZipReader(source, path, start, size).archive()


@value_class
class _ZipReader:
    source: Source
    path: str
    start: int
    size: int

    def archive(self) -> ZipArchive:
        first, length, count = self._end()
        entries = list(self._parse_entries(self._read(first, length), count))
        names, root = self._read_names(entries)
        records = self._locate_records(entries, names, first)
        return ZipArchive(self.path, root, records, self.start + first)

    def _read(self, offset: int, size: int) -> bytes:
        return read_bytes(self.source, self.path, self.start + offset, size)

    def _raise_malformed(self, what: str, hint: str | None = None) -> NoReturn:
        raise SourceError(f"{self.path}: the zip archive {what}", hint=hint)

    # The end: where the directory is

    def _end(self) -> tuple[int, int, int]:
        """Return offset, length and number of entries of the central directory."""
        if self.size < END.size:
            self._raise_malformed("is cut off before its directory", _REFETCH_FILE_HINT)
        at = self.size - END.size
        end = END.unpack(self._read(at, END.size))
        if end[0] != END_MAGIC or end[7]:
            self._raise_malformed("does not end with its directory", _REFETCH_FILE_HINT)
        _, disk, first_disk, here, count, length, first, _ = end
        locator_at = at - LOCATOR.size
        tail = self._read(locator_at, LOCATOR.size) if locator_at >= END64.size else b""
        if tail.startswith(LOCATOR_MAGIC):
            at = locator_at - END64.size
            disk, first_disk, here, count, length, first = self._read_zip64_end(tail, at, end)
        if disk or first_disk or here != count:
            raise UnsupportedError(f"{self.path}: the zip archive is spread over several disks")
        if first + length != at:
            self._raise_malformed(
                f"has its directory end at byte {first + length:,} where its end record begins at {at:,}",
                _REFETCH_FILE_HINT,
            )
        if length > _MAX_DIRECTORY_BYTES or count > _MAX_ARCHIVE_RECORDS:
            raise HostileError(f"{self.path}: the zip archive has a directory of {count:,} records, {length:,} bytes")
        return first, length, count

    def _read_zip64_end(self, tail: bytes, at: int, end: tuple[int, ...]) -> tuple[int, ...]:
        _, disk, where, disks = LOCATOR.unpack(tail)
        if disk or disks > 1:
            raise UnsupportedError(f"{self.path}: the zip archive is spread over several disks")
        if where != at:
            self._raise_malformed(
                f"points to its zip64 end record at byte {where:,}, which should be at {at:,}", _REFETCH_FILE_HINT
            )
        signature, length, _, _, *wide = END64.unpack(self._read(at, END64.size))
        if signature != END64_MAGIC or length != END64.size - 12:
            self._raise_malformed("has a malformed zip64 end record")
        for narrow, value, full in zip(end[1:7], wide, (FULL2,) * 4 + (FULL4,) * 2, strict=True):
            if narrow not in (full, value):
                self._raise_malformed(f"has two end records that disagree: {narrow:,} and {value:,}")
        return tuple(wide)

    # The directory

    def _parse_entries(self, directory: bytes, count: int) -> Iterator[_DirectoryEntry]:
        at = 0
        for _ in range(count):
            if at + CENTRAL.size > len(directory):
                self._raise_malformed(f"has fewer records than the {count:,} it declares")
            fields = CENTRAL.unpack_from(directory, at)
            signature, _, _, flags, method, _, _, crc, packed, size, named, extra, remark, disk, _, _, header = fields
            at += CENTRAL.size
            if signature != CENTRAL_MAGIC or at + named + extra + remark > len(directory):
                self._raise_malformed("has a malformed directory")
            full = directory[at : at + named]
            fields64 = self._read_zip64_sizes(directory[at + named : at + named + extra], (size, packed, header), full)
            size, packed, header = fields64
            at += named + extra + remark
            if disk:
                raise UnsupportedError(f"{self.path}: the zip archive is spread over several disks")
            self._check_stored(full, flags, method, packed, size)
            yield _DirectoryEntry(full, flags, method, crc, size, header)
        if at != len(directory):
            self._raise_malformed(f"has more records than the {count:,} it declares")

    def _read_zip64_sizes(self, extra: bytes, values: tuple[int, ...], full: bytes) -> list[int]:
        """Return the sizes and the offset, those of 32 bits that are full replaced in order from the zip64 field."""
        wide = b""
        at = 0
        while at + 4 <= len(extra):
            kind, length = struct.unpack_from("<2H", extra, at)
            if kind == 1:
                if wide:
                    self._raise_malformed(f"has two zip64 fields for {_format_record_name(full)}")
                wide = extra[at + 4 : at + 4 + length]
            at += 4 + length
        if at != len(extra):
            self._raise_malformed(f"has a malformed extra field for {_format_record_name(full)}")
        needed = values.count(FULL4)
        if len(wide) < 8 * needed:
            self._raise_malformed(f"lacks the zip64 field of {_format_record_name(full)}")
        replacements = iter(struct.unpack_from(f"<{needed}Q", wide))
        return [next(replacements) if value == FULL4 else value for value in values]

    def _check_stored(self, full: bytes, flags: int, method: int, packed: int, size: int) -> None:
        if flags & _ENCRYPTION_FLAGS:
            raise UnsupportedError(f"{self.path}: record {_format_record_name(full)} is encrypted")
        if method:
            raise UnsupportedError(
                f"{self.path}: record {_format_record_name(full)} is compressed (zip method {method})",
                hint="parts of it cannot be read alone; load the file and save it again with torch.save",
            )
        if packed != size:
            self._raise_malformed(f"declares two sizes for {_format_record_name(full)}: {packed:,} and {size:,}")

    # Names

    def _read_names(self, entries: Sequence[_DirectoryEntry]) -> tuple[list[str], str]:
        """Return the name of each entry below the root, and the root; empty for entries that are folders."""
        names: list[str] = []
        roots: dict[str, bytes] = {}
        seen: set[str] = set()
        for entry in entries:
            try:
                full = entry.full.decode()
            except UnicodeDecodeError:
                self._raise_malformed(f"has the record name {_format_record_name(entry.full)}, which is not UTF-8")
            folder = full.endswith("/") and not entry.size
            parts = full.removesuffix("/" if folder else "").split("/")
            if (
                not {"", ".", ".."}.isdisjoint(parts)
                or "\\" in full
                or "\0" in full
                or _DRIVE_LETTER_PATTERN.match(full)
            ):
                raise HostileError(
                    f"{self.path}: the zip archive has the record {_format_record_name(entry.full)}, which "
                    "may leave its folder",
                    hint="torch.save never writes such a name; do not unpack this file",
                )
            key = "/".join(parts).lower()  # torch looks names up without regard to case
            if key in seen:
                self._raise_malformed(f"has the record {_format_record_name(entry.full)} twice")
            seen.add(key)
            if len(parts) == 1 and not folder:
                self._raise_malformed(
                    f"has the record {_format_record_name(entry.full)} outside of any folder, unlike torch.save"
                )
            roots.setdefault(parts[0], entry.full)
            if len(roots) > 1:
                self._raise_malformed(
                    f"has records in more than one folder: {' and '.join(map(_format_record_name, roots.values()))}"
                )
            names.append("" if folder else "/".join(parts[1:]))
        return names, next(iter(roots), "")

    # Local headers: where the data is

    def _locate_records(
        self, entries: Sequence[_DirectoryEntry], names: Sequence[str], directory: int
    ) -> dict[str, ZipRecord]:
        found: dict[str, ZipRecord] = {}
        order = sorted(range(len(entries)), key=lambda i: entries[i].header)
        free = 0
        for i, header in zip(order, self._read_local_headers([entries[i] for i in order], directory), strict=True):
            entry = entries[i]
            data = entry.header + self._check_local(entry, header)
            if entry.header < free or data + entry.size > directory:
                raise HostileError(
                    f"{self.path}: the zip archive has record {_format_record_name(entry.full)} overlap "
                    "another or the directory",
                    hint="no writer does this; it makes small files unpack to huge ones",
                )
            free = data + entry.size
            if names[i]:
                found[names[i]] = ZipRecord(names[i], self.start + data, entry.size, entry.crc)
        return {name: found[name] for name in names if name}

    def _read_local_headers(self, entries: Sequence[_DirectoryEntry], directory: int) -> Iterator[bytes]:
        """Yield the local header of each entry with its name; neighbours share a read."""
        sizes = ((entry.header, LOCAL.size + len(entry.full)) for entry in entries)
        self.source.expect((self.path, self.start + at, size) for at, size in sizes if at + size <= directory)
        run, base = b"", 0
        for i, entry in enumerate(entries):
            end = entry.header + LOCAL.size + len(entry.full)
            if end > directory:
                self._raise_malformed(
                    f"has the header of {_format_record_name(entry.full)} at byte {entry.header:,}, inside "
                    "or after its directory"
                )
            if end > base + len(run):
                base = entry.header
                for other in entries[i : i + _HEADER_READ_BYTES // LOCAL.size]:
                    reach = other.header + LOCAL.size + len(other.full)
                    if reach > max(end, base + _HEADER_READ_BYTES) or reach > directory:
                        break
                    end = max(end, reach)
                run = self._read(base, end - base)
            yield run[entry.header - base : entry.header - base + LOCAL.size + len(entry.full)]

    def _check_local(self, entry: _DirectoryEntry, header: bytes) -> int:
        """Return the length of the local header with its extra field, once it agrees with the directory."""
        signature, _, flags, method, _, _, crc, packed, size, named, extra = LOCAL.unpack_from(header)
        later = bool(flags & _DATA_DESCRIPTOR_FLAG)
        agrees = (
            signature == LOCAL_MAGIC
            and named == len(entry.full)
            and header[LOCAL.size :] == entry.full
            and method == entry.method
            and not flags & _ENCRYPTION_FLAGS
            and (crc == entry.crc or (later and not crc))
            and all(n in (entry.size, FULL4) or (later and not n) for n in (packed, size))
        )
        if not agrees:
            self._raise_malformed(
                f"describes record {_format_record_name(entry.full)} in two ways, in its directory and at "
                f"byte {entry.header:,}"
            )
        return LOCAL.size + len(entry.full) + int(extra)


def _format_record_name(name: bytes) -> str:
    """Format a record's name for a message: quoted, escaped and short."""
    return ascii(name[:100].decode("utf-8", "replace"))
