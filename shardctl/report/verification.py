"""What `verify` found, as text: levels, findings (errors first), verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Group

from shardctl.report.grid import line, table
from shardctl.report.sizes import duration, file_size, plural, rate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType
    from rich.text import Text

    from shardctl.verbs.verify import Level, Verified
    from shardctl.verify.finding import Finding

SHOWN: Final = 50
"""Findings in full; --json and --junit have them all."""


def verification(verified: Verified) -> RenderableType:
    """The outcome of each level, each finding, the digest if it was computed, and the verdict."""
    findings = verified.findings
    parts: list[RenderableType] = [table([_level(level) for level in verified.levels], right=frozenset({2, 3, 4}))]
    parts += [text for finding in findings[:SHOWN] for text in _finding(finding)]
    if len(findings) > SHOWN:
        parts.append(line(f"and {len(findings) - SHOWN:,} more findings; --json lists them all"))
    if verified.digest:
        parts.append(line(f"digest {verified.digest}"))
    parts.append(line(verdict(verified), "bold green" if verified.ok else "bold red"))
    return Group(*parts)


def verdict(verified: Verified) -> str:
    """``ok``, or how many findings made it fail; warnings are counted apart."""
    errors = sum(finding.severity == "error" for finding in verified.findings)
    warnings = len(verified.findings) - errors
    odd = f" ({plural(warnings, 'warning')})" if warnings else ""
    return f"ok{odd}" if verified.ok else f"FAILED: {plural(errors, 'finding')}{odd}"


def _level(level: Level) -> tuple[str, ...]:
    if level.status == "skipped":
        return level.name, "skipped", level.reason
    read = file_size(level.nbytes) if level.nbytes else ""
    return (
        level.name,
        level.status,
        plural(level.tensors, "tensor"),
        read,
        duration(level.seconds),
        rate(level.nbytes, level.seconds),
    )


def _finding(finding: Finding) -> Iterator[Text]:
    style = "red" if finding.severity == "error" else "yellow"
    yield line(f"{finding.severity}: [{finding.check}] {finding.message}", style)
    place = {"file": finding.file, "tensor": finding.tensor, "box": finding.box}
    unsaid = [f"{what} {value}" for what, value in place.items() if value and value not in finding.message]
    if unsaid:
        yield line(f"    {', '.join(unsaid)}")
