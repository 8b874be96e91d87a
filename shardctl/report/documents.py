"""Renders every result as a JSON document: byte counts end in `_bytes`; `status` agrees with `exit_code`."""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any

from shardctl.report.failure import describe_failure
from shardctl.tensors.mesh import EXPERT_AXES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardctl.conversion.delta_writing import WrittenDelta
    from shardctl.conversion.engine_sums import EngineSums
    from shardctl.conversion.worker_part import ContributeResult
    from shardctl.models.derived import RuleDerivation
    from shardctl.models.names.extra_names import ExtraTensor
    from shardctl.report.meter import TransferMeter
    from shardctl.storage import FileProofs
    from shardctl.tensors.mesh import Mesh
    from shardctl.tensors.record import CheckpointRecord
    from shardctl.verbs.attest import AttestResult
    from shardctl.verbs.diff import DiffResult, TensorChange
    from shardctl.verbs.digest import DigestResult
    from shardctl.verbs.finish import FinishResult
    from shardctl.verbs.inspect import CheckpointStatistics, InspectResult
    from shardctl.verbs.reshard import ReshardResult
    from shardctl.verify.consumer import ConsumerVerdict
    from shardctl.verify.content import LayerChange
    from shardctl.verify.forward_result import ForwardResult
    from shardctl.verify.level import LevelResult, VerifyResult
    from shardctl.verify.value_statistics import ValueStatistics

Document = dict[str, Any]


def format_schema_name(verb: str) -> str:
    """Format the name and version of a verb's document."""
    return f"shardctl.{verb}/1"


def build_inspect_document(found: InspectResult, *, tensors: bool = False, rules: bool = False) -> Document:
    """Build what `inspect` says."""
    document = build_document_head("inspect") | {
        "path": found.path,
        "verdict": found.verdict,
        "format": found.format,
        "layout": found.layout,
        "family": found.family,
        "architecture": found.architecture,
        "why_no_model": found.why_no_model,
        "mesh": build_mesh_fields(found.mesh),
        "stages": list(found.stages),
        "parameters": found.parameters,
        "tensor_bytes": found.nbytes,
        "file_bytes": found.file_bytes,
        "files": list(found.files),
        "dtypes": [
            {
                "dtype": share.dtype,
                "tensors": share.tensors,
                "parameters": share.parameters,
                "tensor_bytes": share.nbytes,
            }
            for share in found.dtypes
        ],
        "ties": {line.name: list(line.ties) for line in found.tensors if line.ties},
        "carried": list(found.carried),
        "dropped": list(found.dropped),
        "extra_tensors": build_extra_document(found.extra),
        "digest": found.digest,
        "warnings": list(found.warnings),
    }
    if found.subtrees:
        document["subtrees"] = [
            {"prefix": each.prefix, "tensors": each.tensors, "tensor_bytes": each.nbytes} for each in found.subtrees
        ]
    if found.address:
        document["address"] = found.address
    if found.drafter:
        document["drafter"] = found.drafter
    if found.adapter is not None:
        document["adapter"] = asdict(found.adapter)
    if found.parts:
        document["parts"] = [asdict(part) for part in found.parts]
    if found.training is not None:
        document["training"] = {
            "writer": found.training.writer,
            "ranks": found.training.ranks,
            "step": found.training.step,
            "groups": found.training.groups,
            "states": {
                share.state: {"tensors": share.tensors, "tensor_bytes": share.nbytes} for share in found.training.states
            },
            "notes": list(found.training.notes),
        }
    if tensors:
        document["tensors"] = [
            {
                "name": line.name,
                "dtype": line.dtype,
                "shape": list(line.shape),
                "tensor_bytes": line.nbytes,
                "ties": list(line.ties),
                "stored": list(line.stored),
                "chunks": line.chunks,
                "files": list(line.files),
            }
            for line in found.tensors
        ]
    if found.statistics is not None:
        document["statistics"] = _build_statistics_document(found.statistics)
    if rules:
        document["rules"] = [asdict(rule) for rule in found.rules]
        document["derivation"] = _build_derivation_document(found.derivation) if found.derivation is not None else None
    return document


def _build_statistics_document(found: CheckpointStatistics) -> Document:
    """Build what the values of a checkpoint are; null is a norm that no float64 holds."""
    return {
        "total": _build_value_fields(found.total),
        "layers": [
            {"name": each.name, "tensors": each.tensors} | _build_value_fields(each.values) for each in found.layers
        ],
        "tensors": [
            {"name": each.name, "dtype": each.dtype, "values": _build_value_fields(each.values) or None}
            for each in found.tensors
        ],
        "notes": list(found.notes),
    }


