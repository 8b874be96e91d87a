"""Converts a checkpoint to another layout, in bounded memory, resumable, with digests on the way."""

from __future__ import annotations

import time
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardctl.base.amounts import format_duration, format_plural
from shardctl.base.errors import OccupiedDestinationError, UsageError
from shardctl.base.result_view import ResultView
from shardctl.base.value import state_class, value_class
from shardctl.base.workers import NullWatcher, ProgressWatcher, StopRequest
from shardctl.conversion.assembling import assemble_result, hash_result_name
from shardctl.conversion.conversion_plan import list_changes
from shardctl.conversion.engine.interrupt import stop_on_signals
from shardctl.conversion.engine.journal import BandJournal
from shardctl.conversion.engine.staging import StagingArea
from shardctl.conversion.finished_result import find_finished_result
from shardctl.conversion.pending_record import draft_record, list_overflow_warnings
from shardctl.conversion.preparing import open_conversion
from shardctl.conversion.share_transfer import (
    list_change_times,
    list_source_versions,
    move_share,
    repeat_while_touched,
)
from shardctl.options import DestinationOptions, SourceOptions
from shardctl.storage import FileProofs
from shardctl.storage.bounded_text import RECORD_TEXT, read_file
from shardctl.storage.cloud import is_bucket
from shardctl.storage.hub import is_hub_address
from shardctl.tensors.record import DERIVED, PROVED_BY_RESULT, RECORD, RULES_PROOF, CheckpointRecord, parse_record
from shardctl.tensors.shares import share_whole_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardctl.conversion.conversion_plan import PlannedConversion
    from shardctl.conversion.engine.part import WorkerPart
    from shardctl.conversion.plan_file import PlanFile
    from shardctl.models.names.extra_names import ExtraTensor
    from shardctl.options import ReshardOptions
    from shardctl.tensors.copyplan import CopyPlan
    from shardctl.verify.consumer import ConsumerVerdict
    from shardctl.verify.level import LevelResult


@value_class
class ReshardResult(ResultView):
    """What `reshard` did."""

    destination: Path | str
    """A directory, or the address of a place in a bucket."""
    record: CheckpointRecord
    warnings: tuple[str, ...]
    read_bytes: int
    written_bytes: int
    """Output bytes that this run wrote."""
    shared_bytes: int
    """Those of them that share blocks with the source's files."""
    kept_bytes: int
    """Output bytes that an interrupted run had written, found intact."""
    projected_memory_bytes: int
    proofs: FileProofs = field(default_factory=FileProofs)
    """Which files of the source have the hashes that their place promises."""
    proof: LevelResult | None = None
    """What running it beside its source showed, if that was asked for."""
    done_before: bool = False
    """Whether an earlier run had finished all of it, so that nothing was written."""
    notes: tuple[str, ...] = ()
    """How a trainer's files were understood, such as which copy of the weights was read; what was proved of others."""
    dropped: tuple[str, ...] = ()
    """Other files of the source, and objects in its files, that were left behind."""
    consumer: ConsumerVerdict | None = None
    """Whether the consumer that `--for` names should load the result, and the command that starts it."""
    extra: tuple[ExtraTensor, ...] = ()
    """The tensors that the model's class does not have."""
    copy_plan: CopyPlan | None = field(default=None, repr=False)
    """What was copied, tensor by tensor."""
    source: str = ""
    """The source as the caller named it."""
    target: str = ""
    """The destination as the caller named it; `destination` is where links lead."""
    seconds: float = 0.0
    """How long the call took."""
    changes: tuple[str, ...] = ()
    """What the conversion was asked to change besides the layout, such as ``cast to bf16``."""

    @property
    def verdict(self) -> str:
        """The answer in one line: what the destination now holds of which source, in which layout."""
        record, target = self.record, self.target or str(self.destination)
        held = format_plural(len(record.tensors), "tensor")
        unchanged = not self.changes and record.digest == record.source_digest
        same = f"the same {held} as" if unchanged else f"{held} made from"
        how = ", ".join([record.describe_layout(), *self.changes])
        spent = "nothing was written" if self.done_before else format_duration(self.seconds)
        begin = "done before" if self.done_before else "done"
        return f"{begin}: {target} holds {same} {self.source}, {how} ({record.describe_size()}, {spent})"


