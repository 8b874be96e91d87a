"""Checks files against the SHA-256s beside them.

They are in `SHA256SUMS`, in Megatron-LM's `integrity.json`, and those of the Hub in what huggingface_hub keeps.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.libraries.files.sharded_backend import INTEGRITY, read_sharded_backend
from shardctl.record import SUMS, hash_source_spans
from shardctl.storage import read_bytes
from shardctl.storage.bounded_text import RECORD_TEXT, parse_json
from shardctl.storage.byte_names import name_from_bytes
from shardctl.storage.local import LocalSource
from shardctl.verify.finding import CheckFinding

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardctl.storage import Source
    from shardctl.workers import StopRequest

_NOTES: Final = ".cache/huggingface/download"
"""Where a download into a directory leaves a note of each file: commit, ETag and time, a line each
(huggingface_hub, `_local_folder.py`). The ETag of a large file is its SHA-256, that of a small one its git SHA-1."""
_NOTE_BYTES: Final = 1 << 10
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_LINE: Final = re.compile(rb"(\\?)([0-9a-fA-F]{64}) [ *](.+)")
_ESCAPE: Final = re.compile(rb"\\([\\nr])")
_ESCAPED: Final = {b"\\": b"\\", b"n": b"\n", b"r": b"\r"}
"""What a line that begins with a backslash has in the file's name (coreutils, `cksum.c`)."""


def check_sums(source: Source, stop: StopRequest) -> Iterator[CheckFinding]:
    """Read every file that `SHA256SUMS` lists, if there is one; a line that is not understood is a warning."""
    files = source.files()
    if SUMS not in files:
        return
    for number, line in enumerate(read_bytes(source, SUMS).removesuffix(b"\n").split(b"\n"), 1):
        found = _LINE.fullmatch(line.removesuffix(b"\r"))
        if found is None:
            yield CheckFinding("warning", "sha256", f"line {number} of {SUMS} is not understood", file=SUMS)
            continue
        escaped, sha256, name = found.groups()
        path = name_from_bytes(_ESCAPE.sub(lambda e: _ESCAPED[e[1]], name) if escaped else name).removeprefix("./")
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


def check_downloads(source: Source, stop: StopRequest) -> Iterator[CheckFinding]:
    """Read every file of which huggingface_hub noted the SHA-256 that the Hub gave, beside it or in a link's name."""
    if not isinstance(source, LocalSource):
        return
    for path, stat in source.files().items():
        promised = _read_noted_hash(source.root, path) or _find_linked_hash(source.root / path)
        if promised is None:
            continue
        known = hash_source_spans(source, path, [(0, stat.size)], stop)
        if known.sha256 != promised:
            noted = f"its SHA-256 is {known.sha256}, and {promised} was noted when it was downloaded"
            yield CheckFinding("error", "sha256", f"{path} is not the file that the Hub gave: {noted}", file=path)


def _read_noted_hash(root: Path, path: str) -> str | None:
    """Read the SHA-256 in the note of a file that was downloaded into the directory."""
    try:
        with (root / _NOTES / f"{path}.metadata").open("rb") as note:
            lines = note.read(_NOTE_BYTES).decode("ascii", "replace").splitlines()
    except OSError:
        return None
    return lines[1] if len(lines) > 1 and _SHA256.fullmatch(lines[1]) else None


def _find_linked_hash(file: Path) -> str | None:
    """Find the SHA-256 by which the cache calls a file: `snapshots/<commit>/<file> -> ../../blobs/<SHA-256>`.

    What that is may be a link again, to a store of all repositories, where it has another name (its Xet hash).
    """
    if not file.is_symlink():
        return None
    blob = file.readlink()
    return blob.name if blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name) else None
