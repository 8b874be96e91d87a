"""Loads a checkpoint, or one rank's part of it, as tensors: now (`load`), or when they are asked for (`lens`)."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardctl.base.errors import UsageError
from shardctl.base.workers import ExecutionOptions
from shardctl.checkpoint.opening import OpenedCheckpoint, open_checkpoint
from shardctl.conversion.engine.interrupt import stop_on_signals
from shardctl.options import SourceOptions
from shardctl.tensors.copyplan import cover_tensor
from shardctl.verify import rank_files

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardctl.running.load import WantedTensor
    from shardctl.tensors.bands import ByteReader


def load(
    path: str | Path,
    *,
    rank: int | None = None,
    device: str = "cpu",
    source_options: SourceOptions | None = None,
    effort: ExecutionOptions | None = None,
) -> dict[str, Any]:
    """Return the state dict of one rank, as `torch.Tensor`s on `device`, under the names that its files have.

    What the rank has of a tensor is one array, put together from its boxes; what its replicas wrote is read from there.
    With `rank` None, every tensor is whole, whatever the layout. `device` is `cpu`, `cuda`, `cuda:1` or `auto`; of
    several CUDA devices rank r gets device r modulo their number. Nothing is mapped: the tensors are the caller's own.

    Raises UsageError for a rank or a kind of device that does not exist, UnsupportedError without torch or the device,
    MachineError if the device has not the memory now, MemoryBudgetError if it never could.
    """
    from shardctl.running.device import list_devices
    from shardctl.running.load import load_tensors

    effort = effort or ExecutionOptions()
    places = list_devices(device)
    with (
        open_checkpoint(path, replace(source_options or SourceOptions(), kv_heads="replicate")) as checkpoint,
        stop_on_signals(effort.stop),
    ):
        checkpoint.source.set_stop_request(effort.stop)
        wanted = select_whole_tensors(checkpoint) if rank is None else select_rank_tensors(checkpoint, rank)
        tensors = load_tensors(wanted, checkpoint.source, places[(rank or 0) % len(places)], effort).tensors
        checkpoint.prove()
        return tensors


def lens(path: str | Path, *, source_options: SourceOptions | None = None) -> Mapping[str, Any]:
    """Open a lazy state dict over a checkpoint in any layout, under the names of transformers' class if it is known.

    Nothing is read before an entry is indexed, so `from_pretrained(None, config=..., state_dict=shardctl.lens(path))`
    reads just what it needs. The files stay open until the last entry is gone.
    """
    from shardctl.running.forward import build_lazy_state_dict as lazily

    stack = ExitStack()
    checkpoint = stack.enter_context(open_checkpoint(path, source_options))
    reader = _ClosingReader(checkpoint.source)
    weakref.finalize(reader, stack.close)
    return lazily(checkpoint.manifest, reader, checkpoint.model)


class _ClosingReader:
    """A reader that closes its source when nobody holds it any more."""

    def __init__(self, source: ByteReader) -> None:
        self._source = source

    def read_at(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into`."""
        self._source.read_at(path, offset, into)


def select_whole_tensors(checkpoint: OpenedCheckpoint) -> dict[str, WantedTensor]:
    """Select every tensor by its stored name."""
    from shardctl.running.load import WantedTensor

    return {
        name: WantedTensor.whole(tensor.shape, cover_tensor(tensor) or tensor.chunks)
        for name, tensor in checkpoint.stored.tensors.items()
    }


def select_rank_tensors(checkpoint: OpenedCheckpoint, rank: int) -> dict[str, WantedTensor]:
    """Select what one rank computes with, by stored name."""
    from shardctl.running.load import WantedTensor

    mesh = checkpoint.mesh
    ranks = rank_files.list_ranks(checkpoint.stored)
    if not ranks:
        raise UsageError(f"{checkpoint.source.name} has no files of ranks", hint="leave the rank out: it loads whole")
    world = mesh.world if mesh is not None else ranks[-1] + 1
    if not 0 <= rank < world:
        raise UsageError(f"there is no rank {rank}; ranks are 0 to {world - 1}")
    chunks: dict[str, list[Any]] = {}
    for name, chunk in rank_files.list_held_chunks(rank, checkpoint.stored, mesh, list_expert_names(checkpoint)):
        chunks.setdefault(name, []).append(chunk)
    return {name: WantedTensor.part(name, some) for name, some in chunks.items()}


def list_expert_names(checkpoint: OpenedCheckpoint) -> frozenset[str]:
    """List the stored names of what ep divides, where the model is known."""
    if checkpoint.model is None:
        return frozenset()
    return rank_files.list_expert_arrays(checkpoint.manifest, checkpoint.model)
