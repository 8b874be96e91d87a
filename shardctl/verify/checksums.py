"""Checks files against the SHA-256s that `SHA256SUMS` beside them or Megatron-LM's `integrity.json` has."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.libraries.files.sharded_backend import INTEGRITY, read_sharded_backend
from shardctl.storage import read_bytes
from shardctl.storage.bounded_text import RECORD_TEXT, parse_json
from shardctl.storage.byte_names import name_from_bytes
from shardctl.tensors.record import SUMS, hash_source_spans
from shardctl.verify.finding import CheckFinding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.base.workers import StopRequest
    from shardctl.storage import Source

_CHECKSUM_LINE_PATTERN: Final = re.compile(rb"(\\?)([0-9a-fA-F]{64}) [ *](.+)")
_ESCAPE_SEQUENCE_PATTERN: Final = re.compile(rb"\\([\\nr])")
_UNESCAPED_BYTES: Final = {b"\\": b"\\", b"n": b"\n", b"r": b"\r"}
"""What a line that begins with a backslash has in the file's name (coreutils, `cksum.c`)."""


def check_sums(source: Source, stop: StopRequest) -> Iterator[CheckFinding]:
    """Read every file that `SHA256SUMS` lists, if there is one; a line that is not understood is a warning."""
    files = source.files()
    if SUMS not in files:
        return
    for number, line in enumerate(read_bytes(source, SUMS).removesuffix(b"\n").split(b"\n"), 1):
        found = _CHECKSUM_LINE_PATTERN.fullmatch(line.removesuffix(b"\r"))
        if found is None:
            yield CheckFinding("warning", "sha256", f"line {number} of {SUMS} is not understood", file=SUMS)
            continue
        escaped, sha256, name = found.groups()
        path = name_from_bytes(
            _ESCAPE_SEQUENCE_PATTERN.sub(lambda e: _UNESCAPED_BYTES[e[1]], name) if escaped else name
        ).removeprefix("./")
        if path not in files:
            yield CheckFinding("error", "sha256", f"{path} is missing; {SUMS} lists it", file=path)
            continue
        known = hash_source_spans(source, path, [(0, files[path].size)], stop)
        if known.sha256.encode() != sha256.lower():
            yield CheckFinding("error", "sha256", f"{path} is not the file that {SUMS} lists", file=path)


def check_integrity(source: Source, stop: StopRequest) -> Iterator[CheckFinding]:
    """Read every file that Megatron-LM's `integrity.json` lists, if the iteration that is read has one.

    megatron-core 0.19 writes it (`save_integrity_manifest` of `dist_checkpointing/validation.py`).
    """
    backend = read_sharded_backend(source)
    where = f"{backend.folder}{INTEGRITY}" if backend is not None else ""
    files = source.files()
    if backend is None or where not in files:
        return
    said = parse_json(read_bytes(source, where), where, RECORD_TEXT)
    listed = said.get("files") if isinstance(said, dict) else None
    if not isinstance(listed, dict) or said.get("algorithm", "sha256") != "sha256":
        yield CheckFinding(
            "warning", "sha256", f"{where} is not understood, and nothing was checked with it", file=where
        )
        return
    for name, sha256 in listed.items():
        path = f"{backend.folder}{name}"
        if path not in files:
            yield CheckFinding("error", "sha256", f"{path} is missing; {where} lists it", file=path)
            continue
        known = hash_source_spans(source, path, [(0, files[path].size)], stop)
        if known.sha256 != sha256:
            yield CheckFinding("error", "sha256", f"{path} is not the file that {where} lists", file=path)
