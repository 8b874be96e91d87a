"""Packs arrays into safetensors files that are yet to be written."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Protocol

from shardctl.base.errors import UnsupportedError
from shardctl.base.value import value_class
from shardctl.libraries.safetensors.header import encode_header
from shardctl.tensors.manifest import CheckpointFile, Chunk, Manifest, Region, Tensor, compute_dense_strides
from shardctl.tensors.turns import count_turns

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardctl.base.dtype import DType
    from shardctl.models.tables.fusion import FusionPlaces
    from shardctl.tensors.box import Box
    from shardctl.tensors.views import ViewGroup


@value_class
class TensorArray:
    """One array of a file: a box of a larger array, which is a tensor or holds several."""

    name: str
    dtype: DType
    """The type to write, which a cast may have changed."""
    shape: tuple[int, ...]
    """Of the larger array."""
    box: Box
    tensors: tuple[Tensor, ...]
    """Those that the box may hold elements of, of each part one."""
    views: ViewGroup | None = None
    """Where each of them lies in the larger array; None if that is the only one of them."""
    merged: FusionPlaces | None = None
    """Where they lie, if the array is declared with dims merged that the views have apart."""
    constant: ClassVar[bytes | None] = None
    """Nothing: tensors fill it."""
    padding: ClassVar[int] = 0
    """Nothing, as well."""

    def __post_init__(self) -> None:
        """Raise UnsupportedError if an edge of the box falls inside a byte."""
        if self.dtype.bits % 8 == 0:
            return
        per = self.dtype.unit_elements
        if self.box.shape != self.shape and (self.box.origin[-1] % per or self.box.shape[-1] % per):
            raise UnsupportedError(
                f"{self.name} {list(self.shape)} is {self.dtype} and cannot be cut at {self.box}: "
                f"only groups of {per} elements fill whole bytes",
                hint=f"cut its last dim at multiples of {per}, or another dim",
            )

    @classmethod
    def of(cls, name: str, tensor: Tensor, dtype: DType, box: Box) -> TensorArray:
        """Return a box of one tensor."""
        return cls(name, dtype, tensor.shape, box, (tensor,))

    def chunks(self, region: Region) -> Iterator[tuple[str, Chunk]]:
        """Yield what each tensor has in the box, which is stored at `region`, by the tensor's name."""
        dtype, name, tensors = self.dtype, self.name, self.tensors
        if self.views is None:
            yield tensors[0].name, Chunk(self.box, dtype, region, name)
        elif dtype.unit_elements == 1 and self.merged is None:
            path, start = region.file, region.offset
            for number, box, shift, strides in self.views.pulled(self.box, region.strides):
                tensor, where = tensors[number], Region(path, start + shift, strides)
                if len(box.shape) == len(tensor.shape):
                    yield tensor.name, Chunk(box, dtype, where, name)
                else:
                    turns = count_turns(tensor.shape, self.views.parts[number])
                    yield tensor.name, Chunk(box, dtype, where, name, turns=turns)
        else:
            stored = Chunk(self.box, dtype, region, name)
            stored = self.merged.split_dims(stored) if self.merged is not None else stored
            for tensor, view, part in zip(tensors, self.views.views, self.views.parts, strict=True):
                chunk = view.map_chunk_part(stored, part)
                if chunk is not None:
                    yield tensor.name, replace(chunk, turns=count_turns(tensor.shape, part))

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.dtype.nbytes(self.box.shape)


class PackableArray(Protocol):
    """One array that a file is to have, whatever it is made of."""

    @property
    def name(self) -> str:
        """As the file has it."""

    @property
    def dtype(self) -> DType:
        """The type to write."""

    @property
    def box(self) -> Box:
        """What of a larger array it is; its extent is the shape that the file declares."""

    @property
    def constant(self) -> bytes | None:
        """Its bytes, if no tensor has anything of it."""

    @property
    def padding(self) -> int:
        """How many bytes at its end are zeros that belong to no tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""

    def chunks(self, region: Region) -> Iterator[tuple[str, Chunk]]:
        """Yield what each tensor has in it, by the tensor's name, if it is stored at `region`."""


class FileBuilder:
    """Collects files and the chunks that lie in them."""

    def __init__(self, metadata: Mapping[str, str]) -> None:
        self._metadata = dict(metadata)
        self.files: dict[str, CheckpointFile] = {}
        self._chunks: dict[str, tuple[Chunk] | list[Chunk]] = {}
        """By tensor; most have one."""

    def add(self, path: str, arrays: Sequence[PackableArray], metadata: Mapping[str, str] | None = None) -> None:
        """Add a safetensors file with these arrays."""
        said = {**self._metadata, **(metadata or {})}
        encoded = encode_header([(array.name, array.dtype, array.box.shape) for array in arrays], said)
        chunks = self._chunks
        literals, blanks = [(0, encoded.header)], []
        for array in arrays:
            start = encoded.offsets[array.name]
            region = Region(path, start, compute_dense_strides(array.dtype, array.box.shape))
            if array.constant is not None:
                literals.append((start, array.constant))
                continue
            if array.padding:
                blanks.append((start + array.nbytes - array.padding, array.padding))
            for tensor, chunk in array.chunks(region):
                before = chunks.get(tensor)
                if before is None:
                    chunks[tensor] = (chunk,)
                elif isinstance(before, list):
                    before.append(chunk)
                else:
                    chunks[tensor] = [*before, chunk]
        self.files[path] = CheckpointFile(path, encoded.size, tuple(literals), tuple(blanks))

    def stored(self) -> Iterator[tuple[str, Chunk]]:
        """Yield every chunk of every file so far, by its tensor's name."""
        for name, found in self._chunks.items():
            for chunk in found:
                yield name, chunk

    def manifest(self, layout: str, have: Manifest, dtypes: Mapping[str, DType]) -> Manifest:
        """Return the target: the tensors of `have`, stored where they were packed."""
        tensors = {
            name: Tensor(
                tensor.name, dtypes[name], tensor.shape, tuple(self._chunks.get(name, ())), tensor.ties, tensor.spelling
            )
            for name, tensor in have.tensors.items()
        }
        return Manifest(layout, tensors, self.files, have.objects, self._metadata)


def build_container_metadata(have: Manifest) -> dict[str, str]:
    """Build the free-form metadata that travels along: the source's own, and the `format` that transformers demands."""
    kept = {key: value for key, value in have.metadata.items() if not key.startswith("DCP_")}
    return {"format": "pt", **kept}
