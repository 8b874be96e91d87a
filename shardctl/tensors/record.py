"""Reads and writes `shardctl.json`, the record of a finished directory, which is written last.

>>> made = CheckpointRecord("0.1", "plan", "hf", "digest", "digest", {}, None, (), "LlamaForCausalLM", {}, {})
>>> record = parse_record(encode_record(made))  # raises SourceError if it is damaged
>>> record.layout, record.mesh, record.digest
('hf', None, 'digest')
"""

from __future__ import annotations

import json
from dataclasses import asdict, field
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.amounts import format_file_size, format_plural
from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import SourceError, UsageError
from shardctl.base.value import value_class
from shardctl.base.workers import raise_if_stopped
from shardctl.storage import read_bytes
from shardctl.storage.bounded_text import RECORD_TEXT, parse_json
from shardctl.storage.byte_names import name_from_text, name_to_bytes, name_to_text
from shardctl.tensors.box import Box
from shardctl.tensors.mesh import Mesh

if TYPE_CHECKING:
    import hashlib
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from shardctl.base.dtype import DType
    from shardctl.base.workers import StopRequest
    from shardctl.storage import Source

RECORD: Final = "shardctl.json"
DERIVED: Final = "derived"
"""What the option `rules` of a record says if no table, but derived rules say how tensors are cut."""
GIVEN: Final = "given"
"""What it says if a rule file, or rules of transformers, say how."""
FUSED_ORDER_UNKNOWN: Final = "fused_order_unknown"
"""The option of a record that lists arrays that stay whole because the order of what is fused in them is not known."""
OVERFLOWED: Final = "allow_overflow"
"""The option of a record that says that finite values became infinite, which somebody had allowed."""
LEFT_OUT: Final = frozenset({"include", "exclude", "left_out"})
"""The options of a record that say that tensors were left out."""
BASE_ONLY: Final = "base_only"
"""The option of a record that says that the source was a base model, without the head of the config's class."""
SUBTREE: Final = "subtree"
"""The option of a record that says below which prefix of the source's names the model was."""
UNTIED: Final = "untied"
"""The option of a record that says that a head was stored apart because it differs from the embedding."""
AVERAGED: Final = "average"
"""The option of a record that says of which checkpoints, with which weights, its own is the sum."""
APPLIED: Final = "apply"
"""The option of a record that names the weight deltas that were applied to the source."""
RULES_PROOF: Final = "rules_proof"
"""The option of a record that says whether a small model proved derived rules; it decides no bytes."""
PROVED_BY_RESULT: Final = "rules proved: the result"
"""What it says after `--prove`."""
SAVED_NAMES: Final = "source_names"
"""The option of a record that says that the source had the names of the Hub, of a model that no table knows."""
SUMS: Final = "SHA256SUMS"
STATEMENT: Final = "provenance.intoto.json"
"""What `attest` says of a directory: an in-toto statement of how it was made."""
SIGNATURE: Final = "model.sig"
"""The signature of a directory, by `attest` or by the library model-signing."""
ATTESTATION: Final = frozenset({STATEMENT, SIGNATURE})
"""Files next to a finished checkpoint that its record does not list, and that hold only for this directory."""
SCHEMA: Final = "shardctl.checkpoint/1"
_SEAL_JSON_PREFIX: Final = b',\n "seal": "'
"""What stands between the record and the SHA-256 of all of it that comes before."""
_MAX_INTEGER_VALUE: Final = 2**63 - 1
"""No file, dim or offset is beyond; what says so is damaged."""
_MAX_LAYERS: Final = 500_000
"""As many as a config may have: who holds what is listed layer by layer."""
_REMOVE_RECORD_HINT: Final = "remove {} to read the files without it; its digests are lost then"
_READ_BYTES: Final = 1 << 20


@value_class
class StoredBox:
    """Where one box of a tensor is: an array of a file."""

    file: str
    name: str
    box: Box


@value_class
class HashedSpans:
    """The SHA-256 of what a file holds besides tensors: its header, or all of it."""

    spans: tuple[tuple[int, int], ...]
    """`(offset, bytes)` of the parts that were hashed, one after another."""
    sha256: str


def _start_sha256(data: bytes = b"") -> hashlib._Hash:
    import hashlib  # which loads OpenSSL

    return hashlib.sha256(data)


def hash_file_spans(file: Path, spans: Sequence[tuple[int, int]], stop: StopRequest | None = None) -> HashedSpans:
    """Hash `(offset, bytes)` parts of a file, one after another; raises OSError if it cannot be read, Interrupted."""
    with file.open("rb") as data:

        def read_at(offset: int, size: int) -> bytes:
            data.seek(offset)
            return data.read(size)

        return _hash_spans(read_at, spans, stop)


