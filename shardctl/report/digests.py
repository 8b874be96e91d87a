"""Renders the result of `digest` as lines like those of sha256sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group

from shardctl.report.grid import render_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shardctl.verbs.digest import DigestResult


def render_digests(digested: DigestResult, *, tensors: bool = False) -> RenderableType:
    """Render one line for the checkpoint, as the last; before it, on request, one for each tensor."""
    lines = []
    if tensors:
        lines = [f"{row.digest}  {row.dtype}  {list(row.shape)}  {name}" for name, row in digested.tensors.items()]
    return Group(*(render_line(text) for text in [*lines, f"{digested.digest}  {digested.path}"]))
