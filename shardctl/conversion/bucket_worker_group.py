"""Runs one worker's share of a conversion into a bucket; `finish` then writes the record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardctl.base.errors import Mismatch, SourceError, format_first_few
from shardctl.base.workers import StopRequest, raise_if_stopped
from shardctl.conversion.bucket_output import (
    ShareGroups,
    ShareSender,
    publish_parts,
    replacement_warnings,
    require_object_names,
    result_files,
    scratch_directory,
)
from shardctl.conversion.engine.bucket_claim import BucketClaim, PlaceTakenError, noted_plan, published_record
from shardctl.conversion.engine.interrupt import stop_on_signals
from shardctl.conversion.engine.part import WorkerPart, is_touched, merge_parts, require_one_source
from shardctl.conversion.engine.uploads import BucketUploads
from shardctl.conversion.engine.worker import WorkerId
from shardctl.conversion.pending_record import PendingRecord, draft_record, encode_record_draft, parse_record_draft
from shardctl.storage.cloud.bucket import CloudBucket
from shardctl.tensors.record import RECORD, CheckpointRecord, parse_record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.base.workers import ProgressWatcher
    from shardctl.conversion.conversion_plan import PlannedConversion
    from shardctl.conversion.share_transfer import Versions


def send_share(
    work: PlannedConversion,
    destination: str,
    worker: WorkerId,
    header: Mapping[str, Any],
    versions: Versions,
    *,
    resume: bool,
    progress: ProgressWatcher,
) -> tuple[WorkerPart, bool, set[WorkerId]]:
    """Write the objects of one worker; returns its part, whether an earlier run had made it, and who is done.

    `header` is the same for all workers.
    """
    require_object_names(work)
    bucket, stop, sha256 = CloudBucket(destination, writing=True), StopRequest(kept=True), bool(header["sha256"])
    frame = draft_record(work, str(header["plan"]))
    held = [file.path for file in work.plan.want.files.values() if file.path in _without_tensors(work)]
    held += [side.name for side in work.carried]
    with scratch_directory() as scratch, stop_on_signals(stop):
        bucket.stop = stop
        groups = ShareGroups.of(work, scratch, worker)
        uploads = BucketUploads.begin(
            bucket,
            header,
            result_files(frame, sha256=sha256),
            resume=resume,
            overwrite=bool(header["overwrite"]),
            worker=worker,
            held=held,
        )
        found = uploads.worker_done(worker, bucket.objects())
        if found is not None and is_touched(found[0], work.checkpoint.source.files()):
            found = None
        if found is not None:
            part = found[0]
        else:
            uploads.forget_done(worker)
            sender = ShareSender(work, versions, scratch, uploads, progress, stop, sha256)
            part = merge_parts(sender.send(groups, work.carried if worker.number == 0 else ()))
            raise_if_stopped(stop)
            uploads.note_worker(worker, part, encode_record_draft(frame) if worker.number == 0 else None)
        workers = [WorkerId(number, worker.count) for number in range(worker.count)]
        return part, found is not None, uploads.workers_noted(workers)


def _without_tensors(work: PlannedConversion) -> set[str]:
    return work.plan.want.files.keys() - {path for copy in work.plan.copies for path in copy.target.files}


def workers_begun(destination: str) -> int:
    """Count the workers of an interrupted run into a bucket; 0 if there is none."""
    plan = noted_plan(CloudBucket(destination, writing=True)) or {}
    return int(plan.get("workers", 0))


def publish_shares(
    destination: str,
) -> tuple[CheckpointRecord, PendingRecord | None, list[WorkerPart], tuple[str, ...]]:
    """Write the record of what workers wrote; returns it with its frame, if it was not there before, and warnings.

    Raises Mismatch if workers are missing, SourceError if none has begun or if they read different things.
    """
    bucket, stop = CloudBucket(destination, writing=True), StopRequest(kept=True)
    plan = noted_plan(bucket)
    published = published_record(bucket, plan)
    if plan is None or "workers" not in plan or published is not None:
        content = published if published is not None else bucket.read(RECORD)
        if content is None:
            raise SourceError(
                f"no worker has begun to write {bucket.name}",
                hint="shardctl reshard SRC DST --worker 0/3 is the first of three",
            )
        if published is not None:
            BucketClaim(bucket, plan or {}).end(bucket.objects())
        return parse_record(content), None, [], ()
    uploads = BucketUploads(bucket, BucketClaim(bucket, plan))
    objects = bucket.objects()
    workers = [WorkerId(number, plan["workers"]) for number in range(plan["workers"])]
    found = {worker: uploads.worker_done(worker, objects) for worker in workers}
    absent = [worker for worker, part in found.items() if part is None]
    if absent:
        raise Mismatch(
            f"{len(absent)} of {len(workers)} workers have not finished their part of {bucket.name}: "
            f"{format_first_few(absent, 8)}",
            hint=f"run them, in any order: the same reshard with --worker {absent[0]}",
        )
    parts = {f"worker {worker}": part[0] for worker, part in found.items() if part is not None}
    require_one_source(parts)
    frame = parse_record_draft(next(frame for _, frame in filter(None, found.values()) if frame is not None))
    with stop_on_signals(stop):
        bucket.stop = stop
        try:
            record = publish_parts(frame, list(parts.values()), uploads, stop, sha256=bool(plan["sha256"]))
        except PlaceTakenError:  # another `finish` was quicker, or is about to be
            published = published_record(bucket, {**plan, **(noted_plan(bucket) or {})})
            if published is None:
                raise
            return parse_record(published), None, [], ()
    return record, frame, list(parts.values()), replacement_warnings(bucket, uploads)
