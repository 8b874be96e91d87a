"""Reads Orbax checkpoints of JAX: arrays in a tree, each named by the keys on its path, joined by dots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.libraries.files.links import check_link
from shardctl.libraries.files.side_files import list_side_files
from shardctl.libraries.orbax.plain_arrays import read_plain_array
from shardctl.libraries.reader import Format, find_given_file
from shardctl.storage.bounded_text import RECORD_TEXT, read_text
from shardctl.storage.orbax import METADATA, OrbaxSource, parse_tree
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import (
    CheckpointFile,
    Chunk,
    Manifest,
    OpaqueObject,
    Region,
    Tensor,
    compute_dense_strides,
)

if TYPE_CHECKING:
    from shardctl.storage import Source

_ORBAX_FILE_NAMES: Final = frozenset(
    {METADATA, "_CHECKPOINT_METADATA", "_sharding", "commit_success.txt", "manifest.ocdbt"}
)
_DATABASE_PATH_PREFIXES: Final = ("d/", "ocdbt.process_", "array_metadatas/")


def detect_orbax(source: Source) -> bool:
    """Detect whether the directory has Orbax's metadata and a database, or an array's folder."""
    files = source.files()
    marks = any(path == "manifest.ocdbt" or path.endswith(("/.zarray", "/zarr.json")) for path in files)
    return find_given_file(source) is None and METADATA in files and marks


def scan_orbax(source: Source) -> Manifest:
    """Return what the metadata lists; each array is one file of row-major elements, whatever its chunks are.

    Where chunks are not compressed, they are read as they are. Raises as `OrbaxSource.arrays` and `read_plain_array`.
    """
    if METADATA not in source.files():
        raise SourceError(f"{source.name} has no {METADATA} of Orbax")
    tensors: dict[str, Tensor] = {}
    for path, array in source.arrays.items() if isinstance(source, OrbaxSource) else ():
        where = Region(path, 0, compute_dense_strides(array.dtype, array.shape))
        chunk = Chunk(Box.whole(array.shape), array.dtype, where, array.name)
        tensors[array.name] = Tensor(array.name, array.dtype, array.shape, (chunk,))
    if not isinstance(source, OrbaxSource):
        tensors = _read_plain_tree(source)
    paths = dict.fromkeys(path for tensor in tensors.values() for path in tensor.files)
    side, left = list_side_files(source, set(paths))
    folders = tuple(f"{name}/" for name in tensors)
    return Manifest(
        format=FORMAT.name,
        tensors=tensors,
        files={path: CheckpointFile(path, source.files()[path].size) for path in paths},
        objects=tuple(each for each in side if not _is_own(each, folders)),
        warnings=left,
    )


def _read_plain_tree(source: Source) -> dict[str, Tensor]:
    """Read every array of a tree whose chunks are not compressed; others are read from a local directory only."""
    names, said = parse_tree(read_text(source, METADATA, RECORD_TEXT))
    if said.get("use_ocdbt", True) or said.get("use_zarr3"):
        raise UnsupportedError(f"{source.name} is an Orbax checkpoint, which is read from a local directory only")
    tensors = {name: read_plain_array(source, name) for name in names}
    for tensor in tensors.values():
        for path in tensor.files:
            check_link(source, path)
    return tensors


def _is_own(side: OpaqueObject, folders: tuple[str, ...]) -> bool:
    """Return whether a file is part of how Orbax stores arrays."""
    return side.name in _ORBAX_FILE_NAMES or side.name.startswith((*_DATABASE_PATH_PREFIXES, *folders))


FORMAT: Final = Format("orbax", "an Orbax checkpoint", detect_orbax, scan_orbax)
