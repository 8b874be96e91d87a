"""Compares what was loaded onto a device with what should be there: the source's slice, or the recorded digests."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

import numpy as np

from shardctl.base.errors import UnsupportedError
from shardctl.base.value import state_class, value_class
from shardctl.base.workers import run_in_threads
from shardctl.running.device import synchronize_device
from shardctl.running.load import HostStaging, as_bytes, as_integers
from shardctl.tensors.bands import BandBuffer, ChunkIndex, build_unit_slices, split_bands
from shardctl.tensors.box import Box
from shardctl.tensors.cast import cast_elements
from shardctl.tensors.copyplan import cover_tensor
from shardctl.tensors.digest import DigestSums, compute_box_sums
from shardctl.tensors.manifest import Chunk, Region, Tensor, compute_dense_strides

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardctl.base.workers import ExecutionOptions
    from shardctl.tensors.bands import ByteReader
    from shardctl.tensors.manifest import Manifest

Torch = Any
Array = tuple[str, str, int]
"""An array of a file: the file's path, the array's name, and where it begins, for a name may have several boxes."""


def identify_array(chunk: Chunk) -> Array:
    """Return the array that a chunk is, of those that have stored names; it lies in a file."""
    assert isinstance(chunk.where, Region)  # noqa: S101 - as promised
    return chunk.where.file, chunk.name, chunk.where.offset


def collect_arrays(manifest: Manifest) -> dict[Array, Chunk]:
    """Collect the arrays of a checkpoint; `manifest` has stored names."""
    return {
        identify_array(chunk): chunk
        for tensor in manifest.tensors.values()
        for chunk in tensor.chunks
        if isinstance(chunk.where, Region)
    }


@value_class
class LoadedBox:
    """A box of a tensor, in device memory."""

    tensor: Tensor
    """By its canonical name."""
    chunk: Chunk
    values: Torch
    """The box's elements, as integers; their order in memory is that of the array they lie in."""


Parts = Mapping[Array, Sequence[tuple[Tensor, Chunk]]]
"""What each array holds: boxes of tensors, by their canonical names."""


def find_array_parts(manifest: Manifest, every: Mapping[Array, Chunk]) -> Parts:
    """Find what `every` array of a checkpoint holds; `manifest` has canonical names."""
    begins: dict[tuple[str, str], list[int]] = {}
    for file, name, offset in sorted(every):
        begins.setdefault((file, name), []).append(offset)
    found: dict[Array, list[tuple[Tensor, Chunk]]] = {}
    for tensor in manifest.tensors.values():
        for chunk in tensor.chunks:
            if isinstance(chunk.where, Region):
                known = begins[chunk.where.file, chunk.name]
                begin = known[bisect_right(known, chunk.where.offset) - 1]
                found.setdefault((chunk.where.file, chunk.name, begin), []).append((tensor, chunk))
    return found


def place_loaded_arrays(
    parts: Parts, stored: Mapping[Array, Chunk], loaded: Mapping[Array, Torch]
) -> Iterator[LoadedBox]:
    """Yield the tensors' boxes in the memory of loaded arrays.

    Raises UnsupportedError for an array whose elements lie in its file in another order than in memory.
    """
    for key, memory in loaded.items():
        for tensor, chunk in parts.get(key, ()):
            if chunk.affine:
                raise UnsupportedError(f"{chunk.name} is stored as {chunk.affine}, which is not what is loaded")
            yield LoadedBox(tensor, chunk, _select_values(chunk, stored[key], as_integers(memory)))


