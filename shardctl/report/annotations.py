"""What `verify` found, as annotations that GitHub shows beside the files of a workflow's run.

GitHub shows at most ten errors and ten warnings of a step, and drops the rest
(docs.github.com/en/actions, "Workflow commands" and "Limitations of annotations").
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.report.verification import verdict
from shardctl.report.visible import visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.verbs.level import Verified
    from shardctl.verify.finding import Finding

MOST: Final = 10


def github(verified: Verified) -> str:
    """At most ten lines, errors first; the last of ten says how many more there are."""
    lines = list(_lines(verified))
    if len(lines) > MOST:
        rest = len(lines) - MOST + 1
        lines[MOST - 1 :] = [_command("error", verified.path, verdict(verified), f"and {rest:,} more findings")]
    return "".join(f"{line}\n" for line in lines)


def _lines(verified: Verified) -> Iterator[str]:
    for level in verified.unmet:
        message = f"{level.name} is required and was skipped: {level.reason}"
        yield _command("error", verified.path, f"shardctl {level.name}", message)
    for finding in verified.findings:
        yield _command(finding.severity, _path(verified.path, finding), f"shardctl {finding.check}", finding.message)


def _path(checkpoint: str, finding: Finding) -> str:
    return f"{checkpoint.rstrip('/')}/{finding.file}" if finding.file else checkpoint


def _command(kind: str, file: str, title: str, message: str) -> str:
    return f"::{kind} file={_property(file)},title={_property(title)}::{_data(visible(message))}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(visible(text)).replace(":", "%3A").replace(",", "%2C")
