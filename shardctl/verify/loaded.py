"""Compares what was loaded onto a device with what should be there: the source's slice, or the recorded digests."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from shardctl.bands import Band, ChunkIndex, split, unit_slices
from shardctl.box import Box
from shardctl.cast import cast
from shardctl.copyplan import cover
from shardctl.digest import Sums, partial
from shardctl.errors import UnsupportedError
from shardctl.manifest import Chunk, Region, Tensor, dense_strides
from shardctl.verify.load import Staging, as_bytes, as_integers, synchronize
from shardctl.workers import spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardctl.bands import Reader
    from shardctl.manifest import Manifest
    from shardctl.workers import Effort

Torch = Any
Array = tuple[str, str, int]
"""An array of a file: the file's path, the array's name, and where it begins, for a name may have several boxes."""


def array_of(chunk: Chunk) -> Array:
    """The array that a chunk is, of those that have stored names; it lies in a file."""
    assert isinstance(chunk.where, Region)  # noqa: S101 - as promised
    return chunk.where.file, chunk.name, chunk.where.offset


def arrays(manifest: Manifest) -> dict[Array, Chunk]:
    """The arrays of a checkpoint; `manifest` has stored names."""
    return {
        array_of(chunk): chunk
        for tensor in manifest.tensors.values()
        for chunk in tensor.chunks
        if isinstance(chunk.where, Region)
    }


@dataclass(frozen=True, slots=True)
class Placed:
    """A box of a tensor, in device memory."""

    tensor: Tensor
    """By its canonical name."""
    chunk: Chunk
    values: Torch
    """The box's elements, as integers; their order in memory is that of the array they lie in."""


Parts = Mapping[Array, Sequence[tuple[Tensor, Chunk]]]
"""What each array holds: boxes of tensors, by their canonical names."""


def parts_of(manifest: Manifest, every: Mapping[Array, Chunk]) -> Parts:
    """What `every` array of a checkpoint holds; `manifest` has canonical names."""
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


def placed(parts: Parts, stored: Mapping[Array, Chunk], loaded: Mapping[Array, Torch]) -> Iterator[Placed]:
    """The tensors' boxes in the memory of loaded arrays.

    Raises UnsupportedError for an array whose elements lie in its file in another order than in memory.
    """
    for key, memory in loaded.items():
        for tensor, chunk in parts.get(key, ()):
            if chunk.affine:
                raise UnsupportedError(f"{chunk.name} is stored as {chunk.affine}, which is not what is loaded")
            yield Placed(tensor, chunk, _values(chunk, stored[key], as_integers(memory)))