def _build_value_fields(values: ValueStatistics | None) -> Document:
    return {} if values is None else {name: _as_finite(value) for name, value in asdict(values).items()}


def build_progress_document(meter: TransferMeter) -> Document:
    """Build how far `reshard` is; every record but the last."""
    return {
        "schema": format_schema_name("reshard"),
        "status": "running",
        "phase": meter.phase,
        "done_bytes": meter.done_bytes,
        "total_bytes": meter.total_bytes,
        "kept_bytes": meter.kept_bytes,
        "files_done": meter.files_done,
        "files": meter.files,
        "rate_bytes": round(meter.rate),
        "seconds_left": round(meter.seconds_left, 1) if meter.seconds_left is not None else None,
    }


def build_reshard_document(done: ReshardResult, seconds: float) -> Document:
    """Build what `reshard` did."""
    from shardctl.tensors.record import FUSED_ORDER_UNKNOWN, RULES_PROOF

    record = done.record
    return build_document_head("reshard") | {
        "dry_run": False,
        "verdict": done.verdict,
        "destination": str(done.destination),
        **_build_record_fields(record),
        "read_bytes": done.read_bytes,
        "written_bytes": done.written_bytes,
        "shared_bytes": done.shared_bytes,
        "kept_bytes": done.kept_bytes,
        "done_before": done.done_before,
        "dropped": list(done.dropped),
        "extra_tensors": build_extra_document(done.extra),
        "projected_memory_bytes": done.projected_memory_bytes,
        "seconds": round(seconds, 3),
        "digest": record.digest,
        "source_digest": record.source_digest,
        "source_hashes": _build_hashes_document(done.proofs),
        "rules": record.options.get("rules", ""),
        "rules_proof": record.options.get(RULES_PROOF, ""),
        "fused_order_unknown": [each for each in record.options.get(FUSED_ORDER_UNKNOWN, "").split(", ") if each],
        "names": record.options.get("names", ""),
        "proof": _build_forward_document(done.proof.forward) if done.proof and done.proof.forward else None,
        "consumer": build_consumer_document(done.consumer),
        "notes": list(done.notes),
        "warnings": list(done.warnings),
    }


def _build_record_fields(record: CheckpointRecord) -> Document:
    """Build what the record of a complete conversion says of it."""
    return {
        "layout": record.layout,
        "architecture": record.architecture,
        "mesh": build_mesh_fields(record.mesh),
        "stages": list(record.stages),
        "tensors": len(record.tensors),
        "files": len(record.files) + 1,
        "file_bytes": sum(record.files.values()),
    }


def build_extra_document(extra: Iterable[ExtraTensor]) -> list[Document]:
    """Build the list of the tensors that a model's class does not have."""
    return [
        {
            "name": each.name,
            "dtype": each.dtype,
            "shape": list(each.shape),
            "tensor_bytes": each.nbytes,
            "kept": each.kept,
        }
        for each in extra
    ]


def build_consumer_document(verdict: ConsumerVerdict | None) -> Document | None:
    """Build what was found about a consumer; None where none was named."""
    if verdict is None:
        return None
    return {
        "consumer": verdict.profile.consumer,
        "version": verdict.profile.version,
        "loads": verdict.loads,
        "verdict": verdict.describe(),
        "reasons": list(verdict.reasons),
        "unknown": list(verdict.unknown),
        "notes": list(verdict.notes),
        "command": verdict.command,
    }


def _build_derivation_document(derivation: RuleDerivation) -> Document:
    """Say where derived rules are from, and what they leave whole because it is not known."""
    from shardctl.models.derived import format_rule_file

    return {
        "from": list(derivation.origins),
        "whole": [{"pattern": each.pattern, "reason": each.reason} for each in derivation.uncut],
        "rule_file": format_rule_file(derivation),
    }


def _build_hashes_document(proofs: FileProofs) -> Document:
    """Build which files were compared with the hashes that their place promises, and why others were not."""
    return {"verified": sorted(proofs.verified), "unverified": dict(sorted(proofs.unverified.items()))}


