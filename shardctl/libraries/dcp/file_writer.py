"""Writes `.distcp` files, one item after another, and the `.metadata` that says where each item is.

Every box of a tensor, and every object, is an item as torch.save writes it; `.metadata` is a pickle of torch's own
classes (torch `distributed/checkpoint/filesystem.py` and `metadata.py`).
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UnsupportedError
from shardctl.base.value import state_class
from shardctl.libraries.files.file_names import DCP_METADATA
from shardctl.libraries.torch_save.item_writer import encode_tensor
from shardctl.libraries.torch_save.pickle_writer import PickleCall, PickleName, PickleObject, Value, encode_pickle
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import CheckpointFile, Region, compute_dense_strides

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.base.dtype import DType

VERSION: Final = "1.0.0"
"""Of the format; torch checks nothing of it."""
_METADATA_MODULE: Final = "torch.distributed.checkpoint.metadata"
_STORAGE_INFO_CLASS: Final = PickleName("torch.distributed.checkpoint.filesystem", "_StorageInfo")


def format_file_prefix(rank: int) -> str:
    """Format what the names of a rank's files begin with."""
    return f"__{rank}_"


@state_class
class _DescribedTensor:
    """A tensor that has items."""

    dtype: DType
    shape: tuple[int, ...]
    boxes: dict[Box, None] = field(default_factory=dict)


class DcpFiles:
    """Collects items, and what the metadata says of them; `largest` bytes of tensors to a file, all in `folder`."""

    def __init__(self, largest: int, folder: str = "") -> None:
        self.files: dict[str, CheckpointFile] = {}
        self._largest = largest
        self._folder = folder
        self._described: dict[str, _DescribedTensor | None] = {}
        self._stored: dict[Value, Value] = {}
        self._rank = self._number = 0
        self._begin_file()

    def rank(self, rank: int) -> None:
        """Go on with the files of a rank."""
        if rank != self._rank:
            self._end()
            self._rank, self._number = rank, 0
            self._begin_file()

    def _begin_file(self) -> None:
        self._literals: list[tuple[int, bytes]] = []
        self._blanks: list[tuple[int, int]] = []
        self._size = self._held = 0

    def _end(self) -> None:
        """End the file; one without items is none."""
        if self._size:
            path = self._folder + self._path
            self.files[path] = CheckpointFile(path, self._size, tuple(self._literals), tuple(self._blanks))

    @property
    def _path(self) -> str:
        return f"{format_file_prefix(self._rank)}{self._number}.distcp"

    def object(self, key: str, item: bytes) -> None:
        """Add an object, as `object_item` has it."""
        self._literals.append((self._size, item))
        self._note(key, None, len(item), None)
        self._described[key] = None
        self._size += len(item)

    def scalar(self, key: str, dtype: DType, content: bytes) -> None:
        """Add a tensor of one element, whose bytes are known."""
        self.constant(key, (), dtype, content)

    def constant(self, key: str, shape: tuple[int, ...], dtype: DType, content: bytes) -> None:
        """Add a tensor whose bytes are known."""
        region = self.tensor(key, shape, dtype, Box.whole(shape))
        if region is not None:
            self._literals.insert(-1, (region.offset, content))

    def tensor(self, key: str, shape: tuple[int, ...], dtype: DType, box: Box, padding: int = 0) -> Region | None:
        """Return where a box of a tensor is to be written.

        None if an item has it already: a checkpoint has each box once.

        The last `padding` bytes of it stay zero.
        """
        known = self._described.setdefault(key, _DescribedTensor(dtype, shape))
        if known is None or known.shape != shape or known.dtype != dtype:
            raise UnsupportedError(f"{key} would be the key of two entries")
        if box in known.boxes:
            return None
        nbytes = dtype.nbytes(box.shape)
        if self._held and self._held + nbytes > self._largest:
            self._end()
            self._number += 1
            self._begin_file()
        head, tail = encode_tensor(dtype, box.shape)
        start = self._size + len(head)
        self._literals += [(self._size, head), (start + nbytes, tail)]
        if padding:
            self._blanks.append((start + nbytes - padding, padding))
        self._note(key, box.origin, len(head) + nbytes + len(tail), len(known.boxes))
        known.boxes[box] = None
        self._size = start + nbytes + len(tail)
        self._held += nbytes
        return Region(self._folder + self._path, start, compute_dense_strides(dtype, box.shape))

    def _note(self, key: str, origin: tuple[int, ...] | None, length: int, number: int | None) -> None:
        """Note where the next item is."""
        index: dict[str, Value] = {"fqn": key, "index": number}
        if origin is not None:
            index["offset"] = _build_torch_size(origin)
        place = {"relative_path": self._path, "offset": self._size, "length": length}
        self._stored[PickleObject(PickleName(_METADATA_MODULE, "MetadataIndex"), index)] = PickleObject(
            _STORAGE_INFO_CLASS, place
        )

    def finished(self, planner: Value) -> dict[str, CheckpointFile]:
        """Return all files, the metadata last; without a `StorageMeta`, which older versions of torch do not know.

        `planner` is what the planner of torch's own saves keeps: the way to each value through the dicts that it was
        in, by key.
        """
        self._end()
        state = {
            "state_dict_metadata": dict(self._build_descriptions()),
            "planner_data": planner,
            "storage_data": self._stored,
            "version": VERSION,
        }
        content = encode_pickle(PickleObject(PickleName(_METADATA_MODULE, "Metadata"), state), 4)
        path = self._folder + DCP_METADATA
        return {**self.files, path: CheckpointFile(path, len(content), ((0, content),))}

    def _build_descriptions(self) -> Iterator[tuple[str, Value]]:
        for key, known in self._described.items():
            if known is None:
                yield key, PickleObject(PickleName(_METADATA_MODULE, "BytesStorageMetadata"), {})
                continue
            chunks = [
                PickleObject(
                    PickleName(_METADATA_MODULE, "ChunkStorageMetadata"),
                    {"offsets": _build_torch_size(b.origin), "sizes": _build_torch_size(b.shape)},
                )
                for b in known.boxes
            ]
            properties = (
                PickleName("torch", known.dtype.torch),
                PickleCall(PickleName("torch.serialization", "_get_layout"), ("torch.strided",)),
                False,
                PickleCall(PickleName(_METADATA_MODULE, "_MEM_FORMAT_ENCODING"), (0,)),
                False,
            )
            described = {
                "properties": PickleObject(PickleName(_METADATA_MODULE, "TensorProperties"), properties),
                "size": _build_torch_size(known.shape),
                "chunks": chunks,
            }
            yield key, PickleObject(PickleName(_METADATA_MODULE, "TensorStorageMetadata"), described)


def _build_torch_size(extents: tuple[int, ...]) -> PickleCall:
    return PickleCall(PickleName("torch", "Size"), (extents,))
