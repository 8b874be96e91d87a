"""Prepares the record: everything in `shardctl.json` that is known before any bytes are moved."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import SourceError
from shardctl.base.value import value_class
from shardctl.base.version import __version__
from shardctl.conversion.optimizer_states import get_states
from shardctl.libraries.files.extra_tensors import is_extra_name
from shardctl.libraries.files.sharded_backend import INTEGRITY, MARK, encode_integrity
from shardctl.libraries.torch_save.zip_records import describe_record_damage
from shardctl.storage.crc_tracker import find_damages
from shardctl.tensors.digest import DigestSums, compute_checkpoint_digest, compute_tensor_digest
from shardctl.tensors.manifest import Region
from shardctl.tensors.record import (
    OVERFLOWED,
    RECORD,
    SUMS,
    CheckpointRecord,
    HashedSpans,
    RecordedTensor,
    StoredBox,
    encode_record,
    format_sums_line,
    parse_record,
)
from shardctl.tensors.turns import fold_shape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardctl.base.dtype import DType
    from shardctl.conversion.conversion_plan import PlannedConversion
    from shardctl.conversion.engine.part import WorkerPart


@value_class
class PendingRecord:
    """A record without digests, and what it takes to complete it when the parts are there, without the source."""

    record: CheckpointRecord
    dtypes: Mapping[str, DType]
    """The types that the source has, of the tensors that are cast."""
    apart: frozenset[str]
    """The tensors that are an optimizer's or extra ones, and not in the model's digest."""
    expected: Mapping[str, str]
    """The digests that the source's own record has."""
    source: str
    """What the source is called."""
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


def draft_record(work: PlannedConversion, identity: str) -> PendingRecord:
    """Return what is known of the result of a conversion."""
    tensors, dtypes = {}, {}
    for copy in sorted(work.plan.copies, key=lambda c: c.source.name):
        have, want = copy.source, copy.target
        # The copy may have parts that take turns unfolded, which readers of the files do not see.
        packed = work.plan.want.tensors[have.name]
        stored = sorted(
            (c.where.file, c.box.origin, c.name, c.box)
            for c in packed.chunks
            if isinstance(c.where, Region) and not c.aside
        )
        tensors[have.name] = RecordedTensor(
            dtype=want.dtype,
            shape=fold_shape(want),
            digest="",
            source_digest="",
            ties=have.ties,
            spelling=have.spelling,
            stored=tuple(StoredBox(file, name, box) for file, _, name, box in stored),
        )
        if have.dtype != want.dtype:
            dtypes[have.name] = have.dtype
    sizes = {path: file.size for path, file in work.plan.want.files.items()}
    sizes |= {side.name: side.nbytes for side in work.carried}
    record = CheckpointRecord(
        version=__version__,
        plan=identity,
        layout=work.layout,
        digest="",
        source_digest="",
        source={
            "format": work.have.format,
            "files": {path: file.size for path, file in sorted(work.have.files.items())},
        }
        | _find_address(work),
        mesh=work.mesh if work.placed is not None or work.plan.want.dialect is not None else None,
        stages=work.stages,
        architecture=_find_architecture(work),
        options=work.options,
        files=dict(sorted(sizes.items())),
        tensors=tensors,
    )
    training = work.checkpoint.stored.training
    return PendingRecord(
        record=record,
        dtypes=dtypes,
        apart=frozenset(name for name in tensors if name in get_states(work.have) or is_extra_name(name)),
        expected=_list_expected_digests(work),
        source=work.checkpoint.source.name,
        warnings=tuple(work.have.warnings),
        notes=training.notes if training is not None else (),
    )


def _find_architecture(work: PlannedConversion) -> str:
    """Return the class of the model, where it is known which tensors that has or how to cut them."""
    model = work.checkpoint.model or (work.placed and work.checkpoint.find_placement(work.mesh))
    return model.architecture if model else ""


def _find_address(work: PlannedConversion) -> dict[str, str]:
    """Find where the source is, if that says the same to everybody: paths are the business of one machine."""
    location = work.checkpoint.source.location
    return {"address": location} if "://" in location else {}


def _list_expected_digests(work: PlannedConversion) -> dict[str, str]:
    """List the digests of tensors as shardctl once wrote them, if it wrote the source."""
    recorded = work.checkpoint.record.tensors if work.checkpoint.record else {}
    changed = {tensor.name for tensor in work.checkpoint.adapted}
    return {
        name: recorded[name].digest
        for name, tensor in work.have.tensors.items()
        if name in recorded
        and name not in changed
        and (recorded[name].dtype, recorded[name].shape) == (tensor.dtype, tensor.shape)
    }


