"""Renders the results of `digest`, as lines like those of sha256sum, and of `attest`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group

from shardctl.base.amounts import format_file_size, format_plural
from shardctl.report.grid import render_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shardctl.conversion.engine_sums import EngineSums
    from shardctl.verbs.attest import AttestResult
    from shardctl.verbs.digest import DigestResult


def render_digests(digested: DigestResult, *, tensors: bool = False, expected: str | None = None) -> RenderableType:
    """Render one line for each tensor on request, one for the checkpoint, and one if it is not as `expected`."""
    lines = []
    if tensors:
        lines = [f"{row.digest}  {row.dtype}  {list(row.shape)}  {name}" for name, row in digested.tensors.items()]
    lines.append(f"{digested.digest}  {digested.path}")
    if expected not in {None, digested.digest}:
        lines.append(f"FAILED: {expected} was expected")
    return Group(*map(render_line, lines))


def render_attestation(done: AttestResult) -> RenderableType:
    """Render what was signed, with which key, and the digests that the statement has."""
    by = f" with the key {done.key_hash}" if done.key_hash else ""
    lines = [f"signed: {format_plural(done.files, 'file')}, {format_file_size(done.nbytes)}{by}"]
    lines += [f"statement {done.statement}", f"signature {done.signature}"]
    lines += [f"not checked: {text}" for text in done.unchecked]
    return Group(*map(render_line, [*lines, f"digest {done.digest}", f"source digest {done.source_digest}"]))


def render_engine_sums(found: EngineSums) -> RenderableType:
    """Render one line for each array and rank; a mark follows those that the engine may keep in another order."""
    mark = "  (unknown: a kernel may keep another order)"
    return Group(
        *(render_line(f"{value}  {key}{mark if key in found.reordered else ''}") for key, value in found.sums.items())
    )
