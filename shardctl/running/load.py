"""Brings stored tensors into the memory of a device: read by threads, a block at a time, and nothing is mapped.

On the CPU blocks are read where they will stay. On CUDA each thread has two pinned blocks, of which one is copied to
the device while the next is read into the other; host memory is `2 x threads x block`, whatever is loaded.
"""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shardctl.base.errors import CoverageError, MachineError, MemoryBudgetError, ShardctlError, SourceError
from shardctl.base.value import value_class
from shardctl.base.workers import run_in_threads
from shardctl.running.device import (
    empty_device_cache,
    is_cuda_device,
    measure_device_memory,
    select_device,
    synchronize_device,
    use_device,
)
from shardctl.running.forward.lazy_state_dict import get_torch_type
from shardctl.running.machine_failure import release_frames, tell_machine_errors
from shardctl.tensors.bands import BandBuffer, ChunkIndex, build_unit_slices, split_bands
from shardctl.tensors.box import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardctl.base.workers import ExecutionOptions
    from shardctl.tensors.bands import ByteReader
    from shardctl.tensors.manifest import Chunk

Torch = Any
"""Tensors, events and streams: torch is imported only when something is loaded."""
Key = TypeVar("Key")


@value_class
class LoadedTensors(Generic[Key]):
    """Tensors in the memory of one device."""

    tensors: dict[Key, Torch]
    nbytes: int
    seconds: float
    """From the first allocation until the last byte was there."""
    peak_bytes: int
    """The most that torch allocated on the device for it; on the CPU what the tensors take."""


@value_class
class _BlockCopy:
    """A block on its way."""

    chunk: Chunk
    box: Box
    """In the stored tensor's index space."""
    into: Torch
    """Where it goes, as integers of the width of a unit."""


@value_class
class BoxGrid:
    """How boxes of a tensor make up an array: side by side, in order."""

    shape: tuple[int, ...]
    """Of the array, in elements."""
    at: tuple[dict[int, int], ...]
    """For each dim, by where a box begins in the tensor, where it begins in the array."""

    @classmethod
    def of(cls, name: str, boxes: Sequence[Box]) -> BoxGrid:
        """Return the array of what one rank holds.

        Raises SourceError if that overlaps, or has other columns in some rows.
        """
        dims = range(len(boxes[0].origin))
        spans = [sorted({(box.origin[dim], box.stop[dim]) for box in boxes}) for dim in dims]
        apart = all(a[1] <= b[0] for span in spans for a, b in pairwise(span))
        if not apart or prod(map(len, spans)) != len(set(boxes)):
            shown = ", ".join(map(str, boxes[:3]))
            raise SourceError(f"{name}: the boxes {shown} are no part of a tensor that one rank could have as an array")
        places: list[dict[int, int]] = []
        extents = []
        for span in spans:
            starts, end = {}, 0
            for start, stop in span:
                starts[start] = end
                end += stop - start
            places.append(starts)
            extents.append(end)
        return cls(tuple(extents), tuple(places))

    def place(self, box: Box) -> tuple[int, ...]:
        """Return where in the array one of the boxes begins."""
        return tuple(starts[origin] for starts, origin in zip(self.at, box.origin, strict=True))


@value_class
class WantedTensor:
    """A tensor that is to be loaded."""

    shape: tuple[int, ...]
    """In elements."""
    chunks: tuple[tuple[Chunk, tuple[int, ...]], ...]
    """Where its elements are stored, and where in it each box begins."""

    @classmethod
    def whole(cls, shape: Sequence[int], chunks: Sequence[Chunk]) -> WantedTensor:
        """Return a global tensor of `shape`, from disjoint chunks."""
        return cls(tuple(shape), tuple((chunk, chunk.box.origin) for chunk in chunks))

    @classmethod
    def part(cls, name: str, chunks: Sequence[Chunk]) -> WantedTensor:
        """Return what one rank has of it, as an array of its own; raises SourceError if its boxes form none."""
        unique = {chunk.box: chunk for chunk in reversed(chunks)}
        grid = BoxGrid.of(name, list(unique))
        return cls(grid.shape, tuple((chunk, grid.place(box)) for box, chunk in unique.items()))


def load_tensors(
    wanted: Mapping[Key, WantedTensor], reader: ByteReader, device: str, effort: ExecutionOptions
) -> LoadedTensors[Key]:
    """Return each of `wanted` as a tensor on `device` (`cpu` or `cuda:N`).

    Raises MachineError if the device has not the memory now or fails, MemoryBudgetError if it never could have it,
    CoverageError for elements that are stored nowhere, UnsupportedError for a type that torch does not have,
    Interrupted.
    """
    import torch

    try:
        with tell_machine_errors(device), use_device(device):
            return _load_wanted(wanted, reader, device, effort)
    except MachineError as error:
        if not isinstance(error.__cause__, torch.OutOfMemoryError):
            raise
        release_frames(error)
        size = sum(tensor.chunks[0][0].dtype.nbytes(tensor.shape) for tensor in wanted.values())
        raise _describe_shortage(size, device, error) from None


def _describe_shortage(size: int, device: str, error: MachineError) -> ShardctlError:
    """Describe why `size` bytes do not fit: others use the device, or it is too small."""
    empty_device_cache(device)
    memory = measure_device_memory(device)
    if memory is None:
        return error
    free, total = memory
    message = f"{size:,} bytes do not fit on {device}, of whose {total:,} bytes {free:,} are free"
    if size > total:
        return MemoryBudgetError(message, needed=size, hint="shardctl plan says what each rank needs")
    return MachineError(message, hint="end what else uses the device, or use --load auto or cpu")


