"""Computes the digest of a checkpoint from every element it stores."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from shardctl.base.result_view import ResultView
from shardctl.base.value import value_class
from shardctl.base.workers import ExecutionOptions
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.checkpoint.record_crcs import checked_reader
from shardctl.conversion.engine.budget import divide_reading_memory, require_reading
from shardctl.conversion.engine.interrupt import stop_on_signals
from shardctl.tensors.digest import compute_checkpoint_digest
from shardctl.tensors.manifest import first_byte
from shardctl.verify.agreement import require_agreement
from shardctl.verify.content import measure_content

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardctl.options import SourceOptions
    from shardctl.storage import FileProofs


@value_class
class TensorDigest:
    """The digest of one global tensor."""

    digest: str
    dtype: str
    shape: tuple[int, ...]


@value_class
class DigestResult(ResultView):
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
    expected: str | None = None
    """The digest that the caller expects, if any."""
    show_tensors: bool = False
    """Whether the text and the JSON list the digest of every tensor."""

    @property
    def ok(self) -> bool:
        """Whether it is the expected digest, or none was expected."""
        return self.expected in {None, self.digest}


def digest(
    path: str | Path,
    *,
    source_options: SourceOptions | None = None,
    effort: ExecutionOptions | None = None,
    host_memory: int = 1 << 30,
) -> DigestResult:
    """Read the checkpoint at `path` and digest it; equal for every layout of the same elements.

    `host_memory` bounds the bytes of anonymous memory: blocks and threads become fewer.

    Raises CoverageError for elements that are missing, SourceError for copies of an element that differ, and for
    damaged records of archives, MemoryBudgetError if the tensors' list alone needs more than `host_memory`.
    """
    effort = effort or ExecutionOptions()
    count = partial(require_reading, limit=host_memory)
    with open_checkpoint(path, source_options, count=count) as checkpoint, stop_on_signals(effort.stop):
        checkpoint.source.set_stop_request(effort.stop)
        tensors = sorted(checkpoint.manifest.tensors.values(), key=first_byte)
        chunks, held = sum([len(tensor.chunks) for tensor in tensors]), checkpoint.source.held_bytes
        budget = divide_reading_memory(len(tensors), chunks, host_memory, effort.threads, held)
        effort = replace(effort, threads=budget.threads, block=min(effort.block, budget.block))
        require_agreement(tensors, checkpoint.source, effort, checkpoint.find_spec)
        found = measure_content(tensors, checked_reader(checkpoint), effort, values=False)
        checkpoint.prove()
        digests = dict(zip([t.name for t in tensors], found.compute_digests(), strict=True))
        tensors.sort(key=attrgetter("name"))
        rows = {t.name: TensorDigest(digests[t.name], t.dtype.name, t.shape) for t in tensors}
        return DigestResult(
            path=str(path),
            digest=compute_checkpoint_digest((t.name, t.dtype, t.shape, rows[t.name].digest) for t in tensors),
            tensors=rows,
            nbytes=sum(t.nbytes for t in tensors),
            warnings=checkpoint.manifest.warnings,
            proofs=checkpoint.source.proofs(),
            unverified=tuple(checkpoint.list_unverified_files()),
        )
