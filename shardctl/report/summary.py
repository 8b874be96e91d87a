"""What `verify` found, as Markdown for a job's summary page."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.amounts import duration, file_size, rate
from shardctl.report.verification import RANKS, SHOWN, forward_rows, loaded_row, verdict
from shardctl.report.visible import visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardctl.verbs.level import Verified

_SPECIAL: Final = re.compile(r"([\\`*_\[\]<>|#&])")


def summary(verified: Verified) -> str:
    """The verdict, a table of levels, and a table of findings."""
    return "".join(f"{line}\n" for line in _lines(verified))


def _lines(verified: Verified) -> Iterator[str]:
    yield f"### shardctl verify: {verdict(verified)}"
    yield ""
    yield f"Checkpoint: {_escaped(verified.path)}" + (
        f", against {_escaped(verified.against)}" if verified.against else ""
    )
    yield ""
    yield from _table(
        ("level", "status", "tensors", "read", "time", "rate"),
        (
            (
                level.name,
                f"{level.status}: {level.reason}" if level.reason else level.status,
                f"{level.tensors:,}",
                file_size(level.nbytes),
                duration(level.seconds),
                rate(level.nbytes, level.seconds),
            )
            for level in verified.levels
        ),
    )
    for level in verified.levels:
        if level.ranks:
            yield ""
            head = ("rank", "device", "read", "rate", "peak", "plan")
            yield from _table(head, (loaded_row(loaded) for loaded in level.ranks[:RANKS]))
            if len(level.ranks) > RANKS:
                yield ""
                yield f"And {len(level.ranks) - RANKS:,} more ranks."
        if level.forward is not None and forward_rows(level.forward):
            yield ""
            yield from _table(("forward", ""), forward_rows(level.forward))
        for note in level.notes:
            yield ""
            yield f"Note: {level.name}: {_escaped(note)}"
    findings = verified.findings
    if findings:
        yield ""
        rows = ((f.severity, f.check, f.message, f.file, f.tensor, f.box) for f in findings[:SHOWN])
        yield from _table(("severity", "check", "what", "file", "tensor", "box"), rows)
    if len(findings) > SHOWN:
        yield ""
        yield f"And {len(findings) - SHOWN:,} more findings."
    if verified.digest:
        yield ""
        yield f"Digest: `{verified.digest}`"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    titles = list(head)
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for row in rows:
        yield f"| {' | '.join(_escaped(cell) for cell in row)} |"


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", visible(text))