def hash_source_spans(
    source: Source, path: str, spans: Sequence[tuple[int, int]], stop: StopRequest | None = None
) -> HashedSpans:
    """Return the same of a file of a source; raises what its reads raise."""
    return _hash_spans(lambda offset, size: read_bytes(source, path, offset, size), spans, stop)


def _hash_spans(
    read_at: Callable[[int, int], bytes], spans: Sequence[tuple[int, int]], stop: StopRequest | None
) -> HashedSpans:
    state = _start_sha256()
    for offset, size in spans:
        for start in range(0, size, _READ_BYTES):
            if stop is not None:
                raise_if_stopped(stop)
            state.update(read_at(offset + start, min(_READ_BYTES, size - start)))
    return HashedSpans(tuple(spans), state.hexdigest())


@value_class
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


@value_class
class CheckpointRecord:
    """Everything `shardctl.json` says of a finished checkpoint.

    `parse_record` raises SourceError for a record that is damaged, sealed wrongly, or of a later schema.
    """

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
    """Bytes of every file of the directory except this one; in JSON, names are kept as `byte_names` says."""
    hashes: Mapping[str, HashedSpans] = field(default_factory=dict)
    """Of every byte of those files that is not an element of a tensor; elements have digests."""
    tensors: Mapping[str, RecordedTensor] = field(default_factory=dict)

    @property
    def filtered(self) -> bool:
        """Whether tensors were left out, so that it lacks what its config promises."""
        return not LEFT_OUT.isdisjoint(self.options)

    @property
    def partial(self) -> bool:
        """Whether it lacks tensors of its config's class, as its source did or because they were left out."""
        return self.filtered or BASE_ONLY in self.options

    def describe_layout(self) -> str:
        """Describe the layout and its mesh, as in `sharded for tp=4 in layout megatron`."""
        shape = f"sharded for {self.mesh}" if self.mesh is not None and self.mesh.world > 1 else ""
        layout = f"in layout {self.layout}" if self.layout != "ranks" or not shape else ""
        return " ".join(filter(None, [shape, layout]))

    def describe_size(self) -> str:
        """Describe the bytes and the number of the files, this one included."""
        return f"{format_file_size(sum(self.files.values()))}, {format_plural(len(self.files) + 1, 'file')}"


def format_sums_line(sha256: str, path: str) -> bytes:
    """Format a line of `SHA256SUMS`; a name that would break it is escaped as coreutils does (`cksum.c`)."""
    name = name_to_bytes(path)
    escaped = name.replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\r", b"\\r")
    return (b"" if escaped == name else b"\\") + sha256.encode() + b"  " + escaped + b"\n"


def encode_record(record: CheckpointRecord) -> bytes:
    """Encode the record as deterministic JSON, one tensor and one hash a line, sealed with a hash of itself."""
    files = list(record.files)
    number = {path: i for i, path in enumerate(files)}
    head: dict[str, Any] = {
        "schema": SCHEMA,
        "version": record.version,
        "plan": record.plan,
        "layout": record.layout,
        "digest": record.digest,
        "source_digest": record.source_digest,
        "source": {
            key: _convert_names_to_text(value) if key == "files" else value for key, value in record.source.items()
        },
        "mesh": asdict(record.mesh) if record.mesh else None,
        "stages": list(record.stages),
        "architecture": record.architecture,
        "options": dict(record.options),
        "files": _convert_names_to_text(record.files),
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
    hashes = [
        f"  {json.dumps(name_to_text(path))}: {json.dumps([h.spans, h.sha256])}" for path, h in record.hashes.items()
    ]
    text = json.dumps(head, indent=1)[:-2]
    for title, rows in (("hashes", hashes), ("tensors", lines)):
        text += f',\n "{title}": {{\n' + ",\n".join(rows) + "\n }"
    body = text.encode()
    return body + _SEAL_JSON_PREFIX + _start_sha256(body).hexdigest().encode() + b'"\n}\n'


def _convert_names_to_text(files: Mapping[str, int]) -> dict[str, int]:
    return {name_to_text(path): size for path, size in files.items()}


def parse_record(data: bytes, path: str = RECORD) -> CheckpointRecord:
    """Read a record; raises SourceError if it is not one or was written by a later shardctl."""
    try:
        raw = parse_json(data, path, RECORD_TEXT, hint=_REMOVE_RECORD_HINT.format(path))
        if raw["schema"] != SCHEMA:
            raise SourceError(
                f"{path} has schema {raw['schema']!r}, but this shardctl reads {SCHEMA!r}",
                hint="use the version of shardctl that wrote it, or a newer one",
            )
        _check_seal(data, str(raw["seal"]))
        files = _parse_files(raw["files"])
        mesh = _parse_mesh(raw["mesh"]) if raw["mesh"] is not None else None
        return CheckpointRecord(
            version=_parse_text(raw["version"]),
            plan=_parse_text(raw["plan"]),
            layout=_parse_text(raw["layout"]),
            digest=_parse_text(raw["digest"]),
            source_digest=_parse_text(raw["source_digest"]),
            source=_parse_source(raw["source"]),
            mesh=mesh,
            stages=_parse_stages(raw["stages"], mesh),
            architecture=_parse_text(raw["architecture"]),
            options={key: _parse_text(value) for key, value in raw["options"].items()},
            files=files,
            hashes={name_from_text(path): _parse_hashes(path, row, files) for path, row in raw["hashes"].items()},
            tensors=_check_names({name: _parse_tensor(row, list(files)) for name, row in raw["tensors"].items()}),
        )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, UsageError) as error:
        raise SourceError(
            f"{path} is damaged: {type(error).__name__} {error}",
            hint=_REMOVE_RECORD_HINT.format(path),
        ) from error


