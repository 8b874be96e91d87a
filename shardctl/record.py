"""`shardctl.json`: what a finished directory says of itself; written last, so a directory that has it is complete."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from shardctl.box import Box
from shardctl.dtype import BY_NAME
from shardctl.errors import SourceError
from shardctl.mesh import Mesh
from shardctl.storage import read
from shardctl.workers import heed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from shardctl.dtype import DType
    from shardctl.storage import Source
    from shardctl.workers import Stop

RECORD: Final = "shardctl.json"
SUMS: Final = "SHA256SUMS"
SCHEMA: Final = "shardctl.checkpoint/1"
_SEAL: Final = b',\n "seal": "'
"""What stands between the record and the SHA-256 of all of it that comes before."""
_READ_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class StoredBox:
    """Where one box of a tensor is: an array of a file."""

    file: str
    name: str
    box: Box


@dataclass(frozen=True, slots=True)
class Hashed:
    """The SHA-256 of what a file holds besides tensors: its header, or all of it."""

    spans: tuple[tuple[int, int], ...]
    """`(offset, bytes)` of the parts that were hashed, one after another."""
    sha256: str


def hash_spans(file: Path, spans: Sequence[tuple[int, int]], stop: Stop | None = None) -> Hashed:
    """Hash `(offset, bytes)` parts of a file, one after another; raises OSError if it cannot be read, Interrupted."""
    with file.open("rb") as data:

        def read_at(offset: int, size: int) -> bytes:
            data.seek(offset)
            return data.read(size)

        return _hashed(read_at, spans, stop)


def hash_parts(source: Source, path: str, spans: Sequence[tuple[int, int]], stop: Stop | None = None) -> Hashed:
    """The same of a file of a source; raises what its reads raise."""
    return _hashed(lambda offset, size: read(source, path, offset, size), spans, stop)


def _hashed(read_at: Callable[[int, int], bytes], spans: Sequence[tuple[int, int]], stop: Stop | None) -> Hashed:
    state = hashlib.sha256()
    for offset, size in spans:
        for start in range(0, size, _READ_BYTES):
            if stop is not None:
                heed(stop)
            state.update(read_at(offset + start, min(_READ_BYTES, size - start)))
    return Hashed(tuple(spans), state.hexdigest())


@dataclass(frozen=True, slots=True)
class RecordedTensor:
    """One global tensor."""

    dtype: DType
    shape: tuple[int, ...]
    digest: str
    """Of the elements as stored here."""
    source_digest: str
    """Of the elements as the source had them; differs after a cast."""
    ties: tuple[str, ...]
    spelling: tuple[str, ...]
    """The names the original checkpoint used, if others."""
    stored: tuple[StoredBox, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """Everything `shardctl.json` says."""

    version: str
    """Of shardctl."""
    plan: str
    """Identity of the copy plan that made this: equal for the same options over the same source headers."""
    layout: str
    digest: str
    """Of the checkpoint as stored here."""
    source_digest: str
    """Of the source; the same unless elements were cast."""
    source: Mapping[str, Any]
    """Format, name and file sizes of what this was made from."""
    mesh: Mesh | None
    stages: tuple[int, ...]
    """Layers per pipeline stage."""
    architecture: str
    options: Mapping[str, str]
    """Options that shaped the bytes, such as the cast."""
    files: Mapping[str, int]
    """Bytes of every file of the directory except this one."""
    hashes: Mapping[str, Hashed] = field(default_factory=dict)
    """Of every byte of those files that is not an element of a tensor; elements have digests."""
    tensors: Mapping[str, RecordedTensor] = field(default_factory=dict)

    @property
    def filtered(self) -> bool:
        """Whether tensors were left out, so that it lacks what its config promises."""
        return not {"include", "exclude", "left_out"}.isdisjoint(self.options)


def dump(record: Record) -> bytes:
    """The record as deterministic JSON, one tensor and one hash a line, sealed with a hash of itself."""
    files = list(record.files)
    number = {path: i for i, path in enumerate(files)}
    head: dict[str, Any] = {
        "schema": SCHEMA,
        "version": record.version,
        "plan": record.plan,
        "layout": record.layout,
        "digest": record.digest,
        "source_digest": record.source_digest,
        "source": dict(record.source),
        "mesh": asdict(record.mesh) if record.mesh else None,
        "stages": list(record.stages),
        "architecture": record.architecture,
        "options": dict(record.options),
        "files": dict(record.files),
    }
    lines = []
    for name, tensor in record.tensors.items():
        row: dict[str, Any] = {"dtype": tensor.dtype.name, "shape": list(tensor.shape), "digest": tensor.digest}
        if tensor.source_digest != tensor.digest:
            row["source_digest"] = tensor.source_digest
        if tensor.ties:
            row["ties"] = list(tensor.ties)
        if tensor.spelling:
            row["spelling"] = list(tensor.spelling)
        row["stored"] = [[number[s.file], s.name, list(s.box.origin), list(s.box.shape)] for s in tensor.stored]
        lines.append(f"  {json.dumps(name)}: {json.dumps(row, separators=(',', ':'))}")
    hashes = [f"  {json.dumps(path)}: {json.dumps([h.spans, h.sha256])}" for path, h in record.hashes.items()]
    text = json.dumps(head, indent=1)[:-2]
    for title, rows in (("hashes", hashes), ("tensors", lines)):
        text += f',\n "{title}": {{\n' + ",\n".join(rows) + "\n }"
    body = text.encode()
    return body + _SEAL + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


def load(data: bytes, path: str = RECORD) -> Record:
    """Read a record; raises SourceError if it is not one or was written by a later shardctl."""
    try:
        raw = json.loads(data)
        if raw["schema"] != SCHEMA:
            raise SourceError(
                f"{path} has schema {raw['schema']!r}, but this shardctl reads {SCHEMA!r}",
                hint="use the version of shardctl that wrote it, or a newer one",
            )
        _check_seal(data, str(raw["seal"]))
        files = list(raw["files"])
        mesh = raw["mesh"]
        return Record(
            version=str(raw["version"]),
            plan=str(raw["plan"]),
            layout=str(raw["layout"]),
            digest=str(raw["digest"]),
            source_digest=str(raw["source_digest"]),
            source=dict(raw["source"]),
            mesh=Mesh(tuple((str(n), int(d)) for n, d in mesh["axes"]), int(mesh["ep"]), int(mesh["etp"]))
            if mesh
            else None,
            stages=tuple(int(n) for n in raw["stages"]),
            architecture=str(raw["architecture"]),
            options={str(k): str(v) for k, v in raw["options"].items()},
            files={str(k): int(v) for k, v in raw["files"].items()},
            hashes={
                str(path): Hashed(tuple((int(start), int(size)) for start, size in spans), str(sha256))
                for path, (spans, sha256) in raw["hashes"].items()
            },
            tensors={str(name): _tensor(row, files) for name, row in raw["tensors"].items()},
        )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise SourceError(
            f"{path} is damaged: {type(error).__name__} {error}",
            hint=f"remove {path} to read the files without it; its digests are lost then",
        ) from error


def _check_seal(data: bytes, seal: str) -> None:
    if hashlib.sha256(data.rpartition(_SEAL)[0]).hexdigest() != seal:
        raise ValueError("its seal does not fit its content")


def _tensor(row: Mapping[str, Any], files: list[str]) -> RecordedTensor:
    return RecordedTensor(
        dtype=BY_NAME[row["dtype"]],
        shape=tuple(map(int, row["shape"])),
        digest=str(row["digest"]),
        source_digest=str(row.get("source_digest", row["digest"])),
        ties=tuple(map(str, row.get("ties", ()))),
        spelling=tuple(map(str, row.get("spelling", ()))),
        stored=tuple(
            StoredBox(files[file], str(name), Box(tuple(map(int, origin)), tuple(map(int, shape))))
            for file, name, origin, shape in row["stored"]
        ),
    )
