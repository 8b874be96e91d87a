"""Checks files against the `SHA256SUMS` beside them, in the form that `sha256sum` writes and checks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.record import SUMS, hash_parts
from shardctl.storage import read
from shardctl.verify.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.storage import Source
    from shardctl.workers import Stop

_LINE: Final = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")


def check_sums(source: Source, stop: Stop) -> Iterator[Finding]:
    """Read every file that `SHA256SUMS` lists, if there is one; a line that is not understood is a warning."""
    files = source.files()
    if SUMS not in files:
        return
    for number, line in enumerate(read(source, SUMS).decode("utf-8", "replace").splitlines(), 1):
        found = _LINE.fullmatch(line)
        if found is None:
            yield Finding("warning", "sha256", f"line {number} of {SUMS} is not understood", file=SUMS)
            continue
        path = found[2].removeprefix("./")
        if path not in files:
            yield Finding("error", "sha256", f"{path} is missing; {SUMS} lists it", file=path)
            continue
        known = hash_parts(source, path, [(0, files[path].size)], stop)
        if known.sha256 != found[1].lower():
            yield Finding("error", "sha256", f"{path} is not the file that {SUMS} lists", file=path)
