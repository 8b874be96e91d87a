"""Finds out whether a destination already holds what a conversion would make: then there is nothing left to do.

Schedulers start a command again after it has ended well. It ends well again if the record at the destination has the
same plan, its files are as recorded, and the source still has the elements of which the record has digests. For that
the source is read: size and modification time would not show that other values were saved under the same names.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from shardctl.base.errors import DestinationError, SourceError
from shardctl.base.version import __version__
from shardctl.base.workers import ExecutionOptions, StopRequest
from shardctl.storage.addresses import open_source
from shardctl.storage.bounded_text import RECORD_TEXT, read_text
from shardctl.storage.cloud import is_bucket
from shardctl.storage.hub import is_hub_address
from shardctl.tensors.manifest import first_byte
from shardctl.tensors.record import RECORD, SUMS, CheckpointRecord, hash_source_spans, parse_record
from shardctl.verify.content import measure_content
from shardctl.verify.structure import check_files, check_hashes

if TYPE_CHECKING:
    from shardctl.base.workers import ProgressWatcher
    from shardctl.conversion.conversion_plan import PlannedConversion
    from shardctl.conversion.engine.worker import WorkerId
    from shardctl.options import DestinationOptions


def find_finished_result(
    work: PlannedConversion,
    destination: str | Path,
    options: DestinationOptions,
    progress: ProgressWatcher,
    stop: StopRequest,
    *,
    worker: WorkerId | None = None,
) -> CheckpointRecord | None:
    """Return the record of a destination that holds exactly what `work` would write; None if it holds anything else.

    A `worker` reads only every N-th tensor of the source, so that all of them together read it once. The values at the
    destination are not read: `verify --level full` does that.

    Raises DestinationError if the source had other elements when the destination was written, Interrupted.
    """
    record = _read_matching_record(work, destination, sha256=options.sha256)
    if record is None:
        return None
    source = work.checkpoint.source
    source.set_stop_request(stop)
    tensors = sorted(work.have.tensors.values(), key=first_byte)
    sides = [side for side in work.carried if side.content is None]
    if worker is not None:
        tensors, sides = tensors[worker.number :: worker.count], sides[worker.number :: worker.count]
    effort = ExecutionOptions(work.budget.threads, progress, stop, work.budget.block)
    found = measure_content(tensors, source, effort, values=False, phase="already done, reading the source again")
    changed = [
        tensor.name
        for tensor, digest in zip(tensors, found.compute_digests(), strict=True)
        if digest != record.tensors[tensor.name].source_digest
    ]
    changed += [
        side.name
        for side in sides
        if hash_source_spans(source, side.file, [(side.offset, side.nbytes)], stop).sha256
        != record.hashes[side.name].sha256
    ]
    if changed:
        raise DestinationError(
            f"{destination} holds the result of this conversion for an earlier state of {source.name}: {changed[0]} "
            f"has changed since{f', and {len(changed) - 1} more' if len(changed) > 1 else ''}",
            hint="add --overwrite to replace it once the new one is complete, or choose another destination",
        )
    return record


def _read_matching_record(work: PlannedConversion, destination: str | Path, *, sha256: bool) -> CheckpointRecord | None:
    """Read the record at a destination if it is of the same plan and its files are as it says; None otherwise."""
    remote = is_bucket(destination) or is_hub_address(destination)
    if not remote and not (Path(destination) / RECORD).is_file():
        return None
    try:
        place = open_source(destination if remote else Path(destination))
        with closing(place):
            files = place.files()
            if RECORD not in files:
                return None
            record = parse_record(read_text(place, RECORD, RECORD_TEXT))
            same = (record.plan, record.version, SUMS in record.files) == (work.identity(), __version__, sha256)
            findings = (*check_files(record, files), *check_hashes(record, place)) if same else ()
            return record if same and not any(each.severity == "error" for each in findings) else None
    except SourceError:  # damaged, or nothing is there: whoever writes to it says so
        return None