def reshard(
    path: str | Path,
    destination: str | Path,
    reshard_options: ReshardOptions | None = None,
    *,
    source_options: SourceOptions | None = None,
    destination_options: DestinationOptions | None = None,
    progress: ProgressWatcher | None = None,
    plan: PlanFile | None = None,
) -> ReshardResult:
    """Convert the checkpoint at `path` into a new directory `destination`, a bucket or a branch of the Hub.

    With a `plan`, what it says is done, or nothing; `reshard_options`, if given, may then differ from the plan's in
    memory and threads only.
    With `destination_options.prove`, the result runs beside its source before it is given its name: `Mismatch` is
    raised if the two compute something else, UnsupportedError if they cannot be run here; what was written is kept for
    a run without `prove`.
    On return every byte is right and on stable storage. On any error the source and what stood at the destination are
    untouched, and the same call finishes the job. If the destination already holds exactly this result, nothing is
    written; only the source is read, to know that it is as it was.
    """
    watcher, options = progress or NullWatcher(), destination_options or DestinationOptions()

    def convert() -> ReshardResult:
        with open_conversion(
            path, destination, reshard_options, source_options, plan, allow_overflow=options.allow_overflow
        ) as work:
            read = source_options or SourceOptions()
            proof = _ResultProof(work, read, watcher) if options.prove else None
            return _convert(_record_rule_proof(work, read, proof), destination, proof, options, watcher)

    began = time.monotonic()
    done = repeat_while_touched(convert, watcher)
    return replace(done, source=str(path), target=str(destination), seconds=time.monotonic() - began)


def _record_rule_proof(
    work: PlannedConversion, source_options: SourceOptions, proof: _ResultProof | None
) -> PlannedConversion:
    """Prove derived rules with a small model, unless the result itself is proved; raises Mismatch if they are wrong."""
    if work.options.get("rules") != DERIVED:
        return work
    if proof is not None:  # without which the result is not published
        return replace(work, options={**work.options, RULES_PROOF: PROVED_BY_RESULT})
    from shardctl.verbs.rule_proof import prove_rules  # most models have a table

    shown = prove_rules(work, source_options)
    return replace(work, options={**work.options, RULES_PROOF: shown.describe()}) if shown is not None else work


def _convert(
    work: PlannedConversion,
    destination: str | Path,
    proof: _ResultProof | None,
    options: DestinationOptions,
    progress: ProgressWatcher,
) -> ReshardResult:
    try:
        if is_bucket(destination):
            return _convert_into_bucket(work, destination, options, progress)
        if is_hub_address(destination):
            return _convert_into_hub(work, destination, options, progress)
        if options.create or options.private:
            raise UsageError("--create and --private are for a destination on the Hub", hint="leave them out")
        with StagingArea(Path(destination), overwrite=options.overwrite) as staging:
            return _run_conversion(work, staging, proof, options, progress)
    except OccupiedDestinationError:
        stop = StopRequest()
        with stop_on_signals(stop):
            record = find_finished_result(work, destination, options, progress, stop)
        if record is None:
            raise
        if proof is not None:
            proof.run(Path(destination))
        return _build_result(work, destination, record, None, (), proof)


def _convert_into_bucket(
    work: PlannedConversion, destination: str, options: DestinationOptions, progress: ProgressWatcher
) -> ReshardResult:
    from shardctl.conversion.bucket_output import convert_into_bucket

    if options.prove:
        raise UsageError("--prove needs a local directory, and a bucket has none", hint="verify --forward DST")
    record, parts, warnings = convert_into_bucket(work, destination, options, progress)
    return _build_result(work, destination, record, parts, warnings)


