"""Assembles a result from parts that are all complete: writes its record last, then gives it its name."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from shardctl.base.workers import StopRequest, raise_if_stopped
from shardctl.conversion.engine.staging import TREE_DIGITS
from shardctl.conversion.pending_record import PendingRecord, add_sums_files, build_sums_files, complete_record
from shardctl.tensors.record import RECORD, CheckpointRecord, encode_record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from shardctl.conversion.engine.part import WorkerPart
    from shardctl.conversion.engine.staging import StagingArea


def hash_result_name(*result: object) -> str:
    """Return a name that two results share only if their bytes are the same."""
    return hashlib.sha256(json.dumps(result).encode()).hexdigest()[:TREE_DIGITS]


def assemble_result(
    frame: PendingRecord,
    parts: Sequence[WorkerPart],
    staging: StagingArea,
    stop: StopRequest,
    *,
    sha256: bool,
    prove: Callable[[Path], None] | None = None,
) -> tuple[CheckpointRecord, tuple[str, ...]]:
    """Make a result of parts that are all there: its record, which is written last, and its name; returns warnings.

    `prove` is called with the directory when all is in it, before it has that name; what it raises is raised here.
    """
    record = complete_record(frame, parts)
    if sha256:
        sums = build_sums_files(record, parts)
        for path, content in sums.items():
            staging.write(path, content)
        record = add_sums_files(record, sums)
    content = encode_record(record)
    staging.write(RECORD, content)
    if prove is not None:
        prove(staging.data)
    raise_if_stopped(stop)
    return record, staging.publish({**record.files, RECORD: len(content)})