def _load_wanted(
    wanted: Mapping[Key, WantedTensor], reader: ByteReader, device: str, effort: ExecutionOptions
) -> LoadedTensors[Key]:
    import torch

    cuda, before = is_cuda_device(device), 0
    if cuda:
        synchronize_device(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    began = time.perf_counter()
    integers, found, copies, nbytes = _get_integer_types(), dict[Key, Torch](), list[_BlockCopy](), 0
    for key, tensor in wanted.items():
        dtype = tensor.chunks[0][0].dtype
        kind = get_torch_type(dtype)
        whole = torch.empty(dtype.unit_shape(tensor.shape), dtype=integers[dtype.unit_bytes], device=device)
        nbytes += whole.nbytes
        found[key] = whole.view(kind)
        for chunk, place in tensor.chunks:
            copies += _split_copies(chunk, whole, place, effort.block)
    synchronize_device(device)  # where torch fills new memory, that comes before the copies of other streams
    run_in_threads(iter(copies), lambda: _make_worker(reader, device, effort), effort.threads, effort.stop)
    synchronize_device(device)
    peak = torch.cuda.max_memory_allocated(device) - before if cuda else nbytes
    return LoadedTensors(found, nbytes, time.perf_counter() - began, peak)


def _split_copies(chunk: Chunk, whole: Torch, place: Sequence[int], block: int) -> Iterator[_BlockCopy]:
    into = whole[build_unit_slices(Box(tuple(place), chunk.box.shape), chunk.dtype)]
    for box in split_bands(chunk.box.shape, chunk.dtype, block, origin=chunk.box.origin):
        yield _BlockCopy(chunk, box, into[build_unit_slices(box, chunk.dtype, chunk.box.origin)])


def _make_worker(reader: ByteReader, device: str, effort: ExecutionOptions) -> Callable[[_BlockCopy], None]:
    staging = HostStaging(effort.block, device)
    band = BandBuffer(effort.block)
    direct = device == "cpu"

    def handle(copy: _BlockCopy) -> None:
        stay = direct and copy.into.is_contiguous()
        nbytes = copy.chunk.dtype.nbytes(copy.box.shape)
        buffer = as_bytes(copy.into) if stay else staging.next()
        if band.read(reader, ChunkIndex([copy.chunk]), copy.box, buffer.numpy()) != copy.box.size:
            raise CoverageError(f"{copy.chunk.name}: not every element of {copy.box} is stored")
        if not stay:
            staging.send(buffer[:nbytes].view(copy.into.dtype).reshape(copy.into.shape), copy.into)
        effort.watcher.advance(nbytes)

    return handle


class HostStaging:
    """Two blocks of host memory that take turns on the way to a device; for one thread, whose device it becomes."""

    def __init__(self, block: int, device: str) -> None:
        import torch

        select_device(device)
        cuda: Torch = torch.cuda if is_cuda_device(device) else None
        count = 2 if cuda else 1
        self._buffers = [_allocate_block(block, pinned=bool(cuda)) for _ in range(count)]
        self._stream = cuda.Stream(device) if cuda else None
        self._events = [cuda.Event() if cuda else None for _ in range(count)]
        self._turn = -1

    def next(self) -> Torch:
        """Return a block that nothing is copied from any more, as bytes."""
        self._turn = (self._turn + 1) % len(self._buffers)
        event = self._events[self._turn]
        if event is not None:
            event.synchronize()
        return self._buffers[self._turn]

    def send(self, block: Torch, into: Torch) -> None:
        """Copy what lies in the block that `next` gave last; on CUDA it is still under way when this returns."""
        import torch

        if self._stream is None:
            into.copy_(block)
            return
        with torch.cuda.stream(self._stream):
            into.copy_(block, non_blocking=True)
            event = self._events[self._turn]
            assert event is not None  # noqa: S101 - made with the stream
            event.record(self._stream)

    def find_difference(self, mine: Torch, block: Torch) -> tuple[int, int]:
        """Return the place of the first element of the block that is not that of `mine`, and how many there are."""
        import torch

        if self._stream is None:
            return _find_difference(mine, block)
        with torch.cuda.stream(self._stream):
            return _find_difference(mine, block.to(mine.device, non_blocking=True))


def _allocate_block(size: int, *, pinned: bool) -> Torch:
    """Allocate host memory; where the system pins no more of it, such as under WSL, copies from it are slower."""
    import torch

    if pinned:
        with suppress(RuntimeError):
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return torch.empty(size, dtype=torch.uint8)


def _find_difference(mine: Torch, other: Torch) -> tuple[int, int]:
    import torch

    if torch.equal(mine, other):
        return 0, 0
    wrong = (mine != other).reshape(-1)
    return int(wrong.to(torch.uint8).argmax()), int(wrong.sum())


def as_bytes(tensor: Torch) -> Torch:
    """Return the bytes of a dense tensor, without a copy."""
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def _get_integer_types() -> dict[int, Torch]:
    """Return integers by width in bytes: bits are moved and compared, not numbers."""
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(tensor: Torch) -> Torch:
    """Return the same bits as integers: NaN equals NaN, and zero is not minus zero."""
    return tensor.view(_get_integer_types()[tensor.element_size()])
