"""Writes stored zip archives as torch does, and with any lie that is asked for."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Entry:
    """A record; what is not None overrides the truth in the local header or in the directory."""

    name: str | bytes
    data: bytes = b""
    local: dict[str, Any] = field(default_factory=dict)
    central: dict[str, Any] = field(default_factory=dict)
    extra: bytes = b""
    """Of the local header, such as torch's padding."""
    central_extra: bytes = b""

    @property
    def raw(self) -> bytes:
        return self.name if isinstance(self.name, bytes) else self.name.encode()


def build(*entries: Entry, zip64: bool = False, **lies: Any) -> bytes:
    """An archive; `lies` override fields of the end records: `count`, `first`, `length`, `disk`, `tail`, `comment`."""
    body, directory = b"", b""
    for entry in entries:
        raw = entry.raw
        truth = {
            "signature": b"PK\x03\x04",
            "flags": 0,
            "method": 0,
            "crc": zlib.crc32(entry.data),
            "packed": len(entry.data),
            "size": len(entry.data),
            "name": raw,
        }
        here = {**truth, **entry.local}
        there = {**truth, "signature": b"PK\x01\x02", "offset": len(body), "disk": 0, **entry.central}
        fields = (here["flags"], here["method"], 0, 0, here["crc"], here["packed"], here["size"])
        body += struct.pack("<4s5H3I2H", here["signature"], 20, *fields, len(here["name"]), len(entry.extra))
        body += here["name"] + entry.extra + entry.data
        fields = (there["flags"], there["method"], 0, 0, there["crc"], there["packed"], there["size"])
        lengths = (len(there["name"]), len(entry.central_extra), 0)
        directory += struct.pack("<4s6H3I", there["signature"], 20, 20, *fields)
        directory += struct.pack("<5H2I", *lengths, there["disk"], 0, 0, there["offset"]) + there["name"]
        directory += entry.central_extra
    first = lies.get("first", len(body))
    length, count = lies.get("length", len(directory)), lies.get("count", len(entries))
    end64 = b""
    if zip64:
        at = lies.get("end64_at", len(body) + len(directory))
        end64 = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, length, first)
        end64 += struct.pack("<4sIQI", b"PK\x06\x07", 0, at, 1)
    narrow = lies.get("narrow", (count & 0xFFFF, length & 0xFFFFFFFF, first & 0xFFFFFFFF))
    comment = lies.get("comment", b"")
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", lies.get("disk", 0), 0, narrow[0], *narrow, len(comment))
    return body + directory + end64 + end + comment + lies.get("tail", b"")


def padding(offset: int, name: str, alignment: int = 64) -> bytes:
    """The extra field with which torch aligns a record's data, for a local header at `offset`."""
    plain = offset + 30 + len(name) + 4
    length = -plain % alignment
    return struct.pack("<2sH", b"FB", length) + b"Z" * length
