"""Makes a result of parts that are all there: its record, written last, and then its name."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from shardctl.record import RECORD, SUMS, Record, dump
from shardctl.verbs.frame import PendingRecord, completed, sums_file, with_sums
from shardctl.workers import Stop, heed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardctl.execute.part import Part
    from shardctl.execute.staging import Staging


def result_name(*result: object) -> str:
    """A name that two results share only if their bytes are the same."""
    return hashlib.sha256(json.dumps(result).encode()).hexdigest()[:16]


def assembled(
    frame: PendingRecord, parts: Sequence[Part], staging: Staging, stop: Stop, *, sha256: bool
) -> tuple[Record, tuple[str, ...]]:
    """Make a result of parts that are all there: its record, which is written last, and its name; returns warnings."""
    record = completed(frame, parts)
    if sha256:
        content = sums_file(parts)
        staging.write(SUMS, content)
        record = with_sums(record, content)
    content = dump(record)
    staging.write(RECORD, content)
    heed(stop)
    return record, staging.publish({**record.files, RECORD: len(content)})
