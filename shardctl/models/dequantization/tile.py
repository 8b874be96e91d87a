"""Reads the parts of a quantized weight's arrays that belong to a tile of it, and spreads scales over its elements.

A tile is two spans of the weight, which is `[out, in]`: of its outputs, and of its inputs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import ml_dtypes
import numpy as np

from shardctl.base.value import value_class
from shardctl.models.quantization.storage import AlongDim
from shardctl.tensors.bands import ChunkIndex
from shardctl.tensors.box import Box, BoxIndex
from shardctl.tensors.copyplan import cover_tensor
from shardctl.tensors.manifest import ConstantFill, narrow_chunk

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import DTypeLike, NDArray

    from shardctl.models.quantization.storage import Form, QuantizedArray
    from shardctl.tensors.bands import BandBuffer, ByteReader
    from shardctl.tensors.manifest import Chunk, Tensor
    from shardctl.tensors.tiles import Span

IN_BETWEEN: Final = ("F16", "BF16")
"""Types narrower than F32 that owners of methods compute in."""
_NUMPY_DTYPES: Final[Mapping[str, DTypeLike]] = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I32": np.int32,
    "I64": np.int64,
    "I8": np.int8,
    "U32": np.uint32,
    "U8": np.uint8,
}
_E8M0_EXPONENT_BIAS: Final = 127
"""Of an exponent that is stored alone (OCP Microscaling Formats 1.0, E8M0)."""


@value_class
class LocatedArray:
    """One of the arrays of a weight, as a checkpoint has it."""

    tensor: Tensor
    form: Form
    chunks: ChunkIndex

    @staticmethod
    def of(tensor: Tensor, form: Form) -> LocatedArray:
        """Return the array; raises CoverageError if elements of it are missing."""
        return LocatedArray(tensor, form, ChunkIndex(cover_tensor(tensor)))

    @staticmethod
    def of_stack(tensor: Tensor, form: Form) -> Iterator[LocatedArray]:
        """Yield the array of each expert of a stack, in order; raises CoverageError if elements of it are missing."""
        chunks = cover_tensor(tensor)
        index = BoxIndex([chunk.box for chunk in chunks])
        for expert in range(tensor.shape[0]):
            whole = Box((expert, *(0 for _ in tensor.shape[1:])), (1, *tensor.shape[1:]))
            found = [drop_first_dim(narrow_chunk(chunks[n], box)) for n, box in index.find_overlaps(whole)]
            yield LocatedArray(replace(tensor, shape=tensor.shape[1:], chunks=tuple(found)), form, ChunkIndex(found))


def drop_first_dim(chunk: Chunk) -> Chunk:
    """Return a chunk of one index of the first dim, without that dim."""
    box = Box(chunk.box.origin[1:], chunk.box.shape[1:])
    if isinstance(chunk.where, ConstantFill):
        return replace(chunk, box=box)
    return replace(chunk, box=box, where=replace(chunk.where, strides=chunk.where.strides[1:]))


class DecodedTile(NamedTuple):
    """The elements of a tile of a weight."""

    values: NDArray[np.float32]
    """In the order of the decoder: rows of outputs, or of inputs."""
    rounded: str = "F32"
    """The type in which the method's owner has the result; a cast to another type comes after it."""