def build_contribution_document(done: ContributeResult, seconds: float) -> Document:
    """Build what one worker did."""
    part = done.part
    return build_document_head("reshard") | {
        "dry_run": False,
        "verdict": done.verdict,
        "destination": str(done.destination),
        "worker": done.worker.number,
        "workers": done.worker.count,
        "workers_missing": [worker.number for worker in done.missing],
        "finished": done.finished,
        "files": len(part.files),
        "file_bytes": sum(part.files.values()),
        "read_bytes": part.read_bytes,
        "written_bytes": 0 if done.done_before else part.written_bytes,
        "shared_bytes": 0 if done.done_before else part.shared_bytes,
        "kept_bytes": part.written_bytes + part.kept_bytes if done.done_before else part.kept_bytes,
        "projected_memory_bytes": part.projected_memory_bytes,
        "seconds": round(seconds, 3),
        "source_hashes": _build_hashes_document(done.proofs),
        "warnings": list(done.warnings),
    }


def build_finish_document(done: FinishResult, seconds: float, *, verb: str = "finish") -> Document:
    """Build what was made of the parts of all workers."""
    record = done.record
    return build_document_head(verb) | {
        "verdict": done.verdict,
        "destination": str(done.destination),
        "finished_before": not done.workers,
        "workers": done.workers,
        **_build_record_fields(record),
        "read_bytes": sum(part.read_bytes for part in done.parts),
        "written_bytes": sum(part.written_bytes + part.kept_bytes for part in done.parts),
        "seconds": round(seconds, 3),
        "digest": record.digest,
        "source_digest": record.source_digest,
        "notes": list(done.notes),
        "warnings": list(done.warnings),
    }


def build_verify_document(result: VerifyResult) -> Document:
    """Build what `verify` found."""
    head = build_document_head("verify", answer=result.ok)
    if result.trouble is not None:
        head |= describe_failure(result.trouble).document(head["schema"])
    return head | {
        "path": result.path,
        "against": result.against,
        "ok": result.ok,
        "verdict": result.verdict,
        "digest": result.digest,
        "unchecked": list(result.unchecked),
        "consumer": build_consumer_document(result.consumer),
        "levels": [_build_level_document(level) for level in result.levels],
    }


def _build_level_document(level: LevelResult) -> Document:
    document: Document = {
        "name": level.name,
        "status": level.status,
        "reason": level.reason,
        "tensors": level.tensors,
        "tensor_bytes": level.nbytes,
        "seconds": round(level.seconds, 3),
        "findings": [asdict(finding) for finding in level.findings],
        "notes": list(level.notes),
    }
    if level.library is not None:
        document["safetensors"] = asdict(level.library)
    if level.downloads is not None:
        document["downloads"] = asdict(level.downloads)
    if level.attestation is not None:
        document["attestation"] = asdict(level.attestation)
    if level.name == "identity":
        document["equal_files"] = list(level.equal_files)
        document["unrounded"] = [asdict(each) for each in level.unrounded]
    if level.name == "load":
        document["ranks"] = [
            {
                "rank": loaded.rank,
                "label": loaded.label,
                "device": loaded.device,
                "loaded_bytes": loaded.nbytes,
                "seconds": round(loaded.seconds, 6),
                "peak_bytes": loaded.peak_bytes,
                "planned_bytes": loaded.planned_bytes,
            }
            for loaded in level.ranks
        ]
    if level.placement:
        document["placement"] = [
            {"block": each.block, "place": each.place, "tensor_bytes": each.nbytes} for each in level.placement
        ]
    if level.forward is not None and level.forward.status != "skipped":
        document["forward"] = _build_forward_document(level.forward)
    if level.engine is not None:
        document["engine"] = asdict(level.engine) | {"apart": _as_finite(level.engine.apart)}
    return document