def complete_record(frame: PendingRecord, parts: Sequence[WorkerPart]) -> CheckpointRecord:
    """Return the record of a result whose parts are all there.

    Raises SourceError for a source that shardctl wrote and whose elements are no longer the ones it wrote, and for one
    that is damaged where parts read a record together.
    """
    for damage in find_damages(share for part in parts for share in part.crcs):
        raise SourceError(
            f"{damage.file}: {describe_record_damage(damage.stated.name, damage.found, damage.stated.crc)}",
            hint="the file is damaged; fetch or copy it again",
        )
    tensors, source_rows = {}, []
    for name, tensor in frame.record.tensors.items():
        have = frame.dtypes.get(name, tensor.dtype)
        read = _add_up([part.source_sums[name] for part in parts if name in part.source_sums], have)
        written = _add_up([part.output_sums[name] for part in parts if name in part.output_sums], tensor.dtype)
        source_digest = compute_tensor_digest(read, have, tensor.shape)
        if frame.expected.get(name, source_digest) != source_digest:
            raise SourceError(
                f"{name} has changed since {frame.source} was written: digest {source_digest}, but {RECORD} has "
                f"{frame.expected[name]}",
                hint=f"shardctl verify SRC --level full finds where; remove {RECORD} if it was changed on purpose",
            )
        same = have is tensor.dtype and written == read
        digest = source_digest if same else compute_tensor_digest(written, tensor.dtype, tensor.shape)
        tensors[name] = replace(tensor, digest=digest, source_digest=source_digest)
        if name not in frame.apart:
            source_rows.append((name, have, tensor.shape, source_digest))
    weights = ((n, t.dtype, t.shape, t.digest) for n, t in tensors.items() if n not in frame.apart)
    hashes = {path: found for part in parts for path, found in part.hashes.items()}
    overflowed = any(part.overflowed for part in parts)  # each part was made by a run that allowed it
    return replace(
        frame.record,
        options={**frame.record.options, **({OVERFLOWED: "true"} if overflowed else {})},
        digest=compute_checkpoint_digest(weights),
        source_digest=compute_checkpoint_digest(source_rows),
        tensors=tensors,
        hashes={path: hashes[path] for path in frame.record.files},
    )


def _add_up(sums: Sequence[DigestSums], dtype: DType) -> DigestSums:
    return sum(sums[1:], sums[0]) if sums else DigestSums.zero(dtype)


def add_sums_files(record: CheckpointRecord, sums: Mapping[str, bytes]) -> CheckpointRecord:
    """Return the record of a result that has the files of `build_sums_files` as well."""
    spans = {path: HashedSpans(((0, len(data)),), sha256(data).hexdigest()) for path, data in sums.items()}
    hashes = {**record.hashes, **spans}
    files = dict(sorted({**record.files, **{path: len(data) for path, data in sums.items()}}.items()))
    return replace(record, files=files, hashes={path: hashes[path] for path in files})


def list_sums_files(record: CheckpointRecord) -> list[str]:
    """List the files that say the SHA-256s of others: Megatron-LM's own, if it reads the result, and `SHA256SUMS`."""
    marks = [path for path in record.files if path.endswith(f"/{MARK}")] if record.layout == "torch_dist" else []
    return [*(path.removesuffix(MARK) + INTEGRITY for path in marks), SUMS]


def build_sums_files(record: CheckpointRecord, parts: Sequence[WorkerPart]) -> dict[str, bytes]:
    """Build their contents: `integrity.json` has the files beside it, `SHA256SUMS` every data and side file."""
    found = {path: digest for part in parts for path, digest in part.sha256.items()}
    made = {}
    for path in list_sums_files(record)[:-1]:
        folder = path.removesuffix(INTEGRITY)
        made[path] = encode_integrity({p.removeprefix(folder): found[p] for p in found if p.startswith(folder)})
        found[path] = sha256(made[path]).hexdigest()
    lines = (format_sums_line(found[path], path) for path in sorted(found, key=PurePosixPath))
    return {**made, SUMS: b"".join(lines)}


def list_overflow_warnings(frame: PendingRecord, parts: Sequence[WorkerPart]) -> Iterator[str]:
    """List what a cast could not hold, tensor by tensor."""
    counts: dict[str, int] = {}
    for part in parts:
        for name, count in part.overflowed.items():
            counts[name] = counts.get(name, 0) + count
    for name, count in sorted(counts.items()):
        yield f"{name}: {count} finite values became infinite in {frame.record.tensors[name].dtype}"


def encode_record_draft(frame: PendingRecord) -> dict[str, Any]:
    """Encode the frame, for the worker that keeps it."""
    return {
        "record": encode_record(frame.record).decode(),
        "dtypes": {name: dtype.name for name, dtype in frame.dtypes.items()},
        "states": sorted(frame.apart),
        "expected": dict(frame.expected),
        "source": frame.source,
        "warnings": list(frame.warnings),
        "notes": list(frame.notes),
    }


def parse_record_draft(raw: Mapping[str, Any]) -> PendingRecord:
    """Parse the frame that `encode_record_draft` wrote."""
    return PendingRecord(
        record=parse_record(raw["record"].encode()),
        dtypes={name: BY_NAME[dtype] for name, dtype in raw["dtypes"].items()},
        apart=frozenset(raw["states"]),
        expected=raw["expected"],
        source=raw["source"],
        warnings=tuple(raw["warnings"]),
        notes=tuple(raw["notes"]),
    )