@value_class
class BlockFactors:
    """Numbers of which each belongs to a block of a tile's elements: scales, or zero points."""

    values: NDArray[Any]
    """Two-dimensional, in the order of the tile."""
    blocks: tuple[int, int]
    """Elements of the weight along each dim that share a number; 0 where all do."""
    skipped: tuple[int, int]
    """Elements of the first block along each dim that lie before the tile."""

    def scale(self, elements: NDArray[np.float32]) -> None:
        """Multiply the elements of the tile, in place."""
        rows = self._spread(0, self.values, elements.shape[0])
        columns, block = elements.shape[1], self.blocks[1]
        if block > 1 and not self.skipped[1] and columns % block == 0 and elements.flags.c_contiguous:
            blocked = elements.reshape(elements.shape[0], columns // block, block)
            np.multiply(blocked, rows[:, :, None], out=blocked)
        else:
            np.multiply(elements, self._spread(1, rows, columns), out=elements)

    def spread(self, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the number of each element of a tile of `shape`, or something that broadcasts to it."""
        return self._spread(1, self._spread(0, self.values, shape[0]), shape[1])

    def _spread(self, axis: int, values: NDArray[Any], extent: int) -> NDArray[Any]:
        block, skipped = self.blocks[axis], self.skipped[axis]
        if block == 0:
            return values
        spread = values if block == 1 else np.repeat(values, block, axis)
        return spread[skipped : skipped + extent] if axis == 0 else spread[:, skipped : skipped + extent]


@value_class
class WeightTile:
    """A tile of a quantized weight, and what its arrays are read with."""

    arrays: Mapping[str, LocatedArray]
    """By the usual name of each array; optional ones may be absent."""
    spans: tuple[Span, Span]
    """Of the outputs, and of the inputs."""
    reader: ByteReader
    buffer: BandBuffer

    def has(self, array: QuantizedArray) -> bool:
        """Return whether the checkpoint has an array that it may lack."""
        return array.names[0] in self.arrays

    def extent(self, dim: int) -> int:
        """Return outputs or inputs of the tile."""
        return self.spans[dim][1] - self.spans[dim][0]

    def block(self, array: QuantizedArray, dim: int) -> int:
        """Return elements of the weight along `dim` that an array holds together."""
        form = self.arrays[array.names[0]].form
        return next((each.block for each in form if isinstance(each, AlongDim) and each.dim == dim), 1)

    def read(self, array: QuantizedArray, also: Mapping[int, Span] | None = None) -> NDArray[Any]:
        """Return the part of an array that belongs to the tile, in the array's own dims, whole blocks of it.

        `also` are the spans of some of the array's dims where they do not follow from the tile.
        """
        stored = self.arrays[array.names[0]]
        spans = [
            (also or {}).get(dim) or self._map_extent(extent, size)
            for dim, (extent, size) in enumerate(zip(stored.form, stored.tensor.shape, strict=True))
        ]
        box = Box(tuple(start for start, _ in spans), tuple(stop - start for start, stop in spans))
        dtype = stored.tensor.dtype
        into = np.empty(dtype.nbytes(box.shape), np.uint8)
        found = self.buffer.read(self.reader, stored.chunks, box, into)
        assert found == box.size, f"{stored.tensor.name} {box}: read {found} elements"  # noqa: S101
        return into.view(_NUMPY_DTYPES[dtype.name]).reshape(box.shape)

    def read_numbers(self, array: QuantizedArray, also: Mapping[int, Span] | None = None) -> NDArray[np.float32]:
        """Read the same as F32; what is stored as bytes are exponents."""
        values = self.read(array, also)
        if values.dtype == np.uint8:
            return np.ldexp(np.float32(1), values.astype(np.int32) - _E8M0_EXPONENT_BIAS)
        return values.astype(np.float32)

    def read_factors(self, array: QuantizedArray, order: tuple[int, int], numbers: NDArray[Any]) -> BlockFactors:
        """Read `numbers`, which were read of `array` for this tile, as they belong to blocks of it."""
        form = self.arrays[array.names[0]].form
        along = {extent.dim: (axis, extent) for axis, extent in enumerate(form) if isinstance(extent, AlongDim)}
        blocks, skipped = [], []
        axes = [along[dim][0] for dim in order if dim in along]
        rest = [axis for axis in range(numbers.ndim) if axis not in axes]
        values = numbers.transpose([*axes, *rest])
        shape = []
        for dim in order:
            block = along[dim][1].block if dim in along else 0
            blocks.append(block)
            skipped.append(self.spans[dim][0] % block if block else 0)
            shape.append(values.shape[axes.index(along[dim][0])] if dim in along else 1)
        return BlockFactors(values.reshape(shape), (blocks[0], blocks[1]), (skipped[0], skipped[1]))

    def _map_extent(self, extent: object, size: int) -> Span:
        if not isinstance(extent, AlongDim):
            return 0, size
        start, stop = self.spans[extent.dim]
        return start // extent.block * extent.stored, min(-(-stop // extent.block) * extent.stored, size)


def round_numbers(values: NDArray[np.float32], kind: str) -> NDArray[np.float32]:
    """Return the numbers as a narrower type has them, as F32."""
    return values if kind == "F32" else values.astype(_NUMPY_DTYPES[kind]).astype(np.float32)


def smooth_inputs(smoothing: QuantizedArray | None, tile: WeightTile, decoded: DecodedTile) -> DecodedTile:
    """Return the tile of a weight whose inputs are multiplied with factors first, as that of one that needs none.

    Rows are outputs. The weight is rounded before it is multiplied, and the product has its type.
    """
    if smoothing is None or not tile.has(smoothing):
        return decoded
    factors = tile.read_numbers(smoothing).reshape(1, -1)
    return DecodedTile(round_numbers(decoded.values, decoded.rounded) * factors, decoded.rounded)
