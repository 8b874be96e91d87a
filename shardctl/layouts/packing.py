"""Packing arrays into safetensors files yet to be written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardctl.box import Box
from shardctl.errors import UnsupportedError
from shardctl.formats.safetensors_header import encode_header
from shardctl.manifest import Chunk, File, Manifest, Region, Tensor, dense_strides
from shardctl.value import value

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardctl.dtype import DType
    from shardctl.views import View


@value
class Array:
    """One array of a file: a box of a larger array, which is a tensor or holds several."""

    name: str
    dtype: DType
    """The type to write, which a cast may have changed."""
    shape: tuple[int, ...]
    """Of the larger array."""
    box: Box
    parts: tuple[tuple[Tensor, View | None], ...]
    """The tensors that the box may hold elements of, and where each lies in the larger array; None if it is that."""

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
    def of(cls, name: str, tensor: Tensor, dtype: DType, box: Box) -> Array:
        """A box of one tensor."""
        return cls(name, dtype, tensor.shape, box, ((tensor, None),))

    def chunks(self, region: Region) -> Iterator[tuple[str, Chunk]]:
        """What each tensor has in the box, which is stored at `region`, by the tensor's name."""
        stored = Chunk(self.box, self.dtype, region, self.name)
        for tensor, view in self.parts:
            chunk = stored if view is None else view.pull(stored, Box.whole(tensor.shape))
            if chunk is not None:
                yield tensor.name, chunk

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.dtype.nbytes(self.box.shape)


class FileBuilder:
    """Collects files and the chunks that lie in them."""

    def __init__(self, metadata: Mapping[str, str]) -> None:
        self._metadata = dict(metadata)
        self.files: dict[str, File] = {}
        self._chunks: dict[str, list[Chunk]] = {}

    def add(self, path: str, arrays: Sequence[Array], metadata: Mapping[str, str] | None = None) -> None:
        """A safetensors file with these arrays."""
        said = {**self._metadata, **(metadata or {})}
        encoded = encode_header([(array.name, array.dtype, array.box.shape) for array in arrays], said)
        chunks = self._chunks
        for array in arrays:
            region = Region(path, encoded.offsets[array.name], dense_strides(array.dtype, array.box.shape))
            for tensor, chunk in array.chunks(region):
                if tensor in chunks:
                    chunks[tensor].append(chunk)
                else:
                    chunks[tensor] = [chunk]
        self.files[path] = File(path, encoded.size, ((0, encoded.header),))

    def manifest(self, layout: str, have: Manifest, dtypes: Mapping[str, DType]) -> Manifest:
        """The target: the tensors of `have`, stored where they were packed."""
        tensors = {
            name: Tensor(
                tensor.name, dtypes[name], tensor.shape, tuple(self._chunks.get(name, ())), tensor.ties, tensor.spelling
            )
            for name, tensor in have.tensors.items()
        }
        return Manifest(layout, tensors, self.files, have.objects, self._metadata)


def container_metadata(have: Manifest) -> dict[str, str]:
    """The free-form metadata that travels along: the source's own, and the `format` that transformers demands."""
    kept = {key: value for key, value in have.metadata.items() if not key.startswith("DCP_")}
    return {"format": "pt", **kept}
