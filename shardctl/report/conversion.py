"""Renders the result of `reshard` as text; the digest is the last line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Group

from shardctl.base.amounts import format_duration, format_file_size, format_plural, format_rate, format_stages
from shardctl.base.errors import format_first_few
from shardctl.models.names.hub.conversion_table import HUB_NAMES, SAVED_AS
from shardctl.report.grid import render_line, render_table
from shardctl.report.inspection import list_extra_facts
from shardctl.tensors.record import DERIVED, RULES_PROOF

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from shardctl.conversion.worker_part import ContributeResult
    from shardctl.tensors.record import CheckpointRecord
    from shardctl.verbs.finish import FinishResult
    from shardctl.verbs.reshard import ReshardResult
    from shardctl.verify.consumer import ConsumerVerdict


_FILES_SHOWN: Final = 5


def render_conversion(done: ReshardResult, seconds: float) -> RenderableType:
    """Render the verdict, what the result holds, and what proves it."""
    return Group(
        render_line(done.verdict, "bold green"),
        render_table(list_conversion_facts(done, seconds), indent=2),
        *_render_digests(done.record),
        *_render_consumer(done.consumer),
    )


def _render_consumer(verdict: ConsumerVerdict | None) -> Iterator[RenderableType]:
    """Render whether the consumer of `--for` should load the result, and how it is started."""
    if verdict is not None:
        yield from (render_line(f"note: {note}") for note in verdict.notes)
        yield render_line(verdict.describe(), "bold green" if verdict.loads else "bold yellow")
        yield render_line(verdict.command)


def render_contribution(done: ContributeResult, seconds: float) -> RenderableType:
    """Render the verdict, what one worker wrote, and who is still missing."""
    return Group(render_line(done.verdict, "bold green"), render_table(_list_part_facts(done, seconds), indent=2))


def render_finished(done: FinishResult, seconds: float) -> RenderableType:
    """Render the verdict, and what the parts of all workers became."""
    return Group(
        render_line(done.verdict, "bold green"),
        render_table(_list_whole_facts(done, seconds), indent=2),
        *_render_digests(done.record),
    )


def _render_digests(record: CheckpointRecord) -> Iterator[RenderableType]:
    if record.source_digest != record.digest:
        yield render_line(f"source digest {record.source_digest}")
    yield render_line(f"digest {record.digest}")


def _list_part_facts(done: ContributeResult, seconds: float) -> Iterator[tuple[str, str]]:
    part, count = done.part, done.worker.count
    yield (
        "part",
        f"{done.worker}: {format_plural(len(part.files), 'file')}, {format_file_size(sum(part.files.values()))}",
    )
    for note in done.notes:
        yield "read as", note
    if done.finished:
        yield "kept", "all of it: the result is finished, and nothing was written"
        return
    if done.done_before:
        yield "kept", "all of it: an earlier run had finished this part"
    else:
        speed = format_rate(part.written_bytes, seconds)
        moved = (
            f"read {format_file_size(part.read_bytes)}, wrote {format_file_size(part.written_bytes)} in "
            f"{format_duration(seconds)}"
        )
        yield "moved", moved + (f", {speed}" if speed else "")
        if part.shared_bytes:
            yield (
                "shared",
                f"{format_file_size(part.shared_bytes)} of that, whose blocks are those of the source's files",
            )
        if part.kept_bytes:
            yield "kept", f"{format_file_size(part.kept_bytes)} that an earlier run had written"
    there = count - len(done.missing)
    yield (
        "there",
        f"{there} of {format_plural(count, 'part')}"
        + ("; shardctl finish DST makes them one" if there == count else ""),
    )


def _list_whole_facts(done: FinishResult, seconds: float) -> Iterator[tuple[str, str]]:
    yield from _list_result_facts(done.record, done.notes)
    written = sum(part.written_bytes + part.kept_bytes for part in done.parts)
    made = (
        f"{format_file_size(written)} in {format_plural(done.workers, 'part')}, made one in {format_duration(seconds)}"
    )
    yield "parts", made if done.workers else "finished before; nothing was changed"


def list_conversion_facts(done: ReshardResult, seconds: float) -> Iterator[tuple[str, str]]:
    """List what was done, each with its name."""
    yield from _list_result_facts(done.record, done.notes)
    yield from list_extra_facts(done.extra, "dropped")
    if done.done_before:
        yield "done", "before: the destination holds exactly this result, and nothing was written"
        return
    speed = format_rate(done.written_bytes, seconds)
    moved = (
        f"read {format_file_size(done.read_bytes)}, wrote {format_file_size(done.written_bytes)} in "
        f"{format_duration(seconds)}"
    )
    yield "moved", moved + (f", {speed}" if speed else "")
    if done.shared_bytes:
        yield "shared", f"{format_file_size(done.shared_bytes)} of that, whose blocks are those of the source's files"
    if done.kept_bytes:
        yield "kept", f"{format_file_size(done.kept_bytes)} that an earlier run had written"
    if done.dropped:
        yield "dropped", format_first_few(done.dropped, _FILES_SHOWN)
    if done.proof is not None and done.proof.forward is not None:
        forward = done.proof.forward
        said = f"{forward.output} of {forward.engine} are {forward.output_error:.1e} from the source's"
        if forward.unrounded_error is not None:
            said += f" cast alike, and {forward.unrounded_error:.1e} from the source's before the cast"
        yield "proved", said


def _list_result_facts(record: CheckpointRecord, notes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    mesh = f" for {record.mesh} = {format_plural(record.mesh.world, 'rank')}" if record.mesh else ""
    yield "layout", f"{record.layout}{mesh}"
    if len(record.stages) > 1:
        yield "stages", format_stages(record.stages)
    if record.options.get("rules"):
        said = record.options["rules"]
        yield "rules", f"{said}, {record.options.get(RULES_PROOF, 'rules not proved')}" if said == DERIVED else said
    if record.options.get("names") == HUB_NAMES:
        yield "names", f"as save_pretrained of transformers {SAVED_AS} writes them"
    for note in notes:
        yield "read as", note
    yield "files", f"{format_plural(len(record.files) + 1, 'file')}, {format_file_size(sum(record.files.values()))}"
    yield "tensors", f"{len(record.tensors):,}"
