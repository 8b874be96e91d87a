"""Packing arrays into safetensors files yet to be written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardctl.errors import UnsupportedError
from shardctl.formats.safetensors_header import encode_header
from shardctl.manifest import Chunk, File, Manifest, Region, dense_strides

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardctl.box import Box
    from shardctl.dtype import DType
    from shardctl.manifest import Tensor


@dataclass(frozen=True, slots=True)
class Array:
    """One array of a file: a box of a tensor under a name."""

    name: str
    tensor: Tensor
    dtype: DType
    """The type to write, which a cast may have changed."""
    box: Box

    def __post_init__(self) -> None:
        """Raise UnsupportedError if an edge of the box falls inside a byte."""
        per, shape = self.dtype.unit_elements, self.tensor.shape
        if per > 1 and self.box.shape != shape and (self.box.origin[-1] % per or self.box.shape[-1] % per):
            raise UnsupportedError(
                f"{self.name} {list(shape)} is {self.dtype} and cannot be cut at {self.box}: "
                f"only groups of {per} elements fill whole bytes",
                hint=f"cut its last dim at multiples of {per}, or another dim",
            )

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
        for array in arrays:
            region = Region(path, encoded.offsets[array.name], dense_strides(array.dtype, array.box.shape))
            chunk = Chunk(array.box, array.dtype, region, array.name)
            self._chunks.setdefault(array.tensor.name, []).append(chunk)
        self.files[path] = File(path, encoded.size, ((0, encoded.header),))

    def manifest(self, layout: str, have: Manifest, dtypes: Mapping[str, DType]) -> Manifest:
        """The target: the tensors of `have`, stored where they were packed."""
        tensors = {
            name: replace(tensor, dtype=dtypes[name], chunks=tuple(self._chunks.get(name, ())))
            for name, tensor in have.tensors.items()
        }
        return Manifest(layout, tensors, self.files, have.objects, self._metadata)


def container_metadata(have: Manifest) -> dict[str, str]:
    """The free-form metadata that travels along: the source's own, and the `format` that transformers demands."""
    kept = {key: value for key, value in have.metadata.items() if not key.startswith("DCP_")}
    return {"format": "pt", **kept}
