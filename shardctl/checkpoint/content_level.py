"""Reads every element of a checkpoint for `verify`: digests, odd values, copies, and the sums that files state."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import CASTABLE
from shardctl.base.errors import Interrupted, ShardctlError, format_first_few
from shardctl.checkpoint.record_crcs import build_crc_tracker, check_crcs
from shardctl.libraries import registry as formats
from shardctl.libraries.files.side_files import list_unused_weights
from shardctl.storage.crc_tracker import CrcReader
from shardctl.storage.local import LocalSource
from shardctl.tensors.manifest import Region, first_byte
from shardctl.tensors.record import RECORD
from shardctl.verify import content
from shardctl.verify.checksums import check_integrity, check_sums
from shardctl.verify.content import compare_tensors
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

_MAX_LOCATIONS_SHOWN: Final = 16
"""Places of one tensor in a message: any of its files may be the wrong one."""

CHECK: Final = "duplicates"


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
    level.add(_check_other_weights(checkpoint, effort))
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
        f"{tensor.name} has changed: digest {found}, recorded {recorded}; it is in"
        f" {format_first_few(places, _MAX_LOCATIONS_SHOWN)}"
    )
    return CheckFinding(
        "error", "digest", message, tensor.name, next(iter(tensor.files), ""), str(tensor.chunks[0].box)
    )


def _check_other_weights(checkpoint: OpenedCheckpoint, effort: ExecutionOptions) -> Iterator[CheckFinding]:
    """Yield each file beside the checkpoint's own that has other values of tensors with the same stored names.

    Types that a cast makes equal are compared after it. What cannot be read, or is far away, is a warning.
    """
    folder = checkpoint.source.folder
    for path in list_unused_weights(checkpoint.stored):
        if folder is None:
            message = f"{path} was not compared with the tensors of this checkpoint, because it is on another machine"
            yield CheckFinding("warning", CHECK, message, file=path)
            continue
        try:
            with closing(LocalSource(folder / path)) as source:
                held = formats.scan_checkpoint(source).tensors
                mine = checkpoint.stored.tensors
                pairs = [(mine[name], other) for name, other in held.items() if name in mine]
                differing = _list_differing(pairs, checkpoint, source, effort)
        except Interrupted:
            raise
        except ShardctlError as error:
            message = f"{path} was not compared with the tensors of this checkpoint: {error.message}"
            yield CheckFinding("warning", CHECK, message, file=path)
            continue
        if differing:
            message = (
                f"{path} has other values than this checkpoint in {len(differing):,} of {len(pairs):,} tensors of the "
                f"same names ({format_first_few(differing)}); which values count depends on the loader"
            )
            yield CheckFinding("error", CHECK, message, differing[0], path)


def _list_differing(
    pairs: list[tuple[Tensor, Tensor]], checkpoint: OpenedCheckpoint, source: LocalSource, effort: ExecutionOptions
) -> list[str]:
    """List the tensors of the checkpoint that differ from their namesakes, in the order of the pairs."""
    found = {mine.name for mine, other in pairs if not _can_compare(mine, other)}
    alike = [(mine, other) for mine, other in pairs if mine.name not in found]
    wider = [(other, mine) for mine, other in alike if mine.dtype.bits > other.dtype.bits]
    rest = [(mine, other) for mine, other in alike if mine.dtype.bits <= other.dtype.bits]
    found |= {each.tensor for each in compare_tensors(rest, checkpoint.source, source, effort, "other files")}
    found |= {each.tensor for each in compare_tensors(wider, source, checkpoint.source, effort, "other files")}
    return [mine.name for mine, _ in pairs if mine.name in found]


def _can_compare(mine: Tensor, other: Tensor) -> bool:
    alike = mine.dtype == other.dtype or {mine.dtype.name, other.dtype.name} <= CASTABLE
    return alike and mine.shape == other.shape
