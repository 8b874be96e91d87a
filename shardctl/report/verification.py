"""Renders the result of `verify` as text: the verdict, levels, findings (errors first)."""

from __future__ import annotations

from itertools import groupby
from math import isfinite
from typing import TYPE_CHECKING, Final

from rich.console import Group

from shardctl.base.amounts import format_duration, format_file_size, format_memory_size, format_plural, format_rate
from shardctl.report.grid import render_line, render_table
from shardctl.verify.level import ATTESTATION

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType
    from rich.text import Text

    from shardctl.verify.engine_result import EngineResult
    from shardctl.verify.finding import CheckFinding
    from shardctl.verify.forward_result import ForwardResult
    from shardctl.verify.level import BlockPlacement, LevelResult, LoadedRank, VerifyResult

RANKS: Final = 16
"""Ranks in full; --json has them all."""
SHOWN: Final = 50
"""Findings in full; --json and --junit have them all."""


def render_verification(verified: VerifyResult) -> RenderableType:
    """Render the verdict, the outcome of each level, each finding, and the digest if it was computed."""
    findings = verified.findings
    parts: list[RenderableType] = [
        render_line(verified.verdict, "bold green" if verified.ok else "bold red"),
        render_table([_build_level_row(level) for level in verified.levels], right=frozenset({2, 3, 4})),
    ]
    parts += [part for level in verified.levels for part in _list_details(level)]
    parts += [text for finding in findings[:SHOWN] for text in _list_finding_lines(finding)]
    if len(findings) > SHOWN:
        parts.append(render_line(f"and {len(findings) - SHOWN:,} more findings; --json lists them all"))
    parts += [render_line(f"not checked: {text}") for text in verified.unchecked]
    if verified.digest:
        parts.append(render_line(f"digest {verified.digest}"))
    if verified.consumer is not None:
        parts += [render_line(f"note: {note}") for note in verified.consumer.notes]
        parts += [render_line(f"{number}. {reason}") for number, reason in enumerate(verified.consumer.reasons[1:], 2)]
        parts.append(render_line(verified.consumer.describe(), "bold green" if verified.consumer.loads else "bold red"))
        if verified.consumer.loads:
            parts.append(render_line(verified.consumer.command))
    return Group(*parts)


def _build_level_row(level: LevelResult) -> tuple[str, ...]:
    if level.status == "skipped":
        return level.name, "skipped"
    read = format_file_size(level.nbytes) if level.nbytes else ""
    return (
        level.name,
        level.status,
        _format_checked(level),
        read,
        format_duration(level.seconds),
        format_rate(level.nbytes, level.seconds),
    )


def _format_checked(level: LevelResult) -> str:
    """Format how many things a level looked at: tensors, or files of a signature."""
    if level.name != ATTESTATION:
        return format_plural(level.tensors, "tensor")
    return format_plural(level.attestation.files, "file") if level.attestation is not None else ""


def _list_details(level: LevelResult) -> Iterator[RenderableType]:
    """List what a level says besides its outcome."""
    if level.reason:
        yield render_line(f"{'not finished' if level.trouble else 'skipped'}: {level.name}: {level.reason}")
    if level.ranks:
        yield render_table(
            [build_loaded_row(loaded) for loaded in level.ranks[:RANKS]], right=frozenset({2, 3, 4, 5}), indent=4
        )
        if len(level.ranks) > RANKS:
            yield render_line(f"    and {len(level.ranks) - RANKS:,} more ranks; --json lists them all")
    if level.placement:
        rows = build_placement_rows(level.placement)
        yield render_table(rows[:SHOWN], right=frozenset({2}), indent=4)
        if len(rows) > SHOWN:
            yield render_line(f"    and {len(rows) - SHOWN:,} more blocks; --json lists them all")
    if level.forward is not None:
        yield render_table(build_forward_rows(level.forward), indent=4)
    yield from (render_line(f"    {line}") for line in level.describe_reading())
    if level.attestation is not None:
        stated = f", made from {level.attestation.source_digest}" if level.attestation.source_digest else ""
        yield render_line(f"    signed by {level.attestation.signer}{stated}")
    if level.engine is not None:
        yield render_table(build_engine_rows(level.engine), indent=4)
    for note in level.notes:
        yield render_line(f"note: {level.name}: {note}")


def build_loaded_row(loaded: LoadedRank) -> tuple[str, ...]:
    """Build a rank, its device, bytes, speed, peak, and what was planned."""
    name = "whole" if loaded.rank is None else f"rank {loaded.rank}"
    return (
        f"{name} ({loaded.label})" if loaded.label else name,
        loaded.device,
        format_file_size(loaded.nbytes),
        format_rate(loaded.nbytes, loaded.seconds),
        f"peak {format_memory_size(loaded.peak_bytes)}",
        f"plan {format_memory_size(loaded.planned_bytes)}" if loaded.planned_bytes is not None else "",
    )


def build_placement_rows(placement: Sequence[BlockPlacement]) -> list[tuple[str, str, str]]:
    """Build where blocks went; neighbours of one size on one device share a row."""
    rows = []
    for (place, nbytes), same in groupby(placement, lambda each: (each.place, each.nbytes)):
        first, *rest = [each.block for each in same]
        name = f"{first} to {rest[-1]} ({len(rest) + 1} blocks)" if rest else first
        rows.append((name, place, format_memory_size(nbytes) + (" each" if rest else "")))
    return rows


