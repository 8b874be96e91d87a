"""Checks files against the `SHA256SUMS` beside them, in the form that `sha256sum` writes and checks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.record import SUMS, hash_parts
from shardctl.storage import read
from shardctl.storage.byte_names import name_from_bytes
from shardctl.verify.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.storage import Source
    from shardctl.workers import Stop

_LINE: Final = re.compile(rb"(\\?)([0-9a-fA-F]{64}) [ *](.+)")
_ESCAPE: Final = re.compile(rb"\\([\\nr])")
_ESCAPED: Final = {b"\\": b"\\", b"n": b"\n", b"r": b"\r"}
"""What a line that begins with a backslash has in the file's name (coreutils, `cksum.c`)."""


def check_sums(source: Source, stop: Stop) -> Iterator[Finding]:
    """Read every file that `SHA256SUMS` lists, if there is one; a line that is not understood is a warning."""
    files = source.files()
    if SUMS not in files:
        return
    for number, line in enumerate(read(source, SUMS).removesuffix(b"\n").split(b"\n"), 1):
        found = _LINE.fullmatch(line.removesuffix(b"\r"))
        if found is None:
            yield Finding("warning", "sha256", f"line {number} of {SUMS} is not understood", file=SUMS)
            continue
        escaped, sha256, name = found.groups()
        path = name_from_bytes(_ESCAPE.sub(lambda e: _ESCAPED[e[1]], name) if escaped else name).removeprefix("./")
        if path not in files:
            yield Finding("error", "sha256", f"{path} is missing; {SUMS} lists it", file=path)
            continue
        known = hash_parts(source, path, [(0, files[path].size)], stop)
        if known.sha256.encode() != sha256.lower():
            yield Finding("error", "sha256", f"{path} is not the file that {SUMS} lists", file=path)
