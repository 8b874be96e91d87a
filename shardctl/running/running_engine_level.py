"""Runs the level of `verify` that asks a running engine which weights it holds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from shardctl.base.amounts import format_plural
from shardctl.base.errors import format_first_few
from shardctl.conversion.engine_sums import format_engine_key, sum_engine_arrays
from shardctl.running.engines.weight_checker import EMPTY, fetch_held_weights
from shardctl.verify.finding import CheckFinding
from shardctl.verify.level import LevelResult

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardctl.base.workers import ExecutionOptions
    from shardctl.conversion.engine_sums import EngineSums
    from shardctl.options import SourceOptions
    from shardctl.running.engines.weight_checker import HeldWeights

_CHECK_NAME: Final = "engine"


def run_running_engine_level(
    path: str | Path, address: str, seconds: int, source_options: SourceOptions, effort: ExecutionOptions
) -> LevelResult:
    """Compare the sums of the weights that an engine holds with those of the checkpoint at `path`.

    What may lie in another order there is no verdict: a note counts it. Raises as `fetch_held_weights` and
    `sum_engine_arrays`.
    """
    level, began = LevelResult("engine", strict=source_options.strict), time.monotonic()
    held = fetch_held_weights(address, float(seconds))
    expected = sum_engine_arrays(path, held.mesh, source_options=source_options, effort=effort)
    same, unknown = _compare_sums(level, held, expected, address)
    replicas = f" in {held.replicas} replicas" if held.replicas > 1 else ""
    level.notes.append(
        f"{same:,} of {format_plural(len(held.sums), 'array')} that {address} holds for {held.mesh}{replicas} are the "
        "checkpoint's, by SHA-256"
    )
    if unknown:
        level.notes.append(
            f"unknown: {format_plural(len(unknown), 'array')} of which the engine's kernels may keep another order or "
            f"type ({format_first_few(unknown)})"
        )
    if not same and not level.errors:
        level.skip("the engine's kernels keep all of these weights in an order of their own")
    level.tensors, level.nbytes, level.seconds = same, expected.nbytes, time.monotonic() - began
    return level


def _compare_sums(level: LevelResult, held: HeldWeights, expected: EngineSums, address: str) -> tuple[int, list[str]]:
    """Add findings of arrays that differ; return how many are equal, and which are in an order that is not known."""
    same, unknown, other = 0, [], []
    missing = dict.fromkeys((replica, key) for replica in range(held.replicas) for key in expected.sums)
    shared: dict[tuple[int, str, str], bool] = {}
    for (replica, pp, tp, name), value in held.sums.items():
        key = format_engine_key(name, pp=pp, tp=tp)
        missing.pop((replica, key), None)
        wanted = expected.sums.get(key)
        if wanted == value:
            same += 1
            shared[replica, format_engine_key("", pp=pp, tp=tp), value] = True
        elif value == EMPTY or key in expected.reordered:
            unknown.append(key)
        else:
            other.append((replica, key, wanted))
    level.add(_describe_differences(other, address))
    # of a tie, the engine names one; what it does not name may be the same array under its other name
    absent = [
        key
        for replica, key in missing
        if not shared.get((replica, f"{key.rpartition(':')[0]}:", expected.sums[key])) and key not in expected.reordered
    ]
    if absent:
        message = f"{address} does not have {format_first_few(absent)}"
        level.add(iter([CheckFinding("error", _CHECK_NAME, message)]))
    return same, unknown


def _describe_differences(other: list[tuple[int, str, str | None]], address: str) -> Iterator[CheckFinding]:
    for replica, key, wanted in other:
        where = f" of replica {replica}" if replica else ""
        if wanted is None:
            message = f"{address} holds {key}{where}, which the checkpoint does not have"
        else:
            message = f"{address} holds other elements of {key}{where}, or in another type than the checkpoint's"
        yield CheckFinding("error", _CHECK_NAME, message, key.rpartition(":")[2])
