"""Proves a result before it is given its name: its ranks run beside the source."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardctl.checkpoint.opening import open_checkpoint
from shardctl.errors import Mismatch, UnsupportedError
from shardctl.loading.device_levels import run_forward_level
from shardctl.options import VerifyOptions

if TYPE_CHECKING:
    from pathlib import Path

    from shardctl.conversion.conversion_plan import PlannedConversion
    from shardctl.options import SourceOptions
    from shardctl.verify.level import LevelResult
    from shardctl.workers import ProgressWatcher


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
            hint="save the rules with inspect --show-rules, correct them, and give them with --rules",
        )
    return level
