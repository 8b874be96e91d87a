"""Reads the arrays of an Orbax checkpoint through tensorstore, each as one row-major file.

Orbax keeps arrays in zarr chunks, compressed as a rule, one file each or all in an OCDBT database (google/orbax
`checkpoint/orbax/checkpoint/_src/serialization/`); which there are, `_METADATA` says. tensorstore reads both, and needs
neither jax nor orbax.
"""

from __future__ import annotations

import importlib
from math import prod
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.dtype import BY_TORCH, DType
from shardctl.base.errors import HostileError, SourceError, UnsupportedError
from shardctl.base.extras import format_install_command
from shardctl.base.value import value_class
from shardctl.storage import FileStat
from shardctl.storage.bounded_text import CONFIG_TEXT, RECORD_TEXT, parse_json
from shardctl.storage.local import LocalSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

METADATA: Final = "_METADATA"
ARRAYS: Final = "arrays/"
"""What stands before an array's name in the path of its file."""
_CHUNK_CACHE_BYTES: Final = 128 << 20
"""Bytes of decompressed chunks that are held: neighbouring reads find theirs there."""
_TENSORSTORE_MEMORY_BYTES: Final = 64 << 20
"""Bytes that tensorstore itself takes: its code, its threads, and what they decompress into (measured: 30 to 50 MB)."""
_ARRAY_VALUE_TYPES: Final = frozenset({"jax.Array", "np.ndarray", "scalar"})
"""The kinds of leaves that are arrays; others are strings and empty containers."""


@value_class
class StoredArray:
    """One array of the tree."""

    name: str
    """The keys on the way to it, joined by dots."""
    dtype: DType
    shape: tuple[int, ...]
    store: Any
    """tensorstore's own."""


class OrbaxSource(LocalSource):
    """A directory that Orbax wrote: its files, and one more for each array."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self._tensorstore = importlib.import_module("tensorstore")
        except ImportError as error:
            raise UnsupportedError(
                f"{path} is an Orbax checkpoint, but tensorstore, which reads it, is not installed",
                hint=format_install_command("orbax"),
            ) from error
        self._arrays: dict[str, StoredArray] | None = None
        self._all: dict[str, FileStat] | None = None

    @property
    def arrays(self) -> Mapping[str, StoredArray]:
        """Every array, by the path of its file.

        Raises SourceError for metadata that is malformed, and for an array that is missing; UnsupportedError for one
        whose elements are of a type that no checkpoint of tensors has.
        """
        if self._arrays is None:
            self._arrays = {f"{ARRAYS}{array.name}": array for array in self._open()}
            chunks = (a.dtype.nbytes(a.store.chunk_layout.read_chunk.shape or ()) for a in self._arrays.values())
            self.held_bytes = (
                _TENSORSTORE_MEMORY_BYTES + _CHUNK_CACHE_BYTES + 2 * max(chunks, default=0)
            )  # one as it is stored, one decompressed
        return self._arrays

    def files(self) -> Mapping[str, FileStat]:
        """Return the files of the directory, and those of the arrays."""
        if self._all is None:
            real = super().files()
            version = real[METADATA].version
            mine = {path: FileStat(a.dtype.nbytes(a.shape), version) for path, a in self.arrays.items()}
            self._all = {**real, **mine}
        return self._all

    def stat_file(self, path: str) -> FileStat | None:
        """Return the state as of any file; an array has changed if the metadata has."""
        array = self.arrays.get(path)
        if array is None:
            return super().stat_file(path)
        now = super().stat_file(METADATA)
        return FileStat(array.dtype.nbytes(array.shape), now.version) if now is not None else None

    def read_at(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` from byte `offset` of an array's elements in row-major order, or of a file."""
        array = self.arrays.get(path)
        if array is None:
            super().read_at(path, offset, into)
            return
        size, done = array.dtype.unit_bytes, 0
        low, high = offset // size, -(-(offset + len(into)) // size)
        if high > prod(array.shape):
            raise SourceError(f"{path} ends at byte {prod(array.shape) * size}")
        skip = offset - low * size
        for index in list_run_slices(array.shape, low, high):
            data = self._read(array, index)
            taken = data[skip : skip + len(into) - done]
            into[done : done + len(taken)] = taken
            done, skip = done + len(taken), 0

    def _read(self, array: StoredArray, index: tuple[slice, ...]) -> bytes:
        try:
            values = array.store[index].read().result() if index else array.store.read().result()
        except (ValueError, OSError) as error:
            raise SourceError(f"{array.name} cannot be read: {str(error).splitlines()[0]}") from error
        found: bytes = values.tobytes()
        return found

    def _open(self) -> Iterator[StoredArray]:
        tree, ocdbt, driver = self._read_array_tree()
        context = self._tensorstore.Context({"cache_pool": {"total_bytes_limit": _CHUNK_CACHE_BYTES}})
        root = str(self.root.absolute())
        pending = []
        for name in tree:
            place = (
                {"driver": "ocdbt", "base": f"file://{root}/", "path": f"{name}/"}
                if ocdbt
                else {"driver": "file", "path": f"{root}/{name}/"}
            )
            spec = {"driver": driver, "kvstore": place, "recheck_cached_data": "open"}
            pending.append((name, self._tensorstore.open(spec, open=True, read=True, context=context)))
        for name, opening in pending:
            try:
                store = opening.result()
            except (ValueError, OSError) as error:
                raise SourceError(
                    f"{name} is in {METADATA}, but cannot be opened: {str(error).splitlines()[0]}",
                    hint="the copy may be incomplete; fetch it again",
                ) from error
            dtype = BY_TORCH.get(store.dtype.name)
            if dtype is None:
                raise UnsupportedError(f"{name} has elements of the type {store.dtype.name}, which is not known")
            yield StoredArray(name, dtype, tuple(map(int, store.shape)), store)

    def _read_array_tree(self) -> tuple[list[str], bool, str]:
        """Return the names of the arrays, whether a database holds them, and tensorstore's driver for each."""
        stat = super().files()[METADATA]
        if stat.size > RECORD_TEXT.size:
            raise SourceError(f"{METADATA} has {stat.size:,} bytes; more than {RECORD_TEXT.size:,} are not read")
        buffer = bytearray(stat.size)
        super().read_at(METADATA, 0, memoryview(buffer))
        names, said = parse_tree(bytes(buffer))
        return names, bool(said.get("use_ocdbt", True)), "zarr3" if said.get("use_zarr3") else "zarr"


