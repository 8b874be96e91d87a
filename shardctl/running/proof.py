"""Proves a result before it is given its name: its ranks run beside the source."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import Mismatch, UnsupportedError
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.options import VerifyOptions
from shardctl.running.device_levels import run_forward_level

if TYPE_CHECKING:
    from pathlib import Path

    from shardctl.base.workers import ProgressWatcher
    from shardctl.conversion.conversion_plan import PlannedConversion
    from shardctl.options import SourceOptions
    from shardctl.verify.level import LevelResult

_CUT_HINT: Final = "save the rules with inspect --show-rules, correct them, and give them with --rules"
_LOST_HINT: Final = "use --dtype bf16, or keep what overflows with --keep-fp32 REGEX"


def prove_result(
    work: PlannedConversion, directory: Path, source_options: SourceOptions, watcher: ProgressWatcher
) -> LevelResult:
    """Run what is in `directory` beside the source of `work`; `source_options` are those of the source.

    Raises Mismatch if the two compute something else, UnsupportedError if they cannot be run here, and
    MachineError if the machine lacks what that takes.
    """
    rules = replace(source_options, config=None, container=None, weights=None, true_vocab=None, kv_heads="replicate")
    with open_checkpoint(directory, rules) as result:
        level = run_forward_level(result, work.checkpoint, VerifyOptions(), watcher, strict=source_options.strict)
    if level.trouble is not None and level.status == "unfinished":
        raise level.trouble
    if level.status == "skipped":
        raise UnsupportedError(
            f"--prove cannot run the result here: {level.reason}",
            hint="leave --prove out, and verify the result where it can be",
        )
    if level.status == "failed":
        raise Mismatch(
            f"the result was not published, because it does not compute what the source computes: "
            f"{level.errors[0].message if level.errors else level.reason}",
            hint=_LOST_HINT if _is_lost(level) else _CUT_HINT,
        )
    return level


def _is_lost(level: LevelResult) -> bool:
    """Return whether the outputs are not finite, which a cast makes them and no cut."""
    found = level.forward
    return found is not None and found.unrounded_error is not None and not isfinite(found.unrounded_error)
