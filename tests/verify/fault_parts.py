"""What the files of ranks hold, part by part, to be changed and written again as a faulty tool would have done."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from shardctl.base.dtype import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

INFO = "DCP_SHARDING_INFO"
_RANK_FILE = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors")


@dataclass
class StoredPart:
    """An array of one file of one rank."""

    rank: int
    number: int
    """Which of the rank's files it is in, from 1."""
    name: str
    dtype: str
    shape: list[int]
    data: bytearray
    place: dict[str, list[int]] | None
    """What `DCP_SHARDING_INFO` says of it; None if the file has none."""

    def array(self) -> np.ndarray:
        """The elements as unsigned integers, which may be written."""
        width = max(BY_NAME[self.dtype].bits // 8, 1)
        return np.frombuffer(self.data, f"<u{width}").reshape(self.shape)

    @property
    def whole(self) -> bool:
        """Whether it is all of its tensor."""
        return self.place is None or self.place.get("global_shape") == self.shape


@dataclass
class RankDirectory:
    """The parts of a directory of ranks, and what happens by chance."""

    path: Path
    random: np.random.Generator
    parts: list[StoredPart] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    headers: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """Of each file as it was, with its length before it."""

    @property
    def ranks(self) -> list[int]:
        return sorted({part.rank for part in self.parts})

    def on(self, rank: int) -> list[StoredPart]:
        return [part for part in self.parts if part.rank == rank]

    def find(self, pattern: str, *, ndim: int | None = None) -> list[StoredPart]:
        """The parts whose names have a pattern."""
        search = re.compile(pattern).search
        return [p for p in self.parts if search(p.name) and (ndim is None or len(p.shape) == ndim)]

    def choose(self, parts: list[Any]) -> Any:
        """One of several, by chance; None of none."""
        return parts[int(self.random.integers(len(parts)))] if parts else None

    def trade(self, names: set[str], one: int, other: int) -> None:
        """Let two ranks trade all that they have of some tensors, with the places that go with it."""
        for part in self.parts:
            if part.name in names and part.rank in {one, other}:
                part.rank = other if part.rank == one else one

    def list_cut(self, pattern: str) -> list[tuple[str, int, int]]:
        """Tensors of which two ranks hold different parts of one shape: the name and the two."""
        found = []
        by_name: dict[str, dict[int, list[StoredPart]]] = {}
        for part in self.find(pattern):
            by_name.setdefault(part.name, {}).setdefault(part.rank, []).append(part)
        for name, ranks in by_name.items():
            for one in ranks:
                for other in ranks:
                    a, b = ([(p.shape, p.place) for p in ranks[each]] for each in (one, other))
                    if one < other and a != b and [s for s, _ in a] == [s for s, _ in b]:
                        found.append((name, one, other))
        return found

    def read(self) -> RankDirectory:
        """Read every file of a rank."""
        for file in sorted(self.path.iterdir()):
            match = _RANK_FILE.fullmatch(file.name)
            if match is not None:
                self.parts += self._read_file(file, int(match[1]) - 1, int(match[2]))
        return self

    def _read_file(self, file: Path, rank: int, number: int) -> Iterator[StoredPart]:
        content = file.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        self.headers[rank, number] = content[:start]
        said = header.pop("__metadata__", {})
        places = json.loads(said.pop(INFO, "null"))
        self.metadata |= said
        for name, entry in header.items():
            a, b = entry["data_offsets"]
            place = places.get(name) if places is not None else None
            yield StoredPart(
                rank, number, name, entry["dtype"], entry["shape"], bytearray(content[start + a : start + b]), place
            )

    def write(self) -> None:
        """Write every file of a rank again, and remove those that would be empty."""
        for file in self.path.iterdir():
            if _RANK_FILE.fullmatch(file.name):
                file.unlink()
        files: dict[tuple[int, int], dict[str, StoredPart]] = {}
        for part in self.parts:
            number = part.number
            while part.name in files.get((part.rank, number), {}):
                number += 1
            files.setdefault((part.rank, number), {})[part.name] = part
        count = max(number for _, number in files)
        for (rank, number), parts in files.items():
            name = f"shard-{rank + 1:05d}-model-{number:05d}-of-{count:05d}.safetensors"
            (self.path / name).write_bytes(_encode_file(parts, self.metadata, self.headers.get((rank, number))))


def _encode_file(parts: dict[str, StoredPart], metadata: dict[str, str], before: bytes | None) -> bytes:
    """Encode a file; where its header says what it said `before`, it has the same bytes."""
    header: dict[str, Any] = {}
    said = dict(metadata)
    places = {name: part.place for name, part in parts.items()}
    if any(place is not None for place in places.values()):
        said |= {INFO: json.dumps(places), "DCP_VERSION": "1.0"}
    header["__metadata__"] = said
    at, data = 0, bytearray()
    for name, part in parts.items():
        header[name] = {"dtype": part.dtype, "shape": part.shape, "data_offsets": [at, at + len(part.data)]}
        at += len(part.data)
        data += part.data
    if before is not None and _parse_header(before[8:]) == {**header, "__metadata__": {**said, INFO: places}}:
        return before + bytes(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(data)


def _parse_header(text: bytes) -> dict[str, Any]:
    header = json.loads(text)
    said = header["__metadata__"]
    names = [name for name in header if name != "__metadata__"]
    said[INFO] = json.loads(said[INFO]) if INFO in said else dict.fromkeys(names)
    return header
