"""Reads every element of a checkpoint for `verify`: digests, odd values, copies, and the sums that files state."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import format_first_few
from shardctl.checkpoint.other_weights import check_other_weights
from shardctl.checkpoint.record_crcs import build_crc_tracker, check_crcs
from shardctl.storage.crc_tracker import CrcReader
from shardctl.tensors.manifest import Region, first_byte
from shardctl.tensors.record import RECORD
from shardctl.verify import content
from shardctl.verify.checksums import check_integrity, check_sums
from shardctl.verify.download_hashes import HashingReader, list_hash_findings, list_noted_hashes
from shardctl.verify.finding import CheckFinding
from shardctl.verify.level import LevelResult
from shardctl.verify.library_headers import compare_headers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardctl.base.workers import ExecutionOptions
    from shardctl.checkpoint.opening import OpenedCheckpoint
    from shardctl.storage.hashed_file import PromisedHash
    from shardctl.tensors.manifest import Tensor
    from shardctl.verify.content_table import TensorContent
    from shardctl.verify.finding import Severity

_PLACES: Final = 16
"""Places of one tensor in a message: any of its files may be the wrong one."""


def run_content_level(
    checkpoint: OpenedCheckpoint,
    effort: ExecutionOptions,
    *,
    finite: bool,
    strict: bool,
    stated: Mapping[str, PromisedHash],
) -> tuple[LevelResult, dict[str, str]]:
    """Return the level, and the digest of each tensor as it is now; with `finite`, NaN and infinity are errors.

    Files of a download, and those of which a hash is `stated` elsewhere, are hashed while their tensors are read.
    """
    level, began = LevelResult("content", strict=strict), time.monotonic()
    level.library, differing = compare_headers(checkpoint.source, checkpoint.stored)
    level.add(iter(differing))
    tensors = sorted(checkpoint.whole.tensors.values(), key=first_byte)
    tracker = build_crc_tracker(checkpoint)
    noted = list_noted_hashes(checkpoint.source)
    hashing = HashingReader(checkpoint.source, {**stated, **noted})
    hashing.read_headers(checkpoint.stored)
    reader = CrcReader(hashing.read_at, tracker)
    found = content.measure_content(tensors, reader, effort, values=True, phase="content")
    by_name = {tensor.name: number for number, tensor in enumerate(tensors)}
    each_digest = found.compute_digests()
    digests = {name: each_digest[by_name[name]] for name in checkpoint.whole.tensors}
    for tensor in checkpoint.whole.tensors.values():
        level.add(_find_odd_values(tensor, found[by_name[tensor.name]], finite=finite))
        recorded = checkpoint.record.tensors.get(tensor.name) if checkpoint.record else None
        if recorded and recorded.digest != digests[tensor.name]:
            level.add(iter([_build_digest_finding(tensor, recorded.digest, digests[tensor.name])]))
    level.add(check_replicas(checkpoint, effort))
    level.add(check_other_weights(checkpoint, effort))
    level.add(check_crcs(checkpoint, tracker, effort, unread=True))
    level.add(check_sums(checkpoint.source, effort.stop))
    level.add(check_integrity(checkpoint.source, effort.stop))
    level.downloads = hashing.compare(effort.stop)
    level.add(list_hash_findings(level.downloads, noted))
    level.tensors, level.nbytes = len(tensors), sum(t.nbytes for t in tensors)
    level.seconds = time.monotonic() - began
    if not checkpoint.record:
        level.add(iter([CheckFinding("warning", "digest", f"there is no {RECORD} to compare digests with")]))
    return level, digests


def check_replicas(checkpoint: OpenedCheckpoint, effort: ExecutionOptions) -> Iterator[CheckFinding]:
    """Yield each tensor of which two stored copies are not equal."""
    differences = content.compare_replicas(list(checkpoint.whole.tensors.values()), checkpoint.source, effort)
    for d in differences:
        message = f"{d.tensor}: copies differ in {d.count:,} elements, first at {d.first} in {d.file}"
        if d.other not in {"", d.file}:
            message += f" and {d.other}"
        ties = checkpoint.whole.tensors[d.tensor].ties
        if ties:
            message += (
                f"; config.json says that {' and '.join(ties)} is the same tensor: if it is not, set "
                "tie_word_embeddings to false"
            )
        yield CheckFinding("error", "replicas", message, d.tensor, d.file, str(d.first))


def _find_odd_values(tensor: Tensor, found: TensorContent, *, finite: bool) -> Iterator[CheckFinding]:
    size, severity = tensor.size, _rate_nonfinite(finite=finite)
    if found.nans:
        message = f"{tensor.name} holds {found.nans:,} NaN of {size:,} elements"
        yield CheckFinding(severity, "values", message, tensor.name)
    if found.infinities:
        message = f"{tensor.name} holds {found.infinities:,} infinities of {size:,} elements"
        yield CheckFinding(severity, "values", message, tensor.name)
    if found.zero and size > 1 and tensor.name.endswith("weight"):
        yield CheckFinding("warning", "values", f"{tensor.name} is all zeros", tensor.name)


def _rate_nonfinite(*, finite: bool) -> Severity:
    return "error" if finite else "warning"


def _build_digest_finding(tensor: Tensor, recorded: str, found: str) -> CheckFinding:
    places = [f"{c.where.file} {c.box}" for c in tensor.chunks if isinstance(c.where, Region)]
    message = (
        f"{tensor.name} has changed: digest {found}, recorded {recorded}; it is in {format_first_few(places, _PLACES)}"
    )
    return CheckFinding(
        "error", "digest", message, tensor.name, next(iter(tensor.files), ""), str(tensor.chunks[0].box)
    )