def _check_seal(data: bytes, seal: str) -> None:
    if _start_sha256(data.rpartition(_SEAL_JSON_PREFIX)[0]).hexdigest() != seal:
        raise ValueError("its checksum does not match its content")


def _parse_text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} where text is expected")
    return value


def _parse_texts(values: Sequence[object]) -> tuple[str, ...]:
    return tuple(map(_parse_text, values))


def _parse_count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_INTEGER_VALUE:
        raise TypeError(f"{value!r:.80} where a size or a position is expected")
    return value


def _parse_counts(values: Sequence[object]) -> tuple[int, ...]:
    return tuple(map(_parse_count, values))


def _parse_files(sizes: Mapping[str, object]) -> dict[str, int]:
    return {name_from_text(path): _parse_count(size) for path, size in sizes.items()}


def _parse_source(raw: Mapping[str, Any]) -> dict[str, Any]:
    texts = {key: _parse_text(value) for key, value in raw.items() if key != "files"}
    return texts | ({"files": _parse_files(raw["files"])} if "files" in raw else {})


def _parse_mesh(raw: Mapping[str, Any]) -> Mesh:
    return Mesh(
        tuple((_parse_text(name), _parse_count(degree)) for name, degree in raw["axes"]),
        *_parse_counts((raw["ep"], raw["etp"])),
    )


def _parse_stages(counts: Sequence[object], mesh: Mesh | None) -> tuple[int, ...]:
    """Parse the layers of each pipeline stage, or of each chunk of a virtual pipeline."""
    stages = _parse_counts(counts)
    if sum(stages) > _MAX_LAYERS:
        raise ValueError(f"its stages have {sum(stages):,} layers, more than the {_MAX_LAYERS:,} of any model")
    if mesh is not None and len(stages) % mesh.degree("pp"):
        raise ValueError(f"it lists the layers of {len(stages)} stages for a mesh with pp={mesh.degree('pp')}")
    return stages


def _parse_hashes(path: str, row: Sequence[Any], files: Mapping[str, int]) -> HashedSpans:
    """Parse the hash of a file that the record lists, of parts that follow one another in it."""
    spans, sha256 = row
    hashed = HashedSpans(tuple((_parse_count(start), _parse_count(size)) for start, size in spans), _parse_text(sha256))
    end = 0
    for start, size in hashed.spans:
        if start < end:
            raise ValueError(f"the hash of {path} has parts that overlap")
        end = start + size
    if end > files[name_from_text(path)]:
        raise ValueError(f"the hash of {path} has parts beyond its end")
    return hashed


def _parse_tensor(row: Mapping[str, Any], files: Sequence[str]) -> RecordedTensor:
    return RecordedTensor(
        dtype=BY_NAME[row["dtype"]],
        shape=_parse_counts(row["shape"]),
        digest=_parse_text(row["digest"]),
        source_digest=_parse_text(row.get("source_digest", row["digest"])),
        ties=_parse_texts(row.get("ties", ())),
        spelling=_parse_texts(row.get("spelling", ())),
        stored=tuple(
            StoredBox(files[_parse_count(file)], _parse_text(name), Box(_parse_counts(origin), _parse_counts(shape)))
            for file, name, origin, shape in row["stored"]
        ),
    )


def _check_names(tensors: dict[str, RecordedTensor]) -> dict[str, RecordedTensor]:
    """Return the tensors, if each name is that of one: layouts would write two arrays of one name."""
    names = set(tensors)
    for name, tensor in tensors.items():
        for tie in tensor.ties:
            if tie in names:
                raise ValueError(f"it ties {name} to {tie}, which is another tensor's name, or is listed twice")
            names.add(tie)
    return tensors
