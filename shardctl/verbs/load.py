"""Loads a checkpoint, or one rank's part of it, as tensors: now (`load`), or when they are asked for (`lens`)."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardctl.copyplan import cover
from shardctl.errors import UsageError
from shardctl.execute.interrupt import stopping
from shardctl.options import SourceOptions
from shardctl.verbs.opening import Checkpoint, opened
from shardctl.verify import rank_files
from shardctl.workers import Effort

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardctl.bands import Reader
    from shardctl.verify.load import Wanted


def load(
    path: str | Path,
    *,
    rank: int | None = None,
    device: str = "cpu",
    reading: SourceOptions | None = None,
    effort: Effort | None = None,
) -> dict[str, Any]:
    """The state dict of one rank, as `torch.Tensor`s on `device`, under the names that its files have.

    What the rank has of a tensor is one array, put together from its boxes; what its replicas wrote is read from there.
    With `rank` None, every tensor is whole, whatever the layout. `device` is `cpu`, `cuda`, `cuda:1` or `auto`; of
    several CUDA devices rank r gets device r modulo their number. Nothing is mapped: the tensors are the caller's own.

    Raises UsageError for a rank that does not exist, UnsupportedError without torch or the device.
    """
    from shardctl.verify.load import devices
    from shardctl.verify.load import load as load_tensors

    effort = effort or Effort()
    places = devices(device)
    with opened(path, replace(reading or SourceOptions(), kv_heads="replicate")) as checkpoint, stopping(effort.stop):
        checkpoint.source.heed(effort.stop)
        wanted = whole(checkpoint) if rank is None else part(checkpoint, rank)
        tensors = load_tensors(wanted, checkpoint.source, places[(rank or 0) % len(places)], effort).tensors
        checkpoint.prove()
        return tensors


def lens(path: str | Path, *, reading: SourceOptions | None = None) -> Mapping[str, Any]:
    """A lazy state dict over a checkpoint in any layout, under the names of transformers' class where that is known.

    Nothing is read before an entry is indexed, so `from_pretrained(None, config=..., state_dict=shardctl.lens(path))`
    reads just what it needs. The files stay open until the last entry is gone.
    """
    from shardctl.verify.forward import lens as lazily

    stack = ExitStack()
    checkpoint = stack.enter_context(opened(path, reading))
    reader = _Kept(checkpoint.source)
    weakref.finalize(reader, stack.close)
    return lazily(checkpoint.manifest, reader, checkpoint.model)


class _Kept:
    """A reader that closes its source when nobody holds it any more."""

    def __init__(self, source: Reader) -> None:
        self._source = source

    def read_at(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into`."""
        self._source.read_at(path, offset, into)


def whole(checkpoint: Checkpoint) -> dict[str, Wanted]:
    """Every tensor by its stored name."""
    from shardctl.verify.load import Wanted

    return {
        name: Wanted.whole(tensor.shape, cover(tensor) or tensor.chunks)
        for name, tensor in checkpoint.stored.tensors.items()
    }


def part(checkpoint: Checkpoint, rank: int) -> dict[str, Wanted]:
    """What one rank computes with, by stored name."""
    from shardctl.verify.load import Wanted

    mesh = checkpoint.record.mesh if checkpoint.record else None
    ranks = rank_files.ranks_of(checkpoint.stored)
    if not ranks:
        raise UsageError(f"{checkpoint.source.name} has no files of ranks", hint="leave the rank out: it loads whole")
    world = mesh.world if mesh is not None else ranks[-1] + 1
    if not 0 <= rank < world:
        raise UsageError(f"there is no rank {rank}; ranks are 0 to {world - 1}")
    chunks: dict[str, list[Any]] = {}
    for name, chunk in rank_files.held_by(rank, checkpoint.stored, mesh, experts(checkpoint)):
        chunks.setdefault(name, []).append(chunk)
    return {name: Wanted.part(name, some) for name, some in chunks.items()}


def experts(checkpoint: Checkpoint) -> frozenset[str]:
    """The stored names of what ep divides, where the model is known."""
    if checkpoint.model is None:
        return frozenset()
    return rank_files.arrays_of_experts(checkpoint.manifest, checkpoint.model)