def _build_forward_document(result: ForwardResult) -> Document:
    """Build what a forward pass found; a distance that is infinite, because nothing could be compared, is null."""
    worst, bounds, generated, opinion = result.worst, result.tolerance, result.generated, result.opinion
    return {
        "engine": result.engine,
        "share": {"own": result.share.own, "joined": [asdict(joined) for joined in result.share.joined]}
        if result.share is not None
        else None,
        "dtype": result.dtype,
        "device": result.device,
        "architecture": result.architecture,
        "versions": dict(result.versions),
        "worst": {"name": worst.name, "error": _as_finite(worst.error)} if worst is not None else None,
        "blocks": [
            asdict(block) | {"error": _as_finite(block.error), "largest": _as_finite(block.largest)}
            for block in result.blocks
        ],
        "output": result.output,
        "output_error": _as_finite(result.output_error),
        "unrounded_error": _as_finite(result.unrounded_error) if result.unrounded_error is not None else None,
        "flips": result.flips,
        "positions": result.positions,
        "tolerance": {name: _as_finite(bound) for name, bound in asdict(bounds).items()}
        if bounds is not None
        else None,
        "opinion": {"status": opinion.status, "reason": opinion.reason, "error": _as_finite(opinion.error)}
        if opinion
        else None,
        "generated": asdict(generated) | {"same": generated.same} if generated is not None else None,
        "read_bytes": result.read_bytes,
        "change": result.change,
        "distances": asdict(result.distances) if result.distances is not None else None,
        "unrounded_distances": asdict(result.unrounded_distances) if result.unrounded_distances is not None else None,
        "perplexity": asdict(result.perplexity)
        | {"source": _as_finite(result.perplexity.source), "shards": _as_finite(result.perplexity.shards)}
        if result.perplexity is not None
        else None,
        "decoding": asdict(result.decoding)
        | {"error": _as_finite(result.decoding.error), "cache_error": _as_finite(result.decoding.cache_error)}
        if result.decoding is not None
        else None,
        "golden": asdict(result.golden) | {"error": _as_finite(result.golden.error)} if result.golden else None,
    }


def _as_finite(number: float) -> float | None:
    return number if isfinite(number) else None


def build_diff_document(result: DiffResult) -> Document:
    """Build how two checkpoints differ."""
    return build_document_head("diff", answer=result.equal_all or result.delta is not None) | {
        "a": result.a,
        "b": result.b,
        "equal": result.equal_all,
        "verdict": result.verdict,
        "equal_tensors": result.equal,
        "compared_bytes": result.nbytes,
        "changes": [_build_change_document(change) for change in result.changes],
        "config_changes": [asdict(change) for change in result.config_changes],
        "file_changes": [asdict(change) for change in result.file_changes],
        "layers": [_build_layer_change(each) for each in result.layers],
        "delta": _build_delta_document(result.delta) if result.delta is not None else None,
        "warnings": list(result.warnings),
    }


def _build_layer_change(layer: LayerChange) -> Document:
    return asdict(layer) | {name: _as_finite(getattr(layer, name)) for name in ("relative", "change", "norm")}


def _build_delta_document(delta: WrittenDelta) -> Document:
    found = asdict(delta)
    del found["warnings"]  # which are among those of the comparison
    return found


def _build_change_document(change: TensorChange) -> Document:
    distance = change.distance
    measured = {name: _as_finite(value) for name, value in asdict(distance).items()} if distance is not None else None
    return asdict(change) | {"distance": measured}


def build_digest_document(result: DigestResult, *, tensors: bool = False, expected: str | None = None) -> Document:
    """Build the digest of a checkpoint, and whether it is the one that is expected."""
    document = build_document_head("digest", answer=expected in {None, result.digest}) | {
        "path": result.path,
        "digest": result.digest,
        "expected": expected,
        "tensor_bytes": result.nbytes,
        "source_hashes": _build_hashes_document(result.proofs),
        "warnings": list(result.warnings),
    }
    if tensors:
        document["tensors"] = {
            name: {"digest": row.digest, "dtype": row.dtype, "shape": row.shape} for name, row in result.tensors.items()
        }
    return document


def build_attest_document(result: AttestResult) -> Document:
    """Build what was signed, and with which key."""
    return build_document_head("attest") | {
        "path": result.path,
        "statement": result.statement,
        "signature": result.signature,
        "files": result.files,
        "signed_bytes": result.nbytes,
        "key_hash": result.key_hash,
        "digest": result.digest,
        "source_digest": result.source_digest,
        "unchecked": list(result.unchecked),
        "warnings": list(result.warnings),
    }


def build_engine_sums_document(path: str, found: EngineSums) -> Document:
    """Build the sums of an engine's arrays, as its weight checker gives them, and which may be in another order."""
    return build_document_head("digest") | {
        "path": path,
        "checksums": dict(found.sums),
        "unknown": sorted(found.reordered),
        "tensor_bytes": found.nbytes,
        "warnings": list(found.warnings),
    }


def build_document_head(verb: str, *, answer: bool = True) -> Document:
    """Build what every document begins with."""
    return {"schema": format_schema_name(verb), "status": "ok" if answer else "no", "exit_code": 0 if answer else 3}


def build_mesh_fields(mesh: Mesh | None) -> Document | None:
    """Build the degrees of a mesh and its number of ranks."""
    if mesh is None:
        return None
    degrees = dict(mesh.axes) | {axis: mesh.degree(axis) for axis in EXPERT_AXES}
    return {"axes": degrees, "ranks": mesh.world}
