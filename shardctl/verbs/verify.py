"""Proves a checkpoint: that its structure holds, that its content is what was recorded, that it equals its source."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing, contextmanager
from dataclasses import field, replace
from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import FLOATS
from shardctl.base.errors import MissingTensorsError, UsageError
from shardctl.base.value import state_class
from shardctl.base.workers import ExecutionOptions
from shardctl.checkpoint import name_check
from shardctl.checkpoint.adapters.merging import merge_adapters
from shardctl.checkpoint.completing import COMPLETED
from shardctl.checkpoint.config_lint import lint_config, lint_tie, lint_tokenizer
from shardctl.checkpoint.consumer_check import check_stored
from shardctl.checkpoint.content_level import check_replicas, run_content_level
from shardctl.checkpoint.identity_level import list_warnings, run_identity_level
from shardctl.checkpoint.left_tensors import format_modules
from shardctl.checkpoint.name_selection import NameSelection
from shardctl.checkpoint.opening import OpenedCheckpoint, open_checkpoint
from shardctl.checkpoint.padded_vocabulary import pad_as
from shardctl.checkpoint.quantization.dequantizing import dequantize_as
from shardctl.checkpoint.quantization.quantizing import quantize_as
from shardctl.checkpoint.settings_comparison import list_contradictions
from shardctl.checkpoint.splitting import split_as
from shardctl.checkpoint.state_comparison import pair_states
from shardctl.conversion.conversion_plan import choose_stages
from shardctl.conversion.engine.interrupt import stop_on_signals
from shardctl.conversion.optimizer_states import build_specs
from shardctl.libraries.consumers.profile import find_profile
from shardctl.libraries.reader import find_given_file
from shardctl.options import SourceOptions, VerifyOptions
from shardctl.options.sum_options import requests_sum
from shardctl.options.verify_options import is_running
from shardctl.running.device import parse_device_number
from shardctl.running.device_levels import read_sample_text, run_forward_level, run_load_level
from shardctl.running.engine_level import require_engine, run_engine_level
from shardctl.storage.addresses import open_source
from shardctl.storage.local import LocalSource
from shardctl.tensors.digest import compute_checkpoint_digest
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.pieces import PlacedCheckpoint
from shardctl.tensors.record import APPLIED, AVERAGED, GIVEN, RECORD, STATEMENT, SUBTREE, UNTIED
from shardctl.verify import alignment, rank_parts, structure
from shardctl.verify.attestation import TrustedSigner, check_signature, load_verifiers
from shardctl.verify.download_hashes import find_equal_files, list_stated_hashes
from shardctl.verify.finding import CheckFinding
from shardctl.verify.golden import CHECK, GoldenOutput, read_golden, require_new_file, write_golden
from shardctl.verify.level import ATTESTATION, LEVELS, LevelResult, LoadedRank, VerifyResult
from shardctl.verify.policy import POLICY, check_policy, read_policy
from shardctl.verify.rank_files import list_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from shardctl.running.dispatch import CheckpointDispatch
    from shardctl.storage import Source
    from shardctl.tensors.record import CheckpointRecord
    from shardctl.verify.consumer import ConsumerVerdict
    from shardctl.verify.policy import VerificationPolicy

_NO_HINDRANCE: Final = frozenset(
    {name_check.CHECK, alignment.CHECK, rank_parts.CHECK, structure.OPTIMIZER, structure.INDEX}
)
"""Checks of the structure that say nothing against reading the elements."""
__all__ = ["LEVELS", "LevelResult", "LoadedRank", "VerifyOptions", "VerifyResult", "verify"]


class _BrokenStructureError(Exception):
    """The files are not those of the record, or lack tensors of the class: no further level has a meaning."""


def verify(
    path: str | Path,
    verify_options: VerifyOptions | None = None,
    *,
    source_options: SourceOptions | None = None,
    effort: ExecutionOptions | None = None,
) -> VerifyResult:
    """Check the checkpoint at `path`; every finding is in the result, and only an unreadable source raises.

    Without a source to compare with (`verify_options.against`), the level `identity` is left out. What this machine
    lacks for a level is in the result as its `trouble`. Raises UsageError for an unknown level or device.
    """
    verify_options = verify_options or VerifyOptions()
    verify_options.require_used()
    parse_device_number(verify_options.device or "auto")
    against, require = verify_options.against, verify_options.require
    names = [n for n in LEVELS[verify_options.highest_level()] if n != "identity" or against is not None]
    if against is not None and "identity" not in names:
        names.append("identity")
    if verify_options.engine is not None:
        require_engine(verify_options)
        names.append("engine")
    if against is None and verify_options.merge:
        raise UsageError("--merge needs the source that the adapter was merged into", hint="add --against SRC")
    if verify_options.text is not None:
        read_sample_text(verify_options.text)  # it is used last, and must not fail after hours of the other levels
    if verify_options.write_golden is not None:
        require_new_file(verify_options.write_golden)
    if against is None and requests_sum(verify_options):
        raise UsageError("sums are compared with a source, and none is given", hint="add --against SRC")
    run = _VerifyRun(
        path,
        names,
        verify_options,
        replace(source_options or SourceOptions(), kv_heads="replicate"),
        effort or ExecutionOptions(),
        golden=_read_golden(verify_options),
        policy=read_policy(verify_options.policy) if verify_options.policy is not None else None,
    )
    levels, digest = run.run_after_signature()
    required = LEVELS["forward" if verify_options.writes_or_reads_golden else require or verify_options.highest_level()]
    result = VerifyResult(
        str(path), str(against or ""), digest, tuple(levels), required, tuple(run.unchecked), run.consumer
    )
    if verify_options.write_golden is None:
        return result
    if not result.ok:
        return replace(result, unchecked=(*result.unchecked, "no golden output was written, because not all is well"))
    write_golden(verify_options.write_golden, _build_golden(result))
    return result


def require_trust(verify_options: VerifyOptions) -> None:
    """Raise an error for a policy, or for somebody to trust, with which no checkpoint can be verified."""
    verify_options.require_used()
    policy = read_policy(verify_options.policy) if verify_options.policy is not None else None
    signers = _list_signers(verify_options, policy)
    if signers:
        load_verifiers(signers)


def _list_signers(verify_options: VerifyOptions, policy: VerificationPolicy | None) -> tuple[TrustedSigner, ...]:
    """List who is trusted; nobody where no signature is needed. Raises UsageError for trust that is ambiguous."""
    named = [getattr(verify_options, name) for name in ("public_key", "identity", "issuer")]
    signers = policy.signers if policy is not None else ()
    if not verify_options.attestation or not any(named):
        if verify_options.attestation and not signers:
            hint = "add signers to it, or --public-key FILE"
            raise UsageError(f"{verify_options.policy} names no signers", hint=hint)
        return signers
    if signers:
        hint = "leave --public-key, --identity and --issuer out"
        raise UsageError(f"{verify_options.policy} says whose signature is needed", hint=hint)
    key, identity, issuer = named
    return (TrustedSigner(key, identity or "", issuer or ""),)


def find_signed_directory(path: str | Path) -> Path:
    """Find the directory that has a signature, or gets one; raises UsageError for any other source."""
    with closing(open_source(path)) as source:
        if not isinstance(source, LocalSource) or not source.path.is_dir():
            hint = "download it first, and give the directory"
            raise UsageError(f"{source.name} is not a local directory, and signatures are of those", hint=hint)
        return source.path


def _judge_stated_digest(signature: LevelResult, digest: str) -> None:
    """Add the finding that the elements are not those of which the signed statement speaks."""
    stated = signature.attestation.digest if signature.attestation is not None else ""
    if digest and stated and digest != stated:
        message = f"the digest is {digest}, and {STATEMENT} says {stated}"
        signature.add(iter([CheckFinding("error", ATTESTATION, message, file=STATEMENT)]))


def _read_golden(verify_options: VerifyOptions) -> GoldenOutput | None:
    """Read the golden output, if there is one; raises SourceError for a malformed file."""
    if verify_options.golden is None:
        return None
    golden = read_golden(verify_options.golden)
    if verify_options.dtype not in {VerifyOptions().dtype, golden.dtype}:
        hint = "leave --dtype out: the file says in which type the model computes"
        raise UsageError(
            f"--dtype is {verify_options.dtype}, and {verify_options.golden} has {golden.dtype}", hint=hint
        )
    return golden


def _build_golden(result: VerifyResult) -> GoldenOutput:
    """Build the golden output of a model that ran."""
    found = next(level.forward for level in result.levels if level.forward is not None)
    assert found.sketch is not None  # noqa: S101 - the level has passed
    return GoldenOutput(
        found.architecture, found.dtype, found.inputs, found.sketch, found.portable_bound, result.digest, found.versions
    )


@state_class
class _VerifyRun:
    """One verification on its way."""

    path: str | Path
    names: list[str]
    """The levels to run, in order."""
    verify_options: VerifyOptions
    source_options: SourceOptions
    effort: ExecutionOptions
    unchecked: list[str] = field(default_factory=list)
    """What the levels that were asked for leave open."""
    consumer: ConsumerVerdict | None = None
    """Whether the consumer that `--for` names should load it."""
    golden: GoldenOutput | None = None
    """What the model is to compute."""
    policy: VerificationPolicy | None = None
    """What the files may hold, and who may have signed them."""
    unquantized: OpenedCheckpoint | None = None
    """What is compared with, as it was before it was quantized as the checkpoint is."""

    @property
    def strict(self) -> bool:
        return self.source_options.strict

    def run_after_signature(self) -> tuple[list[LevelResult], str]:
        """Check the signature first, if that is requested: what nobody vouches for is not read any further."""
        signers = _list_signers(self.verify_options, self.policy)
        if not signers:
            return self.of()
        signature = check_signature(find_signed_directory(self.path), signers, self.effort.threads)
        if signature.status != "passed":
            reason = "the signature was not found to hold"
            return [signature, LevelResult(self.names[0], "skipped", reason), *self._skip_rest(reason)], ""
        levels, digest = self.of()
        _judge_stated_digest(signature, digest)
        return [signature, *levels], digest

    def run_policy(self, checkpoint: OpenedCheckpoint) -> list[LevelResult]:
        """Compare the files with the policy, if there is one."""
        if self.policy is None:
            return []
        if find_given_file(checkpoint.source) is not None:
            raise UsageError("--policy is for a directory, whose files it judges", hint="give the directory")
        began, level = time.monotonic(), LevelResult(POLICY, strict=self.strict)
        level.add(check_policy(self.policy, checkpoint.source, checkpoint.stored))
        level.tensors, level.seconds = len(checkpoint.stored.tensors), time.monotonic() - began
        return [level]

    def of(self) -> tuple[list[LevelResult], str]:
        """Return the levels and the digest, which is empty if it was not computed."""
        first, began = LevelResult("structure", strict=self.strict), time.monotonic()
        options = replace(self.source_options, strict=False)  # what is odd fails its level, and the others are run

        def recorded(source: Source, record: CheckpointRecord) -> None:
            first.add(structure.check_files(record, source.files()))
            if not first.errors:
                first.add(structure.check_hashes(record, source))
            if first.errors:
                raise _BrokenStructureError("files are not as recorded")

        try:
            with ExitStack() as stack:
                mine = replace(options, apply=()) if self.verify_options.against is not None else options
                checkpoint = stack.enter_context(_open_whole(self.path, mine, recorded, first))
                checkpoint = _set_given_mesh(checkpoint, self.verify_options)
                found = list(_check_structure(checkpoint))
                first.add(iter(found))
                first.notes += name_check.note_names(checkpoint)
                first.tensors = len(checkpoint.manifest.tensors)
                first.seconds = time.monotonic() - began
                judged = self.run_policy(checkpoint)
                if any(each.severity == "error" and each.check not in _NO_HINDRANCE for each in found):
                    return [first, *judged, *self._skip_rest("the structure is wrong", judged=True)], ""
                if self.verify_options.consumer is not None:
                    profile, mesh = find_profile(self.verify_options.consumer), self.verify_options.mesh or Mesh.of()
                    self.consumer = check_stored(profile, checkpoint, mesh, str(self.path))
                other = None
                if self.verify_options.against is not None:
                    other = stack.enter_context(self._open_compared(options, checkpoint))
                    self.require_base(checkpoint, other)
                    other = pad_as(checkpoint, other)
                    other = dequantize_as(checkpoint, other, self.effort.threads)
                    other = merge_adapters(other, self.verify_options.merge, self.effort.threads, partial=True)
                    self.unquantized = split_as(checkpoint, other)
                    other = quantize_as(checkpoint, self.unquantized, self.effort.threads)
                self.unchecked += _list_unchecked(checkpoint, self.names, signed=self.verify_options.attestation)
                self.unchecked += _list_left_out(checkpoint, other)
                if other is not None:
                    self.unchecked += filter(None, [pair_states(checkpoint, other).uncompared])
                if other is not None and _resolve_location(other.source) == _resolve_location(checkpoint.source):
                    self.unchecked.append(
                        "--against names the checkpoint itself, so its values were compared with no other"
                    )
                rest, digest = self._run_remaining_levels(checkpoint, other)
                return [first, *judged, *rest], digest
        except _BrokenStructureError as error:
            first.seconds = time.monotonic() - began
            return [first, *self._skip_rest(str(error))], ""

    @contextmanager
    def _open_compared(self, options: SourceOptions, checkpoint: OpenedCheckpoint) -> Iterator[OpenedCheckpoint]:
        """Open what the checkpoint is compared with, or the sum that it is of that and others."""
        against = self.verify_options.against or ""
        combination = None
        if requests_sum(self.verify_options):
            from shardctl.checkpoint.averaging import combine_checkpoints, parse_combination

            combination = parse_combination(against, self.verify_options)
        with _open_source(combination.first if combination else against, options, checkpoint) as other:
            if combination is None:
                yield other
                return
            made = checkpoint.record.options if checkpoint.record is not None else {}
            cast = FLOATS.get(made.get("dtype", ""))
            threads, keep = self.effort.threads, made.get("keep_fp32")
            yield combine_checkpoints(other, combination, replace(options, unpadded=True), threads, cast, keep)

    def require_base(self, checkpoint: OpenedCheckpoint, other: OpenedCheckpoint) -> None:
        """Raise UsageError if the checkpoint was completed, summed or patched, and what it is compared with was not."""
        made = checkpoint.record.options if checkpoint.record is not None else {}
        compared = other.record.options if other.record is not None else {}
        checks = (
            (
                COMPLETED,
                other.completed,
                "was completed from",
                "to compare it with its source, add --complete-from and that checkpoint",
            ),
            (
                AVERAGED,
                other.averaged,
                "is the sum",
                "to compare it with that, add --average-with, --ema or --add-difference as reshard had them",
            ),
            (
                APPLIED,
                other.applied,
                "was made with the deltas",
                "to compare it with its source, add --apply and each of them, in order",
            ),
        )
        for key, given, how, hint in checks:
            said = made.get(key)
            if said is not None and not given and said != compared.get(key):
                raise UsageError(f"{checkpoint.source.name} {how} {said}", hint=hint)

    def _run_remaining_levels(
        self, checkpoint: OpenedCheckpoint, other: OpenedCheckpoint | None
    ) -> tuple[list[LevelResult], str]:
        if "load" not in self.names:
            return self._run_levels(checkpoint, other, None)
        from shardctl.running.dispatch import open_dispatch

        with open_dispatch(checkpoint, self.verify_options, forward="forward" in self.names) as dispatch:
            return self._run_levels(checkpoint, other, dispatch)

    def _run_levels(
        self, checkpoint: OpenedCheckpoint, other: OpenedCheckpoint | None, dispatch: CheckpointDispatch | None
    ) -> tuple[list[LevelResult], str]:
        levels, digests, known, equal = [], dict[str, str](), dict[str, str](), frozenset[str]()
        stated = list_stated_hashes(other.source if other is not None else None, checkpoint.source)
        with stop_on_signals(self.effort.stop):
            for each in filter(None, (checkpoint, other)):
                each.source.set_stop_request(self.effort.stop)
            if "content" in self.names:
                finite = self.verify_options.require_finite
                level, digests = run_content_level(
                    checkpoint, self.effort, finite=finite, strict=self.strict, stated=stated
                )
                known = level.downloads.digests if level.downloads is not None else {}
                level.add(CheckFinding("warning", "config", text) for text in lint_tie(checkpoint, digests))
                levels.append(level)
            if other is not None:
                full = "content" in self.names
                both = checkpoint.stored.files.keys() & other.stored.files.keys()
                equal = find_equal_files(checkpoint.source, both, stated, known, self.effort.stop)
                against = str(self.verify_options.against)
                level = run_identity_level(
                    checkpoint,
                    other,
                    against,
                    self.effort,
                    strict=self.strict,
                    full=full,
                    merged=bool(self.verify_options.merge),
                    equal=equal,
                    unquantized=self.unquantized,
                )
                if not full:
                    level.add(check_replicas(checkpoint, self.effort))
                levels.append(level)
            if "load" in self.names:
                levels.append(
                    run_load_level(
                        checkpoint,
                        other,
                        digests,
                        self.verify_options,
                        self.effort,
                        strict=self.strict,
                        dispatch=dispatch,
                    )
                )
            for each in filter(None, (checkpoint, other) if levels else ()):
                each.prove()
                levels[-1].add(CheckFinding("warning", "hash", text) for text in each.list_unverified_files(equal))
        if "forward" in self.names:  # a signal ends it at once: there is nothing to keep
            level = run_forward_level(
                checkpoint,
                other,
                self.verify_options,
                self.effort.watcher,
                strict=self.strict,
                dispatch=dispatch,
                golden=self.golden,
                unquantized=self.unquantized,
                threads=self.effort.threads,
            )
            levels.append(level)
        if "engine" in self.names:
            levels.append(self._ask_engine(checkpoint, other))
        weights = checkpoint.manifest.tensors.values()
        if "content" not in self.names:
            return levels, ""
        digest = compute_checkpoint_digest((t.name, t.dtype, t.shape, digests[t.name]) for t in weights)
        self._judge_digest(levels[-1], digest)
        return levels, digest

    def _judge_digest(self, level: LevelResult, digest: str) -> None:
        if self.golden is not None and digest != self.golden.digest:
            message = f"the digest is {digest}, and that of the golden output {self.golden.digest}"
            level.add(iter([CheckFinding("error", CHECK, message)]))

    def _ask_engine(self, checkpoint: OpenedCheckpoint, other: OpenedCheckpoint | None) -> LevelResult:
        engine = self.verify_options.engine
        if is_running(engine):
            from shardctl.running.running_engine_level import run_running_engine_level

            limit = self.verify_options.engine_timeout
            return run_running_engine_level(self.path, engine, limit, self.source_options, self.effort)
        return run_engine_level(checkpoint, other, self.verify_options, strict=self.strict)

    def _skip_rest(self, reason: str, *, judged: bool = False) -> list[LevelResult]:
        """Return the levels after the first one when that makes them meaningless; a policy unless it has judged."""
        names = [*([POLICY] if self.policy is not None and not judged else []), *self.names[1:]]
        return [LevelResult(name, "skipped", reason) for name in names]


@contextmanager
def _open_whole(
    path: str | Path,
    options: SourceOptions,
    before: Callable[[Source, CheckpointRecord], None],
    level: LevelResult,
) -> Iterator[OpenedCheckpoint]:
    """Open the checkpoint that is verified; tensors of its class that are missing are a finding of `level`."""
    with ExitStack() as stack:
        try:
            checkpoint = stack.enter_context(open_checkpoint(path, options, before=before))
        except MissingTensorsError as error:
            level.add(iter([CheckFinding("error", name_check.CHECK, error.message)]))
            raise _BrokenStructureError("the structure is wrong") from error
        yield checkpoint


def _open_source(
    path: str | Path, options: SourceOptions, checkpoint: OpenedCheckpoint
) -> AbstractContextManager[OpenedCheckpoint]:
    """Open what a checkpoint is compared with, as its record says that the source was read."""
    made = checkpoint.record.options if checkpoint.record is not None else {}
    options = replace(options, subtree=options.subtree or made.get(SUBTREE), unpadded=True, untied=UNTIED in made)
    return open_checkpoint(path, options, selection=NameSelection.of_record(made))


def _list_unchecked(checkpoint: OpenedCheckpoint, names: Collection[str], *, signed: bool) -> Iterator[str]:
    """List in words what levels leave open that find nothing wrong."""
    if names == ["structure"]:
        of = "of tensors " if signed else ""
        yield f"{of}only headers were read; --level full reads every byte"
    if checkpoint.record is None and "identity" not in names:
        yield f"there is no {RECORD}, so values were compared with nothing; --against SRC compares them with a source"


def _resolve_location(source: Source) -> Path | str:
    """Find where a source is, whatever links lead there."""
    return source.path.resolve() if isinstance(source, LocalSource) else source.location


def _list_left_out(checkpoint: OpenedCheckpoint, other: OpenedCheckpoint | None) -> Iterator[str]:
    """List in words which tensors could not be checked, because the record says that tensors were left out."""
    record = checkpoint.record
    if record is None or not record.filtered:
        return
    flags = [f"--{key} {record.options[key]}" for key in ("only", "include", "exclude") if key in record.options]
    by = f" by {' and '.join(flags)}" if flags else ""
    model = checkpoint.model
    if model is None or any(not each.spare and each.name not in checkpoint.manifest.tensors for each in model.own()):
        yield f"whether the model is whole: {RECORD} says that tensors were left out{by}"
    kept = checkpoint.manifest.tensors
    left = [tensor for name, tensor in other.manifest.tensors.items() if name not in kept] if other is not None else []
    if other is not None and left:
        yield f"tensors of {other.source.name} that were left out here: {format_modules(left, kept)}"


def _check_structure(checkpoint: OpenedCheckpoint) -> Iterator[CheckFinding]:
    yield from list_warnings(checkpoint)
    if not checkpoint.whole.tensors:
        yield CheckFinding("error", "tensors", "there is no tensor in it")
    for warning in (*lint_config(checkpoint), *lint_tokenizer(checkpoint), *list_contradictions(checkpoint)):
        yield CheckFinding("warning", "config", warning)
    if isinstance(checkpoint.source, LocalSource):
        yield from structure.check_modes(checkpoint.source.root, checkpoint.source.files())
    yield from structure.check_coverage(checkpoint.whole, checkpoint.find_spec)
    if find_given_file(checkpoint.source) is None:
        yield from structure.check_index(checkpoint.source.files(), checkpoint.stored.files)
    yield from structure.check_gathered(checkpoint.manifest)
    yield from name_check.check_names(checkpoint)
    training = checkpoint.manifest.training
    yield from structure.check_states(training.states if training is not None else ())
    if checkpoint.record:
        yield from structure.check_record(checkpoint.record, checkpoint.whole)
    elif checkpoint.model is None and checkpoint.model_error is not None:
        yield CheckFinding("warning", "model", f"names and shapes were not checked: {checkpoint.model_error.message}")
    found: list[CheckFinding] = []
    if checkpoint.model is not None:
        found += alignment.check_alignment(checkpoint.manifest, checkpoint.model, checkpoint.mesh)
    yield from found
    yield from _check_ranks(checkpoint, {finding.tensor for finding in found})


def _set_given_mesh(checkpoint: OpenedCheckpoint, verify_options: VerifyOptions) -> OpenedCheckpoint:
    """Return a checkpoint whose mesh is the given one; raises UsageError where that means nothing, or is another."""
    mesh = verify_options.mesh
    if mesh is None:
        if verify_options.stages is not None:
            raise UsageError("--stages needs --mesh", hint="leave it out, or name the mesh")
        return checkpoint
    if verify_options.consumer is not None and not list_ranks(checkpoint.stored):
        return checkpoint  # the mesh is the one that the consumer runs on
    if not list_ranks(checkpoint.stored):
        raise UsageError(
            f"--mesh applies to rank files, and {checkpoint.source.name} has none", hint="leave --mesh out"
        )
    if checkpoint.record is not None and checkpoint.record.mesh != mesh:
        raise UsageError(f"--mesh says {mesh}, and {RECORD} says {checkpoint.record.mesh}", hint="leave --mesh out")
    model = checkpoint.require_placement(mesh)
    stages = choose_stages(model, checkpoint.manifest, mesh, verify_options.stages)
    return replace(checkpoint, given_mesh=mesh, given_stages=stages)


def _check_ranks(checkpoint: OpenedCheckpoint, known: Collection[str]) -> Iterator[CheckFinding]:
    """Check what each rank holds against the mesh, or say why that cannot be done."""
    ranks, mesh = list_ranks(checkpoint.stored), checkpoint.mesh
    if not ranks:
        return
    given = checkpoint.record is not None and checkpoint.record.options.get("rules") == GIVEN
    unnamed = given and not checkpoint.ruled
    model = checkpoint.find_placement(mesh) if mesh is not None and not unnamed else None
    if mesh is not None and model is not None and checkpoint.manifest.tensors.keys() <= model.tensors.keys():
        whole = checkpoint.whole
        specs = build_specs(model, whole)
        layers = 1 + max((n for spec in specs.values() for kind, n in spec.where if kind == "layer"), default=-1)
        if layers > sum(checkpoint.stages):
            message = (
                f"shardctl did not check which rank should hold what: tensors name {layers} layers, "
                f"and the stages have {sum(checkpoint.stages)}"
            )
            yield CheckFinding("warning", rank_parts.CHECK, message)
            return
        if model.layers != sum(checkpoint.stages):
            message = f"the model has {model.layers} layers, and the stages have {sum(checkpoint.stages)}"
            yield CheckFinding("error", rank_parts.CHECK, message)
            return
        placed = PlacedCheckpoint(tuple(whole.tensors.values()), specs, mesh, checkpoint.stages)
        yield from rank_parts.check_rank_parts(whole, placed, known)
    elif mesh is None and len(ranks) > 1:
        message = f"shardctl did not check which rank should hold what: neither {RECORD} nor --mesh names the mesh"
        yield CheckFinding("warning", rank_parts.CHECK, message)
    elif mesh is not None:
        why = "--rules does not name the rules that cut them" if unnamed else "nothing says how tensors are cut"
        message = f"shardctl did not check which rank should hold what: {why}"
        yield CheckFinding("warning", rank_parts.CHECK, message)
