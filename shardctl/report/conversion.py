"""What `reshard` did, as text; the digest is the last line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group

from shardctl.amounts import duration, file_size, plural, rate
from shardctl.report.grid import line, table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from shardctl.record import Record
    from shardctl.verbs.contribute import Contributed
    from shardctl.verbs.finish import Finished
    from shardctl.verbs.reshard import Resharded


def conversion(done: Resharded, seconds: float) -> RenderableType:
    """Where the result is, what it holds, and what proves it."""
    return Group(line(done.destination, "bold"), table(_facts(done, seconds), indent=2), *_digests(done.record))


def contribution(done: Contributed, seconds: float) -> RenderableType:
    """What one worker wrote, and who is still missing."""
    return Group(line(done.destination, "bold"), table(_part_facts(done, seconds), indent=2))


def finished(done: Finished, seconds: float) -> RenderableType:
    """What the parts of all workers became."""
    return Group(line(done.destination, "bold"), table(_whole_facts(done, seconds), indent=2), *_digests(done.record))


def _digests(record: Record) -> Iterator[RenderableType]:
    if record.source_digest != record.digest:
        yield line(f"source digest {record.source_digest}")
    yield line(f"digest {record.digest}")


def _part_facts(done: Contributed, seconds: float) -> Iterator[tuple[str, str]]:
    part, count = done.part, done.worker.count
    yield "part", f"{done.worker}: {plural(len(part.files), 'file')}, {file_size(sum(part.files.values()))}"
    for note in done.notes:
        yield "read as", note
    if done.done_before:
        yield "kept", "all of it: an earlier run had finished this part"
    else:
        speed = rate(part.written_bytes, seconds)
        moved = f"read {file_size(part.read_bytes)}, wrote {file_size(part.written_bytes)} in {duration(seconds)}"
        yield "moved", moved + (f", {speed}" if speed else "")
        if part.kept_bytes:
            yield "kept", f"{file_size(part.kept_bytes)} that an earlier run had written"
    there = count - len(done.missing)
    yield (
        "there",
        f"{there} of {plural(count, 'part')}" + ("; shardctl finish DST makes them one" if there == count else ""),
    )


def _whole_facts(done: Finished, seconds: float) -> Iterator[tuple[str, str]]:
    yield from _result_facts(done.record, done.notes)
    written = sum(part.written_bytes + part.kept_bytes for part in done.parts)
    made = f"{file_size(written)} in {plural(done.workers, 'part')}, made one in {duration(seconds)}"
    yield "parts", made if done.workers else "finished before; nothing was changed"


def _facts(done: Resharded, seconds: float) -> Iterator[tuple[str, str]]:
    yield from _result_facts(done.record, done.notes)
    speed = rate(done.written_bytes, seconds)
    moved = f"read {file_size(done.read_bytes)}, wrote {file_size(done.written_bytes)} in {duration(seconds)}"
    yield "moved", moved + (f", {speed}" if speed else "")
    if done.kept_bytes:
        yield "kept", f"{file_size(done.kept_bytes)} that an earlier run had written"


def _result_facts(record: Record, notes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    mesh = f" for {record.mesh} = {plural(record.mesh.world, 'rank')}" if record.mesh else ""
    yield "layout", f"{record.layout}{mesh}"
    if len(record.stages) > 1:
        yield "stages", f"{', '.join(map(str, record.stages))} layers"
    for note in notes:
        yield "read as", note
    yield "files", f"{plural(len(record.files) + 1, 'file')}, {file_size(sum(record.files.values()))}"
    yield "tensors", f"{len(record.tensors):,}"
