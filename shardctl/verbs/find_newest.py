"""Finds the newest checkpoint of a run that is whole, for scripts that resume."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import Interrupted, MachineError, MemoryBudgetError, ShardctlError, SourceError
from shardctl.base.value import value_class
from shardctl.storage import HIDDEN
from shardctl.verbs.verify import require_trust, verify

if TYPE_CHECKING:
    from shardctl.base.workers import ExecutionOptions
    from shardctl.options import SourceOptions, VerifyOptions

_STEP_NUMBER_PATTERN: Final = re.compile(r"(\d+)$")


@value_class
class PassedCheckpoint:
    """A newer directory that is no whole checkpoint."""

    name: str
    reasons: tuple[str, ...]


@value_class
class NewestCheckpoint:
    """The newest checkpoint of a run that is whole, if there is one."""

    path: str
    """Of the run."""
    name: str
    """Of the checkpoint, inside the run; empty if none is whole."""
    order: str
    """What says which is newer: `number` at the end of the name, or `time` of the last change."""
    passed: tuple[PassedCheckpoint, ...]
    """The newer ones, the newest first."""


def find_newest(
    path: str | Path,
    verify_options: VerifyOptions | None = None,
    *,
    source_options: SourceOptions | None = None,
    effort: ExecutionOptions | None = None,
) -> NewestCheckpoint:
    """Verify the directories of a run, the newest first, until one is whole.

    Of directories whose names end with a number, as steps do, the largest is the newest, and others are no checkpoints;
    where no name has one, it is the one that was changed last. Raises
    SourceError if the run is no directory or has none inside, UsageError for a policy or a key that is none,
    MachineError or MemoryBudgetError where this machine cannot finish what was asked for.
    """
    run = Path(path)
    if not run.is_dir():
        raise SourceError(f"{path} is no directory", hint="give the directory that has a run's checkpoints")
    inside = [each for each in run.iterdir() if each.is_dir() and each.name not in HIDDEN]
    numbered = [each for each in inside if _STEP_NUMBER_PATTERN.search(each.name)]
    if not inside:
        raise SourceError(f"{path} has no directories", hint="give the directory that has a run's checkpoints")
    if numbered:
        inside = sorted(numbered, key=lambda each: (_find_step(each), each.name), reverse=True)
    else:
        inside = sorted(inside, key=_find_last_change, reverse=True)
    if verify_options is not None:
        require_trust(verify_options)  # what is wrong for each of them says nothing of any
    order = "number" if numbered else "time"
    passed: list[PassedCheckpoint] = []
    for each in inside:
        try:
            found = verify(each, verify_options, source_options=source_options, effort=effort)
            reasons = [finding.message for finding in found.findings if finding.severity == "error"]
            reasons += [f"{level.name} is required and was skipped: {level.reason}" for level in found.unmet]
            if found.trouble is not None:
                raise found.trouble
            if found.ok:
                return NewestCheckpoint(str(path), each.name, order, tuple(passed))
        except (Interrupted, MachineError, MemoryBudgetError):
            raise  # which says nothing of the checkpoint: an older one would be taken for the newest
        except ShardctlError as error:
            reasons = [error.message]
        passed.append(PassedCheckpoint(each.name, tuple(reasons)))
    return NewestCheckpoint(str(path), "", order, tuple(passed))


def _find_step(folder: Path) -> int:
    """Find the step at the end of a directory's name; 0 if there is none."""
    found = _STEP_NUMBER_PATTERN.search(folder.name)
    return int(found[1]) if found is not None else 0


def _find_last_change(folder: Path) -> int:
    """Find when a file of a directory was last changed, in nanoseconds."""
    return max((each.stat().st_mtime_ns for each in (folder, *folder.rglob("*")) if each.exists()), default=0)