def parse_tree(data: bytes) -> tuple[list[str], Mapping[str, Any]]:
    """Parse `_METADATA`: the names of the arrays, and everything that it says.

    Raises SourceError for what is malformed, HostileError for a name that leaves the directory.
    """
    try:
        said = parse_json(data, METADATA, RECORD_TEXT)
        leaves = said["tree_metadata"].values()
        names = [
            ".".join(str(part["key"]) for part in leaf["key_metadata"])
            for leaf in leaves
            if leaf["value_metadata"]["value_type"] in _ARRAY_VALUE_TYPES
        ]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"{METADATA} is not that of an Orbax checkpoint: {error!r}") from error
    for name in names:
        if "/" in name or "\0" in name or name in {"", ".", ".."}:
            raise HostileError(f"{METADATA} has an array by the name {ascii(name)[:60]}, which leaves the directory")
    return names, said


def is_orbax(folder: Path) -> bool:
    """Return whether a directory has Orbax's metadata, and a database or the folder of an array."""
    if not (folder / METADATA).is_file():
        return False
    return (folder / "manifest.ocdbt").is_file() or any(folder.glob("*/.zarray")) or any(folder.glob("*/zarr.json"))


def has_plain_arrays(folder: Path) -> bool:
    """Return whether the first array of a directory has chunks that are not compressed, which are read as they are."""
    if (folder / "manifest.ocdbt").is_file():
        return False
    first = next(folder.glob("*/.zarray"), None)
    if first is None or first.stat().st_size > CONFIG_TEXT.size:
        return False
    return b'"compressor":null' in first.read_bytes().replace(b" ", b"")


def list_run_slices(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[slice, ...]]:
    """List the boxes, in order, that elements `start` to `stop` of a row-major array fill: at most two a dim, less one.

    >>> list(list_run_slices((4, 3), 2, 9))
    [(slice(0, 1, None), slice(2, 3, None)), (slice(1, 3, None),)]
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield (slice(start, stop),) if shape else ()
        return
    row = prod(shape[1:])
    first, within = divmod(start, row)
    if within:
        end = min(stop, (first + 1) * row)
        for rest in list_run_slices(shape[1:], within, end - first * row):
            yield (slice(first, first + 1), *rest)
        start = end
    last, over = divmod(stop, row)
    if start < last * row:
        yield (slice(start // row, last),)
        start = last * row
    if start < stop:
        for rest in list_run_slices(shape[1:], 0, over):
            yield (slice(last, last + 1), *rest)