def _select_values(chunk: Chunk, array: Chunk, memory: Torch) -> Torch:
    """Select the part of an array that is `chunk`: where it lies in the file says where in memory."""
    assert isinstance(chunk.where, Region)  # noqa: S101 - arrays are stored
    assert isinstance(array.where, Region)  # noqa: S101
    if chunk.where == array.where and chunk.box.shape == array.box.shape:
        return memory
    unit = chunk.dtype.unit_bytes
    if array.where.strides != compute_dense_strides(array.dtype, array.box.shape):
        raise UnsupportedError(f"{array.name} in {array.where.file} is stored in another order than it is loaded in")
    shape = chunk.dtype.unit_shape(chunk.box.shape)
    strides = tuple(stride // unit for stride in chunk.where.strides)
    return memory.reshape(-1).as_strided(shape, strides, (chunk.where.offset - array.where.offset) // unit)


@value_class
class LoadedDifference:
    """Where a loaded tensor is not what it should be."""

    tensor: str
    file: str
    count: int
    """Elements that differ."""
    first: Box


@value_class
class _CompareTask:
    placed: LoadedBox
    box: Box
    theirs: ChunkIndex | None = None


def compare_loaded(
    parts: Sequence[LoadedBox], source: Manifest, reader: ByteReader, device: str, effort: ExecutionOptions
) -> list[LoadedDifference]:
    """Compare on the device, bits as bits, with the same elements of `source`, cast first if its type is another.

    `source` has canonical names; tensors that it lacks are left out.
    """
    found: dict[tuple[str, str], LoadedDifference] = {}
    lock = threading.Lock()

    def tasks() -> Iterator[_CompareTask]:
        for part in parts:
            theirs = source.tensors.get(part.tensor.name)
            if theirs is not None:
                index = ChunkIndex(cover_tensor(theirs))
                wide = max(theirs.dtype.bits / part.chunk.dtype.bits, 1)
                yield from _split_tasks(part, int(effort.block / wide), index)

    def worker() -> Callable[[_CompareTask], None]:
        staging, band = HostStaging(effort.block, device), BandBuffer(effort.block)
        other = np.empty(effort.block, np.uint8)

        def handle(task: _CompareTask) -> None:
            assert task.theirs is not None  # noqa: S101 - made above
            dtype, theirs = task.placed.chunk.dtype, task.theirs.chunks[0].dtype
            nbytes, buffer = dtype.nbytes(task.box.shape), staging.next()
            if theirs == dtype:
                band.read(reader, task.theirs, task.box, buffer.numpy())
            else:
                band.read(reader, task.theirs, task.box, other)
                cast_elements(other[: theirs.nbytes(task.box.shape)], theirs, dtype, buffer.numpy()[:nbytes])
            mine = _select_box(task)
            wanted = buffer[:nbytes].view(mine.dtype).reshape(mine.shape)
            first, count = staging.find_difference(mine, wanted)
            if count:
                unequal = _build_difference(task, first, count)
                with lock:
                    before = found.get((unequal.tensor, unequal.file))
                    found[unequal.tensor, unequal.file] = (
                        unequal if before is None else _merge_differences(before, unequal)
                    )
            effort.watcher.advance(nbytes)

        return handle

    run_in_threads(tasks(), worker, effort.threads, effort.stop)
    synchronize_device(device)
    return list(found.values())


@state_class
class LoadedDigests:
    """The sums over what was loaded, box by box, until all ranks have been."""

    sums: dict[tuple[str, Box], DigestSums] = field(default_factory=dict)

    def add(self, parts: Sequence[LoadedBox], effort: ExecutionOptions) -> list[LoadedDifference]:
        """Sum up the loaded elements; returns boxes that are not what the first rank that held them had."""
        totals: dict[int, DigestSums] = {}
        lock = threading.Lock()

        def worker() -> Callable[[_CompareTask], None]:
            def handle(task: _CompareTask) -> None:
                data = as_bytes(_select_box(task).contiguous()).cpu().numpy()
                one = compute_box_sums(data, task.placed.chunk.dtype, task.box, task.placed.tensor.shape)
                with lock:
                    key = id(task.placed)
                    totals[key] = totals[key] + one if key in totals else one
                effort.watcher.advance(data.nbytes)

            return handle

        run_in_threads(
            (task for part in parts for task in _split_tasks(part, effort.block)), worker, effort.threads, effort.stop
        )
        wrong = []
        for part in parts:
            total = totals.get(id(part), DigestSums.zero(part.chunk.dtype))
            before = self.sums.setdefault((part.tensor.name, part.chunk.box), total)
            if before != total:
                wrong.append(LoadedDifference(part.tensor.name, _get_file(part), 0, part.chunk.box))
        return wrong

    def of(self, tensor: Tensor) -> DigestSums:
        """Return the sums over all of a tensor; what was stored more than once counts once."""
        total = DigestSums.zero(tensor.dtype)
        for box in dict.fromkeys(chunk.box for chunk in tensor.chunks):
            total += self.sums.get((tensor.name, box), DigestSums.zero(tensor.dtype))
        return total


def _split_tasks(part: LoadedBox, block: int, theirs: ChunkIndex | None = None) -> Iterator[_CompareTask]:
    for box in split_bands(part.chunk.box.shape, part.chunk.dtype, block, origin=part.chunk.box.origin):
        yield _CompareTask(part, box, theirs)


def _select_box(task: _CompareTask) -> Torch:
    """Select the box's values."""
    chunk = task.placed.chunk
    return task.placed.values[build_unit_slices(task.box, chunk.dtype, chunk.box.origin)]


def _get_file(part: LoadedBox) -> str:
    assert isinstance(part.chunk.where, Region)  # noqa: S101 - it was loaded from a file
    return part.chunk.where.file


def _build_difference(task: _CompareTask, first: int, count: int) -> LoadedDifference:
    shape = task.placed.chunk.dtype.unit_shape(task.box.shape)
    at = [int(index) for index in np.unravel_index(first, shape)] if shape else []
    per = task.placed.chunk.dtype.unit_elements
    if at:
        at[-1] *= per
    origin = tuple(a + b for a, b in zip(task.box.origin, at, strict=True))
    extents = (*(1 for _ in origin[:-1]), per) if origin else ()
    return LoadedDifference(task.placed.tensor.name, _get_file(task.placed), count, Box(origin, extents))


def _merge_differences(one: LoadedDifference, other: LoadedDifference) -> LoadedDifference:
    first = min(one.first, other.first, key=lambda box: box.origin)
    return LoadedDifference(one.tensor, one.file, one.count + other.count, first)
