"""What one worker made: its files, the digest sums of what it counted, and the hashes of the other bytes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from shardctl.digest import Sums
from shardctl.record import Hashed

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMA: Final = "shardctl.part/1"


@dataclass(frozen=True, slots=True)
class Part:
    """A finished part of a result; the parts of all workers are the whole, and one part may be all of it."""

    files: Mapping[str, int]
    """Bytes of each file that this worker wrote."""
    source_sums: Mapping[str, Sums]
    """Digest sums by tensor, as it was read: of the elements that count here."""
    output_sums: Mapping[str, Sums]
    """And as it was written."""
    overflowed: Mapping[str, int]
    """Finite elements that a cast made infinite, by tensor."""
    hashes: Mapping[str, Hashed]
    """Of every byte of the files that is not an element of a tensor."""
    sha256: Mapping[str, str] = field(default_factory=dict)
    """Of whole files, if they were asked for; hexadecimal."""
    read_bytes: int = 0
    written_bytes: int = 0
    kept_bytes: int = 0
    """Output bytes that an interrupted run had written, found intact."""
    projected_memory_bytes: int = 0


def dump(part: Part, header: Mapping[str, Any], frame: Mapping[str, Any] | None = None) -> bytes:
    """A part as JSON lines, the last of which is a hash of all before; `header` says of which plan it is a part.

    `frame` is what the record will say besides: one part has it.
    """
    head = {
        "schema": SCHEMA,
        "header": dict(header),
        "files": dict(part.files),
        "sha256": dict(part.sha256),
        "read_bytes": part.read_bytes,
        "written_bytes": part.written_bytes,
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
    body = "".join(f"{line}\n" for line in lines).encode()
    return body + hashlib.sha256(body).hexdigest().encode() + b"\n"


def load(data: bytes, header: Mapping[str, Any]) -> tuple[Part, Mapping[str, Any] | None] | None:
    """A part that `dump` wrote, and its frame; None if it is damaged, or if it is one of another plan."""
    body, seal = data[:-65], data[-65:]
    if seal != hashlib.sha256(body).hexdigest().encode() + b"\n":
        return None
    head, *rows = map(json.loads, body.splitlines())
    if head["schema"] != SCHEMA or head["header"] != dict(header):
        return None
    hashes: dict[str, Hashed] = {}
    read: dict[str, Sums] = {}
    written: dict[str, Sums] = {}
    for kind, name, first, second in rows:
        if kind == "hash":
            hashes[name] = Hashed(tuple((int(start), int(size)) for start, size in first), second)
        else:
            read[name] = Sums.parse(first)
            written[name] = Sums.parse(second) if second is not None else read[name]
    part = Part(
        files=head["files"],
        source_sums=read,
        output_sums=written,
        overflowed=head["overflowed"],
        hashes=hashes,
        sha256=head["sha256"],
        read_bytes=head["read_bytes"],
        written_bytes=head["written_bytes"],
        kept_bytes=head["kept_bytes"],
        projected_memory_bytes=head["projected_memory_bytes"],
    )
    return part, head["frame"]