def build_forward_rows(result: ForwardResult) -> list[tuple[str, str]]:
    """Build what ran, how far it was off, and what the two said to a prompt; nothing if nothing ran."""
    if result.status == "skipped":
        return []
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    rows = [("engine", f"{result.engine}, {result.dtype} on {result.device}" + (f"; {versions}" if versions else ""))]
    if result.share is not None:
        rows.append(("by ranks", f"{result.share.own:.1%} of the weights, each rank with what it holds"))
        rows += [("not by ranks", str(joined)) for joined in result.share.joined]
    bounds = result.tolerance
    if result.worst is not None:
        rounding = f", rounding {bounds.floor:.1e}" if bounds is not None and not bounds.exact else ""
        allowed = _format_bound(bounds.block) if bounds is not None else ""
        rows.append(("worst block", f"{result.worst.name} {_format_distance(result.worst.error)}{allowed}{rounding}"))
    if result.output:
        flips = f"; {result.flips:,} of {result.positions:,} positions choose another token" if result.positions else ""
        allowed = _format_bound(bounds.logits) if bounds is not None else ""
        rows.append((result.output, f"{_format_distance(result.output_error)}{allowed}{flips}"))
    if result.unrounded_error is not None:
        title = "before quantization" if result.change == "quantization" else "before the cast"
        rows.append((title, f"{_format_distance(result.unrounded_error)} from the unrounded source's"))
    rows += [(title, text) for title, text in _list_distance_rows(result)]
    if result.golden is not None:
        same = f"; {result.golden.same_tokens:,} of {result.golden.positions:,} positions choose the same token"
        allowed = _format_bound(result.golden.bound) + (same if result.golden.positions else "")
        rows.append(("golden output", f"{_format_distance(result.golden.error)}{allowed}"))
    if result.opinion is not None and result.opinion.status != "skipped":
        said = f"transformers' tensor parallelism {result.opinion.status}, {_format_distance(result.opinion.error)}"
        rows.append(("second opinion", said))
    if result.generated is not None:
        rows.append(("prompt", repr(result.generated.prompt)))
        rows.append(("source", repr(result.generated.source.text)))
        same = "the same" if result.generated.same else repr(result.generated.shards.text)
        rows.append(("shards", same))
    return rows


def _list_distance_rows(result: ForwardResult) -> Iterator[tuple[str, str]]:
    """List the distances in the measures that papers give, and what decoding and a text gave."""
    for title, found in (("distances", result.distances), ("from the original", result.unrounded_distances)):
        if found is None or (title == "distances" and result.output_error == 0):
            continue
        words = [f"cosine at least {found.cosine:.7f}", f"largest difference {found.largest:.1e}"]
        if found.kl is not None:
            words = [
                f"KL {found.kl:.1e} nats (largest {found.largest_kl:.1e})",
                f"top-1 {found.top1:.1%}",
                f"top-5 {found.top5:.1%}",
                *words,
                f"of a log-probability {found.log_probability:.1e}",
            ]
        yield title, ", ".join(words)
    if result.decoding is not None:
        bound = _format_bound(result.tolerance.logits) if result.tolerance is not None else ""
        steps = f"{result.decoding.decoded} tokens after a prefill of {result.decoding.prefill}"
        cached = f"the source's own, without a cache, {_format_distance(result.decoding.cache_error)}"
        yield "KV cache", f"{steps}: {_format_distance(result.decoding.error)}{bound}; {cached}"
    if result.perplexity is not None:
        text = f"{result.perplexity.shards:.4f}, the source's {result.perplexity.source:.4f}"
        yield "perplexity", f"{text}; {result.perplexity.tokens:,} tokens in windows of {result.perplexity.window}"


def build_engine_rows(result: EngineResult) -> list[tuple[str, str]]:
    """Build what an engine ran, and how far it was off."""
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    scores = f"{_format_distance(result.apart)}{_format_bound(result.allowed)}; {result.compared:,} were compared"
    return [
        ("engine", f"{result.engine} on {format_plural(result.ranks, 'rank')}, {result.dtype}; {versions}"),
        ("log-probabilities", scores),
        ("tokens", f"{result.same:,} of {result.tokens:,} that follow {result.prompts} prompts are the source's"),
    ]


def _format_distance(distance: float) -> str:
    return "equal" if distance == 0 else f"{distance:.1e} off" if isfinite(distance) else "not comparable"


def _format_bound(bound: float) -> str:
    if not bound:
        return ", must be equal"
    return f", allowed {bound:.0e}" if isfinite(bound) else ", not judged"


def _list_finding_lines(finding: CheckFinding) -> Iterator[Text]:
    style = "red" if finding.severity == "error" else "yellow"
    yield render_line(f"{finding.severity}: [{finding.check}] {finding.message}", style)
    place = {"file": finding.file, "tensor": finding.tensor, "box": finding.box}
    unsaid = [f"{what} {value}" for what, value in place.items() if value and value not in finding.message]
    if unsaid:
        yield render_line(f"    {', '.join(unsaid)}")
