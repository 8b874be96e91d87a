"""What `reshard` did, as text; the digest is the last line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group

from shardctl.report.grid import line, table
from shardctl.report.sizes import duration, file_size, plural, rate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from shardctl.verbs.reshard import Resharded


def conversion(done: Resharded, seconds: float) -> RenderableType:
    """Where the result is, what it holds, and what proves it."""
    record = done.record
    source = [] if record.source_digest == record.digest else [line(f"source digest {record.source_digest}")]
    return Group(
        line(done.destination, "bold"),
        table(_facts(done, seconds), indent=2),
        *source,
        line(f"digest {record.digest}"),
    )


def _facts(done: Resharded, seconds: float) -> Iterator[tuple[str, str]]:
    record = done.record
    mesh = f" for {record.mesh} = {plural(record.mesh.world, 'rank')}" if record.mesh else ""
    yield "layout", f"{record.layout}{mesh}"
    if len(record.stages) > 1:
        yield "stages", f"{', '.join(map(str, record.stages))} layers"
    for note in done.notes:
        yield "read as", note
    yield "files", f"{plural(len(record.files) + 1, 'file')}, {file_size(sum(record.files.values()))}"
    yield "tensors", f"{len(record.tensors):,}"
    speed = rate(done.written_bytes, seconds)
    moved = f"read {file_size(done.read_bytes)}, wrote {file_size(done.written_bytes)} in {duration(seconds)}"
    yield "moved", moved + (f", {speed}" if speed else "")
    if done.kept_bytes:
        yield "kept", f"{file_size(done.kept_bytes)} that an earlier run had written"