def _values(chunk: Chunk, array: Chunk, memory: Torch) -> Torch:
    """The part of an array that is `chunk`: where it lies in the file says where in memory."""
    assert isinstance(chunk.where, Region)  # noqa: S101 - arrays are stored
    assert isinstance(array.where, Region)  # noqa: S101
    if chunk.where == array.where and chunk.box.shape == array.box.shape:
        return memory
    unit = chunk.dtype.unit_bytes
    if array.where.strides != dense_strides(array.dtype, array.box.shape):
        raise UnsupportedError(f"{array.name} in {array.where.file} is stored in another order than it is loaded in")
    shape = chunk.dtype.unit_shape(chunk.box.shape)
    strides = tuple(stride // unit for stride in chunk.where.strides)
    return memory.reshape(-1).as_strided(shape, strides, (chunk.where.offset - array.where.offset) // unit)


@dataclass(frozen=True, slots=True)
class Unequal:
    """Where a loaded tensor is not what it should be."""

    tensor: str
    file: str
    count: int
    """Elements that differ."""
    first: Box


@dataclass(frozen=True, slots=True)
class _Task:
    placed: Placed
    box: Box
    theirs: ChunkIndex | None = None


def compare(parts: Sequence[Placed], source: Manifest, reader: Reader, device: str, effort: Effort) -> list[Unequal]:
    """Compare on the device, bits as bits, with the same elements of `source`, cast first if its type is another.

    `source` has canonical names; tensors that it lacks are left out.
    """
    found: dict[tuple[str, str], Unequal] = {}
    lock = threading.Lock()

    def tasks() -> Iterator[_Task]:
        for part in parts:
            theirs = source.tensors.get(part.tensor.name)
            if theirs is not None:
                index = ChunkIndex(cover(theirs))
                wide = max(theirs.dtype.bits / part.chunk.dtype.bits, 1)
                yield from _tasks(part, int(effort.block / wide), index)

    def worker() -> Callable[[_Task], None]:
        staging, band = Staging(effort.block, device), Band(effort.block)
        other = np.empty(effort.block, np.uint8)

        def handle(task: _Task) -> None:
            assert task.theirs is not None  # noqa: S101 - made above
            dtype, theirs = task.placed.chunk.dtype, task.theirs.chunks[0].dtype
            nbytes, buffer = dtype.nbytes(task.box.shape), staging.next()
            if theirs == dtype:
                band.read(reader, task.theirs, task.box, buffer.numpy())
            else:
                band.read(reader, task.theirs, task.box, other)
                cast(other[: theirs.nbytes(task.box.shape)], theirs, dtype, buffer.numpy()[:nbytes])
            mine = _part(task)
            wanted = buffer[:nbytes].view(mine.dtype).reshape(mine.shape)
            first, count = staging.differing(mine, wanted)
            if count:
                unequal = _unequal(task, first, count)
                with lock:
                    before = found.get((unequal.tensor, unequal.file))
                    found[unequal.tensor, unequal.file] = unequal if before is None else _together(before, unequal)
            effort.watcher.advance(nbytes)

        return handle

    spread(tasks(), worker, effort.threads, effort.stop)
    synchronize(device)
    return list(found.values())


@dataclass(slots=True)
class Digests:
    """The sums over what was loaded, box by box, until all ranks have been."""

    sums: dict[tuple[str, Box], Sums] = field(default_factory=dict)

    def add(self, parts: Sequence[Placed], effort: Effort) -> list[Unequal]:
        """Sum up the loaded elements; returns boxes that are not what the first rank that held them had."""
        totals: dict[int, Sums] = {}
        lock = threading.Lock()

        def worker() -> Callable[[_Task], None]:
            def handle(task: _Task) -> None:
                data = as_bytes(_part(task).contiguous()).cpu().numpy()
                one = partial(data, task.placed.chunk.dtype, task.box, task.placed.tensor.shape)
                with lock:
                    key = id(task.placed)
                    totals[key] = totals[key] + one if key in totals else one
                effort.watcher.advance(data.nbytes)

            return handle

        spread((task for part in parts for task in _tasks(part, effort.block)), worker, effort.threads, effort.stop)
        wrong = []
        for part in parts:
            total = totals.get(id(part), Sums.zero(part.chunk.dtype))
            before = self.sums.setdefault((part.tensor.name, part.chunk.box), total)
            if before != total:
                wrong.append(Unequal(part.tensor.name, _file(part), 0, part.chunk.box))
        return wrong

    def of(self, tensor: Tensor) -> Sums:
        """The sums over all of a tensor; what was stored more than once counts once."""
        total = Sums.zero(tensor.dtype)
        for box in dict.fromkeys(chunk.box for chunk in tensor.chunks):
            total += self.sums.get((tensor.name, box), Sums.zero(tensor.dtype))
        return total


def _tasks(part: Placed, block: int, theirs: ChunkIndex | None = None) -> Iterator[_Task]:
    for box in split(part.chunk.box.shape, part.chunk.dtype, block, origin=part.chunk.box.origin):
        yield _Task(part, box, theirs)


def _part(task: _Task) -> Torch:
    """The box's values."""
    chunk = task.placed.chunk
    return task.placed.values[unit_slices(task.box, chunk.dtype, chunk.box.origin)]


def _file(part: Placed) -> str:
    assert isinstance(part.chunk.where, Region)  # noqa: S101 - it was loaded from a file
    return part.chunk.where.file


def _unequal(task: _Task, first: int, count: int) -> Unequal:
    shape = task.placed.chunk.dtype.unit_shape(task.box.shape)
    at = [int(index) for index in np.unravel_index(first, shape)] if shape else []
    per = task.placed.chunk.dtype.unit_elements
    if at:
        at[-1] *= per
    origin = tuple(a + b for a, b in zip(task.box.origin, at, strict=True))
    extents = (*(1 for _ in origin[:-1]), per) if origin else ()
    return Unequal(task.placed.tensor.name, _file(task.placed), count, Box(origin, extents))


def _together(one: Unequal, other: Unequal) -> Unequal:
    first = min(one.first, other.first, key=lambda box: box.origin)
    return Unequal(one.tensor, one.file, one.count + other.count, first)
