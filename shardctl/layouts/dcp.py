"""What `torch.distributed.checkpoint.load` reads into any mesh: `.metadata`, and one set of `.distcp` files per rank.

Every box is an item as torch.save writes it, and `.metadata` a pickle of torch's own classes (torch
`distributed/checkpoint/filesystem.py` and `metadata.py`). Keys are those of ``{"model": ..., "optim": ...}`` with what
`get_state_dict` returns: ``model.<name>``, ``optim.state.<name>.<state>`` and ``optim.param_groups.<n>.<setting>``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.errors import UnsupportedError
from shardctl.layouts.hf import USUAL_SHARD, whole_arrays
from shardctl.layouts.pickle_writer import Made, Name, Object, Value, dump
from shardctl.layouts.ranks import Known, rank_arrays
from shardctl.layouts.torch_item import object_item, tensor_item
from shardctl.manifest import Chunk, File, Manifest, Region, dense_strides
from shardctl.training import split_state

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardctl.box import Box
    from shardctl.dtype import DType
    from shardctl.layouts.form import Form
    from shardctl.layouts.packing import Array
    from shardctl.pieces import Placed
    from shardctl.training import Training

NAME: Final = "dcp"
METADATA: Final = ".metadata"
VERSION: Final = "1.0.0"
"""Of the format; torch checks nothing of it."""
_MODEL: Final = "model"
_OPTIMIZER: Final = "optim"
_CLASSES: Final = "torch.distributed.checkpoint.metadata"
_Way = tuple[str | int, ...]


def pack(
    have: Manifest, placed: Placed | None, form: Form, dtypes: dict[str, DType], *, max_shard_size: int = USUAL_SHARD
) -> Manifest:
    """The files of every rank of a mesh, or of the only one; `max_shard_size` is of tensor bytes."""
    builder = _Builder(max_shard_size)
    if have.training is not None:
        builder.settings(have.training, form)
    if placed is None:
        builder.rank(0, whole_arrays(have, form, dtypes))
    else:
        known: Known = {}
        for rank, held in placed.ranks():
            builder.rank(rank, (array for group in rank_arrays(held, form, dtypes, known) for array in group))
    files = builder.finished()
    tensors = {
        name: replace(tensor, dtype=dtypes[name], chunks=tuple(builder.chunks.get(name, ())))
        for name, tensor in have.tensors.items()
    }
    return Manifest(NAME, tensors, files, have.objects, training=have.training)


class _Builder:
    """Collects items, and what the metadata says of them."""

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self.chunks: dict[str, list[Chunk]] = {}
        self.files: dict[str, File] = {}
        self.path = "__0_0.distcp"
        self.literals: list[tuple[int, bytes]] = []
        self.size = self.held = 0
        self.described: dict[str, tuple[Array, dict[Box, None]] | None] = {}
        self.stored: dict[Value, Value] = {}
        self.ways: dict[Value, Value] = {}

    def settings(self, training: Training, form: Form) -> None:
        """Hyper-parameters, in front of the first rank's tensors."""
        for number, group in enumerate(training.groups):
            members: list[Value] = list(dict.fromkeys(map(form.array, group.parameters)))
            for name, value in (*group.settings.items(), ("params", members)):
                way: _Way = (_OPTIMIZER, "param_groups", number, name)
                item = object_item(value)
                self.literals.append((self.size, item))
                self.note(way, None, len(item))
                self.described[_key(way)] = None
                self.size += len(item)

    def rank(self, rank: int, arrays: Iterable[Array]) -> None:
        """The boxes of one rank, in as many files as their size asks for."""
        number = 0
        if rank:
            self.begin(f"__{rank}_0.distcp")
        for array in arrays:
            if self.held and self.held + array.nbytes > self.largest:
                number += 1
                self.begin(f"__{rank}_{number}.distcp")
            self.add(array)
        self.end()

    def begin(self, path: str) -> None:
        """End the file and begin another."""
        self.end()
        self.path, self.literals, self.size, self.held = path, [], 0, 0

    def end(self) -> None:
        """The file as it is; one without items is none."""
        if self.size:
            self.files[self.path] = File(self.path, self.size, tuple(self.literals))

    def add(self, array: Array) -> None:
        """One box of an array, unless an earlier rank holds it, too: a checkpoint has each element once."""
        way = _way(array.name)
        key = _key(way)
        known = self.described.setdefault(key, (array, {}))
        if known is None or known[0].shape != array.shape:
            raise UnsupportedError(f"{key} would be the key of two entries")
        if array.box in known[1]:
            return
        head, tail = tensor_item(array.dtype, array.box.shape)
        start = self.size + len(head)
        region = Region(self.path, start, dense_strides(array.dtype, array.box.shape))
        for tensor, chunk in replace(array, name=key).chunks(region):
            self.chunks.setdefault(tensor, []).append(chunk)
        self.literals += [(self.size, head), (start + array.nbytes, tail)]
        self.note(way, array.box.origin, len(head) + array.nbytes + len(tail), len(known[1]))
        known[1][array.box] = None
        self.size = start + array.nbytes + len(tail)
        self.held += array.nbytes

    def note(self, way: _Way, origin: tuple[int, ...] | None, length: int, number: int | None = None) -> None:
        """Where the next item is."""
        key = _key(way)
        index: dict[str, Value] = {"fqn": key, "index": number}
        if origin is not None:
            index["offset"] = _size(origin)
        place = {"relative_path": self.path, "offset": self.size, "length": length}
        self.stored[Object(Name(_CLASSES, "MetadataIndex"), index)] = Object(
            Name("torch.distributed.checkpoint.filesystem", "_StorageInfo"), place
        )
        self.ways[key] = way

    def finished(self) -> dict[str, File]:
        """All files, the metadata last; without a `StorageMeta`, which older versions of torch do not know."""
        state = {
            "state_dict_metadata": dict(self._descriptions()),
            "planner_data": self.ways,
            "storage_data": self.stored,
            "version": VERSION,
        }
        content = dump(Object(Name(_CLASSES, "Metadata"), state), 4)
        return {**self.files, METADATA: File(METADATA, len(content), ((0, content),))}

    def _descriptions(self) -> Iterator[tuple[str, Value]]:
        for key, known in self.described.items():
            if known is None:
                yield key, Object(Name(_CLASSES, "BytesStorageMetadata"), {})
                continue
            array, boxes = known
            chunks = [
                Object(Name(_CLASSES, "ChunkStorageMetadata"), {"offsets": _size(b.origin), "sizes": _size(b.shape)})
                for b in boxes
            ]
            properties = (
                Name("torch", array.dtype.torch),
                Made(Name("torch.serialization", "_get_layout"), ("torch.strided",)),
                False,
                Made(Name(_CLASSES, "_MEM_FORMAT_ENCODING"), (0,)),
                False,
            )
            yield (
                key,
                Object(
                    Name(_CLASSES, "TensorStorageMetadata"),
                    {
                        "properties": Object(Name(_CLASSES, "TensorProperties"), properties),
                        "size": _size(array.shape),
                        "chunks": chunks,
                    },
                ),
            )


def _way(name: str) -> _Way:
    """Where in the nested dicts an array is."""
    state = split_state(name)
    if state is None:
        return (_MODEL, name)
    return (_OPTIMIZER, "state", state[1], *state[0].split("/"))


def _key(way: _Way) -> str:
    return ".".join(map(str, way))


def _size(extents: tuple[int, ...]) -> Made:
    return Made(Name("torch", "Size"), (extents,))
