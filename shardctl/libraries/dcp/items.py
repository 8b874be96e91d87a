"""Finds the elements in an item, which torch.save wrote, and reads the few plain values that are needed."""

from __future__ import annotations

import struct
from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from shardctl.base.dtype import BY_TORCH
from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.base.settings import as_setting
from shardctl.libraries.torch_save.tensors import as_tensor
from shardctl.libraries.torch_save.zip_file import read_torch_zip
from shardctl.libraries.torch_save.zip_signatures import LOCAL_MAGIC
from shardctl.storage import read_bytes
from shardctl.tensors.manifest import Region

if TYPE_CHECKING:
    from shardctl.base.dtype import DType
    from shardctl.base.settings import Setting
    from shardctl.libraries.dcp.metadata import StoredItem
    from shardctl.storage import Source

_MAX_ITEM_HEADER_BYTES: Final = 4 << 10
"""An item's bytes before its data; torch 2.13 has 704."""
_MAX_CACHED_OBJECT_BYTES: Final = 64 << 10
"""Bytes of an object that is remembered: a hyper-parameter takes one kilobyte, and every group has the same ones."""
_HEADER_READ_SPAN_BYTES: Final = 32 << 10
"""Bytes of a file in which heads are read together: to read so many takes as long as two reads of a few."""
_MAX_PARSED_OBJECT_BYTES: Final = 64 << 20
"""Bytes of one that is still looked into: the names of a million parameters take as much."""
NUMBERS: Final = {"F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "I32": "<i", "I16": "<h", "U8": "<B", "I8": "<b"}
"""The types whose values are read, and how `struct` calls them."""


class _ItemLayout(NamedTuple):
    """How an item that was read in full is laid out."""

    head: bytes
    """All before its data."""
    strides: tuple[int, ...]


def require_saved_item(source: Source, file: str, offset: int, length: int, where: str) -> None:
    """Raise UnsupportedError unless what lies at `offset` begins as what torch.save writes."""
    head = read_bytes(source, file, offset, min(length, len(LOCAL_MAGIC)))
    if head != LOCAL_MAGIC:
        raise UnsupportedError(
            f"{where} is not what torch.save writes: it begins with {head.hex(' ')}",
            hint="a FileSystemWriter told to write safetensors does this, and torch itself cannot read it; save "
            "with a HuggingFaceStorageWriter",
        )


class ItemReader:
    """Reads items of one source.

    The items of a model are alike. Once one was read in full, another of the same length, type and shape is laid out
    the same if the bytes before its data are the same: they hold the pickle and every header up to that of the data.

    With `later`, these bytes are compared only by `check_heads`, which reads them file by file: a save of 4,096 ranks
    has a million.
    """

    def __init__(self, source: Source, *, later: bool = False) -> None:
        self._source = source
        self._later = later
        self._unchecked: dict[str, list[tuple[int, bytes]]] = defaultdict(list)
        """By file, the offsets of items, each with what it should begin with."""
        self._known: dict[tuple[int, str, tuple[int, ...]], _ItemLayout] = {}
        """By what two items must have in common to be laid out alike: length, type and shape."""
        self._values: dict[bytes, tuple[Setting] | None] = {}

    def region(self, item: StoredItem, key: str, dtype: DType, shape: tuple[int, ...]) -> Region:
        """Return where the elements of a tensor's box are.

        Raises:
            SourceError: the item is not what torch.save writes, or holds another tensor than the metadata says.
            HostileError: it tries to run code or to exhaust the reader.
            UnsupportedError: its bytes were transformed, or written by another library.
        """
        kind = (item.length, dtype.name, shape)
        known = self._known.get(kind) if not item.transforms else None
        file, offset = item.file, item.offset
        if known is not None:
            head = known.head
            if self._later:
                self._unchecked[file].append((offset, head))
            if self._later or read_bytes(self._source, file, offset, len(head)) == head:
                return Region(file, offset + len(head), known.strides)
        where = f"{item.file}: {key!r}"
        if item.transforms:
            raise UnsupportedError(
                f"{where} was changed by {', '.join(map(ascii, item.transforms))} after it was saved",
                hint="parts of such a stream cannot be read alone; load the checkpoint and save it without extensions",
            )
        region = self._read(item, key, where, dtype, shape)
        start = region.offset - item.offset
        if 0 < start <= _MAX_ITEM_HEADER_BYTES:
            self._known[kind] = _ItemLayout(read_bytes(self._source, item.file, item.offset, start), region.strides)
        return region

    def check_heads(self) -> None:
        """Raise SourceError for an item that does not begin as was taken for granted; its place is not known then."""
        for file, heads in self._unchecked.items():
            heads.sort()
            begin = end = 0
            near: list[tuple[int, bytes]] = []
            for offset, head in heads:
                if near and offset + len(head) - begin > _HEADER_READ_SPAN_BYTES:
                    self._compare_heads(file, begin, end, near)
                    near = []
                if not near:
                    begin, end = offset, 0
                near.append((offset, head))
                end = max(end, offset + len(head))
            self._compare_heads(file, begin, end, near)
        self._unchecked.clear()

    def _compare_heads(self, file: str, begin: int, end: int, heads: list[tuple[int, bytes]]) -> None:
        """Compare heads that lie near to each other with the stretch of the file that holds all of them."""
        found = read_bytes(self._source, file, begin, end - begin)
        for offset, head in heads:
            if not found.startswith(head, offset - begin):
                raise SourceError(f"{file}: the item at byte {offset:,} is not laid out as others are")

    def _read(self, item: StoredItem, key: str, where: str, dtype: DType, shape: tuple[int, ...]) -> Region:
        require_saved_item(self._source, item.file, item.offset, item.length, where)
        saved = read_torch_zip(self._source, item.file, start=item.offset, size=item.length)
        view = as_tensor(saved.tree, where)
        if view is None:
            raise SourceError(f"{where} is not a tensor, but the metadata says it is one")
        if view.shape != shape or view.dtype != dtype:
            raise SourceError(
                f"{where} is {view.dtype} {list(view.shape)}, but the metadata says {dtype} {list(shape)}",
                hint="the metadata belongs to another save; the checkpoint was overwritten in part",
            )
        if dtype.nbytes(shape) > view.storage.nbytes:
            raise UnsupportedError(f"{where} repeats elements: its strides make {view.storage.nbytes:,} bytes more")
        return saved.region(view, key)

    def number(self, item: StoredItem, key: str, dtype: str) -> float | int | None:
        """Return the value of a tensor of one element; None if its type is not one of numbers."""
        kind = BY_TORCH.get(dtype)
        if kind is None or kind.name not in NUMBERS:
            return None
        later, self._later = self._later, False  # the bytes are needed now
        region = self.region(item, key, kind, ())
        self._later = later
        return decode_number(kind.name, read_bytes(self._source, region.file, region.offset, kind.unit_bytes))

    def value(self, item: StoredItem) -> tuple[Setting] | None:
        """Return the number, text or list of those that was saved as an object, alone in a tuple.

        None for anything else.

        Raises HostileError if it tries to run code.
        """
        if item.length > _MAX_PARSED_OBJECT_BYTES or item.transforms:
            return None
        if item.length > _MAX_CACHED_OBJECT_BYTES:
            return self._looked_into(item)
        data = read_bytes(self._source, item.file, item.offset, item.length)
        if data not in self._values:
            self._values[data] = self._looked_into(item)
        return self._values[data]

    def _looked_into(self, item: StoredItem) -> tuple[Setting] | None:
        if read_bytes(self._source, item.file, item.offset, min(item.length, len(LOCAL_MAGIC))) != LOCAL_MAGIC:
            return None
        return as_setting(read_torch_zip(self._source, item.file, start=item.offset, size=item.length).tree)


def decode_number(dtype: str, data: bytes) -> float | int:
    """Return the number that little-endian `data` is."""
    value: float | int = struct.unpack(NUMBERS[dtype], data)[0]
    return value
