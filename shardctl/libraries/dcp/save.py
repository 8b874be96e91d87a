"""Reads what one call of `torch.distributed.checkpoint.save` wrote: finds each tensor's boxes in the files."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_TORCH
from shardctl.base.errors import HostileError, SourceError, UnsupportedError
from shardctl.libraries.dcp.items import ItemReader, require_saved_item
from shardctl.libraries.files.choice import describe_missing
from shardctl.libraries.files.impostors import refuse_unfinished
from shardctl.libraries.files.links import check_link
from shardctl.libraries.torch_save.leftovers import UNUSED_BYTES, UNUSED_ITEMS
from shardctl.libraries.torch_save.pickle_budget import budget_of
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import CheckpointFile, Chunk, ConstantFill, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardctl.base.dtype import DType
    from shardctl.base.settings import Setting
    from shardctl.libraries.dcp.metadata import DcpMetadata, DeclaredTensor, StoredItem
    from shardctl.storage import Source

_RANK_FILE_PATTERN: Final = re.compile(r"(?:.*/)?[^/]*__([0-9]{1,9})_[0-9]{1,9}\.distcp")
_MAX_BOX_COMPARISONS: Final = 1_000_000
"""Comparisons of boxes in one checkpoint; tensors that are cut alike are looked at once, and take one for each box."""
_MAX_VISITS_PER_BOX: Final = 16
"""How often each box is looked at on the way: once for each dim that divides them, as a rule."""


class DcpSave:
    """One save, which may have a metadata file of each rank.

    Every file is there, every item inside it, and no two share a byte: else it raises SourceError or HostileError.
    """

    def __init__(self, source: Source, metadata: Sequence[DcpMetadata], items: ItemReader | None = None) -> None:
        self.source = source
        self.metadata = metadata
        self.items = items if items is not None else ItemReader(source)
        self.files: dict[str, CheckpointFile] = {}
        """The files of items, by path."""
        self.tensors = _unite_tensors(metadata)
        self._check_items()
        for each in metadata:
            budget_of(source).leftovers.note(each.path, UNUSED_ITEMS, map(ascii, each.list_unused_items()))

    def _check_items(self) -> None:
        """Check that every file is there, every item inside it, and that no two share a byte."""
        by_file: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
        archives: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for each in self.metadata:
            for key, some in each.items.items():
                for item in some.values():
                    file, offset, length = item.file, item.offset, item.length
                    by_file[file].append((offset, offset + length, key))
                    if not item.transforms:
                        archives[file].append((offset, length))
        files = self.source.files()
        gaps = sorted(path for path in by_file if path not in files)
        if gaps:
            keys = sorted({key for _, _, key in by_file[gaps[0]]})
            raise SourceError(
                f"{describe_missing(gaps)}, with parts of {len(keys)} entries such as {keys[0]!r}",
                hint="a rank's file was not copied, or its save did not finish",
            )
        for path, spans in by_file.items():
            self._check_file(path, sorted(spans))
            self.files[path] = CheckpointFile(path, files[path].size, archives=tuple(sorted(archives.get(path, ()))))

    def _check_file(self, path: str, spans: list[tuple[int, int, str]]) -> None:
        source = self.source
        refuse_unfinished(source, path)
        check_link(source, path)
        size, free, unused = source.files()[path].size, 0, 0
        for offset, end, key in spans:
            if end > size:
                raise SourceError(
                    f"{path} has {size:,} bytes, but {key!r} should reach byte {end:,}",
                    hint="the file was truncated or its copy is incomplete; fetch it again",
                )
            if offset < free:  # or a writer of safetensors, whose metadata has no places in the file
                require_saved_item(source, path, 0, size, f"{path}: {key!r}")
                raise HostileError(f"{path}: {key!r} at byte {offset:,} lies inside another entry")
            unused += offset - free
            free = end
        unused += size - free
        budget_of(source).leftovers.note(path, UNUSED_BYTES, [f"{unused:,} bytes"] if unused else [])

    def tensor(self, key: str, name: str) -> Tensor:
        """Return the tensor of a key, called `name`."""
        declared = self.tensors[key]
        dtype = BY_TORCH.get(declared.dtype)
        if dtype is None:
            raise UnsupportedError(f"{key!r} has the type torch.{declared.dtype}, which safetensors cannot hold")
        chunks = tuple(self._build_chunks(key, declared, dtype))
        if not chunks and 0 in declared.shape:
            chunks = (Chunk(Box.whole(declared.shape), dtype, ConstantFill(bytes(dtype.unit_bytes)), key),)
        return Tensor(name, dtype, declared.shape, chunks)

    def _build_chunks(self, key: str, declared: DeclaredTensor, dtype: DType) -> Iterable[Chunk]:
        if dtype.unit_elements > 1:
            raise UnsupportedError(f"{key!r} is {dtype}, of which several elements share a byte")
        for each in self.metadata:
            items, locate = each.items.get(key, {}), self.items.region
            for box in each.tensors[key].boxes if key in each.tensors else ():
                item, shape = items.get(box.origin), box.shape
                if 0 not in shape or (shape == declared.shape and item is not None):
                    item = item or self.item(each, key, box.origin)
                    yield Chunk(box, dtype, locate(item, key, dtype, shape), key)
        if not declared.boxes and 0 not in declared.shape:
            raise SourceError(f"{key!r} {list(declared.shape)} is described without a box that holds any of it")

    def item(self, metadata: DcpMetadata, key: str, origin: tuple[int, ...] | None) -> StoredItem:
        """Return where the box of a key that begins at `origin` is.

        Raises SourceError if the metadata does not say it.
        """
        item = metadata.items.get(key, {}).get(origin)
        if item is None:
            raise SourceError(f"{metadata.path} does not say where {key!r} at {list(origin or ())} is")
        return item

    def value(self, key: str) -> Setting:
        """Return a number or text that was saved under a key, as an object or as a tensor of one element."""
        for each in self.metadata:
            if key in each.tensors and each.tensors[key].shape == ():
                return self.items.number(self.item(each, key, ()), key, each.tensors[key].dtype)
            if None in each.items.get(key, {}):
                found = self.items.value(each.items[key][None])
                return found[0] if found is not None else None
        return None


def count_writers(files: Iterable[str]) -> int | None:
    """Count how many processes wrote files, by their names; None if no name says it."""
    return len({match[1] for path in files if (match := _RANK_FILE_PATTERN.fullmatch(path))}) or None


def _unite_tensors(metadata: Sequence[DcpMetadata]) -> dict[str, DeclaredTensor]:
    """Return every tensor, its boxes disjoint but for copies of one that several ranks saved each by itself."""
    found: dict[str, DeclaredTensor] = {}
    for each in metadata:
        for key, declared in each.tensors.items():
            other = found.setdefault(key, declared)
            if (other.dtype, other.shape) != (declared.dtype, declared.shape):
                raise SourceError(
                    f"{key!r} is {other.dtype} {list(other.shape)} for one rank and {declared.dtype} "
                    f"{list(declared.shape)} in {each.path}"
                )
    layouts: dict[tuple[int, ...], tuple[tuple[Box, ...], str]] = {}
    for key, declared in found.items():
        boxes = declared.boxes
        if len(metadata) > 1:
            boxes = tuple(dict.fromkeys(b for each in metadata if key in each.tensors for b in each.tensors[key].boxes))
        layouts.setdefault(tuple(map(id, boxes)), (boxes, key))  # tensors that are alike share them
    compared = 0
    for boxes, key in layouts.values():
        compared += _check_disjoint(key, boxes, _MAX_BOX_COMPARISONS - compared)
    return found


def _check_disjoint(key: str, boxes: tuple[Box, ...], most: int) -> int:
    """Compare boxes that no dim alone tells apart; returns how often.

    Raises HostileError for two that overlap, or if it would take more than `most` comparisons.
    """
    compared = 0
    groups = [[box for box in boxes if box.size]]
    looked = 0
    while groups:
        group = groups.pop()
        looked += len(group)
        if looked > _MAX_VISITS_PER_BOX * len(boxes) + most:
            raise HostileError(
                f"{key!r} has {len(boxes):,} boxes in an unusual order that would take too long to check"
            )
        parts = _divide_boxes(group)
        if len(parts) > 1:
            groups += parts
        else:
            compared += _compare_boxes(key, group, most - compared)
    return compared


def _compare_boxes(key: str, boxes: list[Box], most: int) -> int:
    """Compare boxes that begin before another ends, along the dim that tells most apart."""
    dims = range(len(boxes[0].origin)) if len(boxes) > 1 else range(0)
    dim = max(dims, key=lambda d: len({box.origin[d] for box in boxes}), default=None)
    if dim is not None:
        boxes = sorted(boxes, key=lambda box: box.origin[dim])
    compared = 0
    open_boxes: list[Box] = []
    for box in boxes:
        if dim is not None:
            open_boxes = [other for other in open_boxes if other.stop[dim] > box.origin[dim]]
        compared += len(open_boxes) + 1
        if compared > most:
            raise HostileError(
                f"{key!r} has {len(boxes):,} boxes in an unusual order that would take too long to check"
            )
        for other in open_boxes:
            common = box.intersect(other)
            if common is not None:
                raise HostileError(
                    f"{key!r}: the boxes {other} and {box} overlap in {common}",
                    hint="torch refuses to save such a checkpoint, and nothing says which of the two is right",
                )
        open_boxes.append(box)
    return compared


def _divide_boxes(boxes: list[Box]) -> list[list[Box]]:
    """Return the boxes in groups, each of which begins, along some dim, where the one before has ended.

    A grid falls apart into single boxes so, and so does one whose columns are cut in rows of their own.
    """
    groups = [boxes]
    for dim in range(len(boxes[0].origin)) if len(boxes) > 1 else ():
        groups = []
        reached = 0
        for box in sorted(boxes, key=lambda each: each.origin[dim]):
            if not groups or box.origin[dim] >= reached:
                groups.append([])
            groups[-1].append(box)
            reached = max(reached, box.origin[dim] + box.shape[dim])
        if len(groups) > 1:
            break
    return groups
