"""Plans what Orbax restores: a tree of arrays in plain zarr chunks, each a file."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UnsupportedError
from shardctl.libraries.orbax.plain_arrays import (
    ARRAY,
    COMMITTED,
    choose_chunk_shape,
    encode_array,
    encode_commit,
    encode_tree,
    list_chunks,
)
from shardctl.libraries.safetensors.hf_writing import list_whole_arrays
from shardctl.libraries.writer import Layout
from shardctl.storage.orbax import METADATA
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import CheckpointFile, Chunk, ConstantFill, Manifest, Region, compute_dense_strides

if TYPE_CHECKING:
    from shardctl.libraries.writer import PackRequest

NAME: Final = "orbax"
_MAX_FOLDER_NAME_BYTES: Final = 255
"""Bytes of the name of a folder on Linux."""


def pack_orbax(request: PackRequest) -> Manifest:
    """Return every array whole, in a folder of its name; the parts of a name between dots are the keys of the tree.

    Raises UnsupportedError for a name that no folder can have, one that is the beginning of another, and a type that
    tensorstore does not have.
    """
    have, dtypes = request.have, request.dtypes
    files: dict[str, CheckpointFile] = {}
    chunks: dict[str, list[Chunk]] = {}
    arrays = list(list_whole_arrays(have, request.form, dtypes))
    _check_names([array.name for array in arrays])
    for array in arrays:
        dtype, name, shape = array.dtype, array.name, array.box.shape
        described = encode_array(dtype, shape)
        files[f"{name}/{ARRAY}"] = CheckpointFile(f"{name}/{ARRAY}", len(described), ((0, described),))
        for path, box in list_chunks(name, shape, choose_chunk_shape(dtype, shape)):
            files[path] = CheckpointFile(path, dtype.nbytes(box.shape))
            region = Region(path, 0, compute_dense_strides(dtype, box.shape))
            for tensor, chunk in replace(array, box=box).chunks(region):
                chunks.setdefault(tensor, []).append(chunk)
        if not prod(shape):
            fill = ConstantFill(bytes(dtype.unit_bytes))
            chunks[array.tensors[0].name] = [Chunk(Box.whole(shape), dtype, fill, name)]
    tree = encode_tree({array.name: (array.dtype, array.box.shape) for array in arrays})
    for path, content in ((METADATA, tree), (COMMITTED, encode_commit())):
        files[path] = CheckpointFile(path, len(content), ((0, content),))
    tensors = {
        name: replace(tensor, dtype=dtypes[name], chunks=tuple(chunks.get(name, ())))
        for name, tensor in have.tensors.items()
    }
    return Manifest(NAME, tensors, files, have.objects)


def _check_names(names: list[str]) -> None:
    known = set(names)
    for name in names:
        if "/" in name or "\0" in name or not all(name.split(".")) or len(name.encode()) > _MAX_FOLDER_NAME_BYTES:
            raise UnsupportedError(f"{ascii(name)[:300]} cannot be the name of a folder with an array of Orbax")
        keys = name.split(".")
        outer = next((part for n in range(1, len(keys)) if (part := ".".join(keys[:n])) in known), None)
        if outer is not None:
            raise UnsupportedError(f"{outer} is an array, and {name} needs it to be a dict of Orbax's tree")


LAYOUT: Final = Layout(NAME, pack_orbax, options=frozenset({"names", "experts"}), source_names=False)
