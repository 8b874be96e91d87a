"""Describes what one worker made: its files, its digest sums, and the hashes of all other bytes."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import field
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import SourceError, format_first_few
from shardctl.base.value import value_class
from shardctl.storage.crc_tracker import CrcPiece, CrcRange, CrcShare
from shardctl.tensors.digest import DigestSums
from shardctl.tensors.record import HashedSpans

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardctl.storage import FileStat

SCHEMA: Final = "shardctl.part/5"


@value_class
class WorkerPart:
    """A finished part of a result; the parts of all workers are the whole, and one part may be all of it."""

    files: Mapping[str, int]
    """Bytes of each file that this worker wrote."""
    source_sums: Mapping[str, DigestSums]
    """Digest sums by tensor, as it was read: of the elements that count here."""
    output_sums: Mapping[str, DigestSums]
    """And as it was written."""
    whole_sums: Mapping[str, DigestSums]
    """Of the tensors of which all elements were read here, though others count some: what theirs must add up to."""
    overflowed: Mapping[str, int]
    """Finite elements that a cast made infinite, by tensor."""
    hashes: Mapping[str, HashedSpans]
    """Of every byte of the files that is not an element of a tensor."""
    sha256: Mapping[str, str] = field(default_factory=dict)
    """Of whole files, if they were asked for; hexadecimal."""
    crcs: tuple[CrcShare, ...] = ()
    """What was read in part of the ranges whose CRC-32 the source's files state."""
    proved: tuple[str, ...] = ()
    """Files of the source whose promised hashes had been compared when this part was done."""
    touched: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Version and status change time of the source's files that it was made of, where that time says more."""
    read_bytes: int = 0
    written_bytes: int = 0
    shared_bytes: int = 0
    """Those of the written bytes that share blocks with the source's files."""
    kept_bytes: int = 0
    """Output bytes that an interrupted run had written, found intact."""
    projected_memory_bytes: int = 0


def encode_part(part: WorkerPart, header: Mapping[str, Any], frame: Mapping[str, Any] | None = None) -> bytes:
    """Encode a part as JSON lines, the last of which is a hash of all before; `header` says of which plan it is a part.

    `frame` is what the record will say besides: one part has it.
    """
    head = {
        "schema": SCHEMA,
        "header": dict(header),
        "files": dict(part.files),
        "sha256": dict(part.sha256),
        "proved": list(part.proved),
        "touched": dict(part.touched),
        "read_bytes": part.read_bytes,
        "written_bytes": part.written_bytes,
        "shared_bytes": part.shared_bytes,
        "kept_bytes": part.kept_bytes,
        "projected_memory_bytes": part.projected_memory_bytes,
        "overflowed": dict(part.overflowed),
        "frame": frame,
    }
    lines = [json.dumps(head)]
    lines += [json.dumps(["hash", path, h.spans, h.sha256]) for path, h in part.hashes.items()]
    for name, read in part.source_sums.items():
        written = part.output_sums[name]
        lines.append(json.dumps(["sums", name, str(read), str(written) if written != read else None]))
    lines += [json.dumps(["whole", name, str(sums), None]) for name, sums in part.whole_sums.items()]
    lines += [json.dumps(["crc", *share]) for share in part.crcs]
    body = "".join(f"{line}\n" for line in lines).encode()
    return body + hashlib.sha256(body).hexdigest().encode() + b"\n"


def parse_part(data: bytes, header: Mapping[str, Any]) -> tuple[WorkerPart, Mapping[str, Any] | None] | None:
    """Parse a part that `encode_part` wrote, and its frame; None if it is damaged, or if it is one of another plan."""
    body, seal = data[:-65], data[-65:]
    if seal != hashlib.sha256(body).hexdigest().encode() + b"\n":
        return None
    try:
        return _parse_sealed_part(body, header)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # the seal is right: another program
        return None


