"""The layout-independent digest of a checkpoint, computed from every element it stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardctl.digest import checkpoint_digest, tensor_digest
from shardctl.execute.interrupt import stopping
from shardctl.manifest import first_byte
from shardctl.verbs.opening import opened
from shardctl.verbs.record_crcs import checked_reader
from shardctl.verify.agreement import require_agreement
from shardctl.verify.content import measure
from shardctl.workers import Effort

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardctl.options import SourceOptions
    from shardctl.storage import FileProofs


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """The digest of one global tensor."""

    digest: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Digested:
    """The digest of a checkpoint."""

    path: str
    digest: str
    tensors: Mapping[str, TensorDigest]
    """By canonical name, sorted."""
    nbytes: int
    """Bytes of tensors, each counted once."""
    warnings: tuple[str, ...]
    proofs: FileProofs
    """Which files have the hashes that their place promises."""
    unverified: tuple[str, ...]
    """Which do not, as warnings."""


def digest(path: str | Path, *, reading: SourceOptions | None = None, effort: Effort | None = None) -> Digested:
    """Read the checkpoint at `path` and digest it; equal for every layout of the same elements.

    Raises CoverageError for elements that are missing, SourceError for copies of an element that differ, and for
    damaged records of archives.
    """
    effort = effort or Effort()
    with opened(path, reading) as checkpoint, stopping(effort.stop):
        checkpoint.source.heed(effort.stop)
        tensors = sorted(checkpoint.manifest.tensors.values(), key=first_byte)
        require_agreement(tensors, checkpoint.source, effort)
        found = measure(tensors, checked_reader(checkpoint), effort)
        checkpoint.prove()
        tensors.sort(key=lambda t: t.name)
        rows = {
            t.name: TensorDigest(tensor_digest(found[t.name].sums, t.dtype, t.shape), t.dtype.name, t.shape)
            for t in tensors
        }
        return Digested(
            path=str(path),
            digest=checkpoint_digest((t.name, t.dtype, t.shape, rows[t.name].digest) for t in tensors),
            tensors=rows,
            nbytes=sum(t.nbytes for t in tensors),
            warnings=checkpoint.manifest.warnings,
            proofs=checkpoint.source.proofs(),
            unverified=tuple(checkpoint.unverified()),
        )