def _convert_into_hub(
    work: PlannedConversion, destination: str, options: DestinationOptions, progress: ProgressWatcher
) -> ReshardResult:
    from shardctl.conversion.hub_output import convert_into_hub

    if options.prove:
        raise UsageError("--prove needs a local directory, and the Hub has none", hint="verify --forward DST")
    record, parts, warnings = convert_into_hub(work, destination, options, progress)
    return _build_result(work, destination, record, parts, warnings)


def _run_conversion(
    work: PlannedConversion,
    staging: StagingArea,
    proof: _ResultProof | None,
    options: DestinationOptions,
    progress: ProgressWatcher,
) -> ReshardResult:
    identity, sha256 = work.identity(), options.sha256
    versions = list_source_versions(work)
    header: dict[str, object] = {"plan": identity, "source": versions, "sha256": sha256}
    block = None if options.no_resume else BandJournal.block(staging.journal, header)
    changed = list_change_times(work.checkpoint.source, versions)
    if block is not None and staging.published and not BandJournal.list_touched(staging.journal, changed):
        record = parse_record(read_file(staging.destination / RECORD, RECORD_TEXT))
        if proof is not None:
            proof.run(staging.destination)
        return _build_result(work, staging.destination, record, None, staging.forget(), proof)
    if block is not None:
        work = replace(work, budget=work.budget.with_block(block))
    staging.begin(hash_result_name(identity, versions, sha256), keep=block is not None)
    staging.require_space(work.required_space)
    stop = StopRequest(kept=True)
    progress.warn(work.have.warnings)
    with stop_on_signals(stop):
        part = move_share(
            work,
            share_whole_plan(work.plan),
            work.carried,
            staging.data,
            (staging.journal, {**header, "block": work.budget.block}),
            versions=versions,
            discard=staging.discard,
            sha256=sha256,
            progress=progress,
            stop=stop,
        )
        frame = draft_record(work, identity)
        prove = proof.run if proof is not None else None
        record, warnings = assemble_result(frame, [part], staging, stop, sha256=sha256, prove=prove)
    warnings = (*list_overflow_warnings(frame, [part]), *warnings)
    return _build_result(work, staging.destination, record, [part], warnings, proof)


@state_class
class _ResultProof:
    """Runs a result beside its source, and keeps what that showed."""

    work: PlannedConversion
    source_options: SourceOptions
    progress: ProgressWatcher
    level: LevelResult | None = None

    def run(self, directory: Path) -> None:
        """Run what is in a directory; raises as `prove_result`."""
        from shardctl.running.proof import prove_result

        self.level = prove_result(self.work, directory, self.source_options, self.progress)


def _build_result(
    work: PlannedConversion,
    destination: Path | str,
    record: CheckpointRecord,
    parts: Sequence[WorkerPart] | None,
    warnings: tuple[str, ...],
    proof: _ResultProof | None = None,
) -> ReshardResult:
    """Build what was done; without parts, an earlier run had done all of it."""
    training = work.checkpoint.stored.training
    tensor_bytes = sum(copy.write_bytes for copy in work.plan.copies)
    return ReshardResult(
        destination=destination,
        record=record,
        warnings=(*work.have.warnings, *warnings),
        read_bytes=work.plan.read_bytes if parts is None else sum(part.read_bytes for part in parts),
        written_bytes=sum(part.written_bytes for part in parts or ()),
        shared_bytes=sum(part.shared_bytes for part in parts or ()),
        kept_bytes=sum(part.kept_bytes for part in parts) if parts is not None else tensor_bytes,
        projected_memory_bytes=work.budget.projected,
        proofs=work.checkpoint.source.proofs(),
        proof=proof.level if proof is not None else None,
        done_before=parts is None,
        notes=(*(training.notes if training is not None else ()), *work.checkpoint.source.notes()),
        dropped=work.checkpoint.manifest.dropped,
        extra=work.checkpoint.list_extra_tensors(work.have.extra),
        consumer=work.consumer,
        copy_plan=work.plan,
        changes=list_changes(work.checkpoint, work.reshard_options),
    )