def _parse_sealed_part(body: bytes, header: Mapping[str, Any]) -> tuple[WorkerPart, Mapping[str, Any] | None] | None:
    head, *rows = map(json.loads, body.splitlines())
    if head["schema"] != SCHEMA or head["header"] != dict(header):
        return None
    hashes: dict[str, HashedSpans] = {}
    read: dict[str, DigestSums] = {}
    written: dict[str, DigestSums] = {}
    whole: dict[str, DigestSums] = {}
    crcs: list[CrcShare] = []
    for kind, name, first, second in rows:
        if kind == "hash":
            hashes[name] = HashedSpans(tuple((int(start), int(size)) for start, size in first), second)
        elif kind == "whole":
            whole[name] = DigestSums.parse(first)
        elif kind == "crc":
            crcs.append(CrcShare(name, CrcRange(*first), tuple(CrcPiece(*piece) for piece in second)))
        else:
            read[name] = DigestSums.parse(first)
            written[name] = DigestSums.parse(second) if second is not None else read[name]
    part = WorkerPart(
        files=head["files"],
        source_sums=read,
        output_sums=written,
        whole_sums=whole,
        overflowed=head["overflowed"],
        hashes=hashes,
        sha256=head["sha256"],
        crcs=tuple(crcs),
        proved=tuple(head["proved"]),
        touched={path: (str(version), int(changed)) for path, (version, changed) in head["touched"].items()},
        read_bytes=head["read_bytes"],
        written_bytes=head["written_bytes"],
        shared_bytes=head["shared_bytes"],
        kept_bytes=head["kept_bytes"],
        projected_memory_bytes=head["projected_memory_bytes"],
    )
    return part, head["frame"]


def merge_parts(parts: Sequence[WorkerPart]) -> WorkerPart:
    """Return one part of several that one worker made one after another."""
    sums: tuple[dict[str, DigestSums], dict[str, DigestSums]] = {}, {}
    overflowed: Counter[str] = Counter()
    for part in parts:
        for total, more in zip(sums, (part.source_sums, part.output_sums), strict=True):
            for name, each in more.items():
                total[name] = total[name] + each if name in total else each
        overflowed.update(part.overflowed)
    return WorkerPart(
        files={path: size for part in parts for path, size in part.files.items()},
        source_sums=sums[0],
        output_sums=sums[1],
        whole_sums={name: each for part in parts for name, each in part.whole_sums.items()},
        overflowed=overflowed,
        hashes={path: found for part in parts for path, found in part.hashes.items()},
        sha256={path: found for part in parts for path, found in part.sha256.items()},
        crcs=tuple(share for part in parts for share in part.crcs),
        proved=tuple(sorted({path for part in parts for path in part.proved})),
        touched={path: each for part in parts for path, each in part.touched.items()},
        read_bytes=sum(part.read_bytes for part in parts),
        written_bytes=sum(part.written_bytes for part in parts),
        shared_bytes=sum(part.shared_bytes for part in parts),
        kept_bytes=sum(part.kept_bytes for part in parts),
        projected_memory_bytes=max((part.projected_memory_bytes for part in parts), default=0),
    )


def is_touched(part: WorkerPart, files: Mapping[str, FileStat]) -> bool:
    """Return whether a file that a part was made of has been touched since: its bytes may be others.

    `files` are those of the source now. Another machine's copy of a file has another inode, and a time of its own.
    """
    now = {path: files[path] for path in part.touched if path in files}
    return any(
        stat.changed != part.touched[path][1] for path, stat in now.items() if stat.version == part.touched[path][0]
    )


def have_same_content(part: WorkerPart, other: WorkerPart) -> bool:
    """Return whether two parts were read and written with the same elements and other bytes."""
    return (part.files, part.source_sums, part.output_sums, part.hashes, part.sha256) == (
        other.files,
        other.source_sums,
        other.output_sums,
        other.hashes,
        other.sha256,
    )


def require_one_source(parts: Mapping[str, WorkerPart]) -> None:
    """Raise SourceError if writers, by name, read different elements of one tensor: their copies of the source differ.

    It is found of tensors that somebody read whole beside those who count it.
    """
    totals: dict[str, DigestSums] = {}
    for name in {name for part in parts.values() for name in part.whole_sums}:
        counted = [part.source_sums[name] for part in parts.values() if name in part.source_sums]
        totals[name] = sum(counted[1:], counted[0])
    for writer, part in parts.items():
        for name, seen in sorted(part.whole_sums.items()):
            if seen != totals[name]:
                zero = DigestSums((0,) * len(seen.words))
                others = [w for w, other in parts.items() if w != writer and other.source_sums.get(name, zero) != zero]
                raise SourceError(
                    f"{name} is not the same for all workers: {writer} read different elements from "
                    f"{format_first_few(others)}",
                    hint="give all workers the same source; shardctl digest on each machine finds the one that differs",
                )
