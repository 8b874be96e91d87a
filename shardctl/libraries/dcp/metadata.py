"""Reads the `.metadata` of a distributed checkpoint: the boxes of every tensor, and where each one is.

It is a bare pickle of torch's own classes (torch `distributed/checkpoint/metadata.py` and `filesystem.py`; before torch
2.3 some of them were in `distributed/_shard/sharded_tensor/metadata.py`), read here without any of them.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any, Final, NoReturn

from shardctl.base.errors import HostileError, SourceError, UnsupportedError
from shardctl.base.settings import is_text
from shardctl.base.value import value_class
from shardctl.libraries.dcp.metadata_shortcut import CHUNK, INDEX, INFO, OLMO_INFO, MetadataShortcut, is_folded
from shardctl.libraries.files.impostors import refuse_impostor
from shardctl.libraries.files.links import check_link
from shardctl.libraries.torch_save.leftovers import SECOND_PICKLE
from shardctl.libraries.torch_save.pickle_budget import budget_of
from shardctl.libraries.torch_save.pickle_machine import parse_pickle
from shardctl.libraries.torch_save.pickle_state import PickleLimits
from shardctl.libraries.torch_save.pickle_tree import CallNode, FoldedCall, GlobalNode
from shardctl.libraries.torch_save.tensors import as_sizes
from shardctl.storage import read_bytes
from shardctl.tensors.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.storage import Source

LARGEST: Final = 1 << 30
"""Bytes of a `.metadata` that are still read; 360,000 boxes take 51 MB."""
_MAX_TREE_SIZE_RATIO: Final = 24
"""Bytes of tree for a byte of pickle that are allowed in a large file; real ones need up to 16."""
_DCP_MODULE: Final = "torch.distributed.checkpoint"
_SHARDED_TENSOR_MODULE: Final = "torch.distributed._shard.sharded_tensor.metadata"
_MEGATRON_STRATEGY_MODULE: Final = "megatron.core.dist_checkpointing.strategies.torch"
_METADATA_CLASSES: Final = (f"{_DCP_MODULE}.metadata.Metadata", f"{_MEGATRON_STRATEGY_MODULE}.MCoreMetadata")
"""The second is a kind of the first, with `mcore_data` (Megatron-LM core 0.15)."""
_TENSOR_METADATA_CLASS: Final = f"{_DCP_MODULE}.metadata.TensorStorageMetadata"
_BYTES_METADATA_CLASS: Final = f"{_DCP_MODULE}.metadata.BytesStorageMetadata"
_TENSOR_PROPERTIES_CLASSES: Final = (
    f"{_DCP_MODULE}.metadata.TensorProperties",
    f"{_SHARDED_TENSOR_MODULE}.TensorProperties",
)
_ALLOWED_PICKLE_NAMES: Final = frozenset(
    {
        *(
            *_METADATA_CLASSES,
            _TENSOR_METADATA_CLASS,
            _BYTES_METADATA_CLASS,
            str(INDEX),
            str(INFO),
            str(OLMO_INFO),
            *_TENSOR_PROPERTIES_CLASSES,
            str(CHUNK),
        ),
        f"{_DCP_MODULE}.metadata.StorageMeta",
        *(
            f"{module}.{name}"
            for module in (f"{_DCP_MODULE}.metadata", _SHARDED_TENSOR_MODULE)
            for name in ("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING")
        ),
        *("torch.Size", "torch.serialization._get_layout", "collections.OrderedDict"),
        *(
            f"pathlib{sub}.{kind}Path"
            for sub in ("", "._local")
            for kind in ("Posix", "Windows", "PurePosix", "PureWindows")
        ),
        *(f"{_DCP_MODULE}.planner.{name}" for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
        *(f"{_MEGATRON_STRATEGY_MODULE}.MCoreSavePlan", f"{_DCP_MODULE}.planner.BytesIOWriteData"),
    }
)
"""Every name that a `.metadata` needs, and no other; types (`torch.bfloat16`) apart.

Megatron-LM keeps the plans of all ranks in its own, which nobody needs for reading.
"""
_LEGACY_CHECKPOINT_MODULE: Final = "torch.distributed._shard.checkpoint"
"""Where the classes were in torch 1.12 and 1.13, whose tree is another one."""
_FLATTENED_SHAPE_KEY: Final = "nd_reformulated_orig_global_shape"
_BYTE_OFFSET_LIMIT: Final = 1 << 63
_MAX_HASH_COLLISIONS: Final = 16
"""Different places whose hash is the same by chance, of 64 bits: in a file of a million there is none."""


@value_class
class StoredItem:
    """A stretch of a file that holds one box of a tensor, or one object, as torch.save wrote it."""

    file: str
    """Path in the source."""
    offset: int
    """Of its first byte."""
    length: int
    """Bytes."""
    transforms: tuple[str, ...] = ()
    """What was done to the bytes after torch.save, such as compression."""

    @property
    def end(self) -> int:
        """One past its last byte."""
        return self.offset + self.length


@value_class
class DeclaredTensor:
    """A global tensor, as the metadata describes it."""

    dtype: str
    """The attribute of the torch module."""
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


@value_class
class DcpMetadata:
    """What one `.metadata` says."""

    path: str
    version: str
    """Of the format, such as ``1.0.0``; empty before torch 2.5."""
    tensors: dict[str, DeclaredTensor]
    """By key, in the file's order."""
    objects: tuple[str, ...]
    """Keys of what is no tensor."""
    places: dict[str, tuple[str | int, ...]]
    """By key, the way to it through the dicts and lists that were saved, where the writer says one that fits."""
    items: dict[str, dict[tuple[int, ...] | None, StoredItem]]
    """By key, then by the first index of the box; None for what is no tensor."""
    flattened: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By key, the shape of a tensor whose boxes are runs of flattened parts of it, as Megatron-LM saves some."""

    def list_unused_items(self) -> Iterator[str]:
        """List the keys of items that are neither a box of a tensor nor an object."""
        alike: dict[tuple[int, ...], frozenset[tuple[int, ...] | None]] = {}
        used: dict[str, frozenset[tuple[int, ...] | None]] = {key: frozenset({None}) for key in self.objects}
        for key, tensor in self.tensors.items():
            boxes = tuple(map(id, tensor.boxes))  # layers share them
            if boxes not in alike:
                alike[boxes] = frozenset(box.origin for box in tensor.boxes)
            used[key] = alike[boxes]
        unknown = frozenset[tuple[int, ...] | None]()
        for key, found in self.items.items():
            expected = used.get(key, unknown)
            if not found.keys() <= expected:
                yield from [key for origin in found if origin not in expected]


def read_metadata(source: Source, path: str) -> DcpMetadata:
    """Read a `.metadata` file.

    Raises:
        SourceError: it is damaged, or not what its name says.
        HostileError: it tries to run code, to leave its directory or to exhaust the reader.
        UnsupportedError: it was written by torch 1.x, or by a storage or planner of somebody's own.
    """
    check_link(source, path)
    size = source.files()[path].size
    if size > LARGEST:
        raise HostileError(f"{path} has {size:,} bytes; more than {LARGEST:,} are not read")
    head = read_bytes(source, path, 0, min(size, 1))
    if head != b"\x80":
        refuse_impostor(source, path, "the metadata of a distributed checkpoint")
    usual = PickleLimits()
    limits = PickleLimits(
        opcodes=max(usual.opcodes, size),
        memory=max(usual.memory, _MAX_TREE_SIZE_RATIO * size),
        memo=max(usual.memo, size),
    )
    pickle = parse_pickle(read_bytes(source, path), path, limits=limits, shortcut=MetadataShortcut())
    _check_names(path, pickle.globals)
    more = size - pickle.end
    budget_of(source).leftovers.note(path, SECOND_PICKLE, [f"{more:,} bytes"] if more else [])
    folder = path.rpartition("/")[0]
    return _MetadataReader(path, f"{folder}/" if folder else "").metadata(pickle.value)


def _check_names(path: str, names: tuple[GlobalNode, ...]) -> None:
    for name in names:
        if name.module.startswith(_LEGACY_CHECKPOINT_MODULE):
            raise UnsupportedError(
                f"{path} was written by torch 1.12 or 1.13, whose distributed checkpoints are of another kind",
                hint="load it with that version of torch and save it again with torch 2",
            )
        if str(name) not in _ALLOWED_PICKLE_NAMES and not _is_dtype(name):
            raise UnsupportedError(
                f"{path} mentions {name}, which the metadata of a distributed checkpoint does not need",
                hint="a custom storage or planner wrote it; save the checkpoint with torch's own",
            )


def _is_dtype(name: GlobalNode) -> bool:
    """Return whether it is a name in torch itself; which of them are types is for the reader of tensors to say."""
    return name.module == "torch" and "." not in name.name


class _MetadataReader:
    """Turns the tree of one file into what it means."""

    def __init__(self, path: str, folder: str) -> None:
        self.path = path
        self.folder = folder
        self.files: dict[str, str] = {}
        """Their paths, by the names that items give."""
        self.hashes: dict[int, tuple[object, ...]] = {}
        """Of places that were met, the first with each hash."""
        self.clashes = 0
        self.boxes: dict[tuple[tuple[int, ...], ...], Box] = {}
        """By origin, extents and the shape of the tensor, the boxes that were admitted: layers share theirs."""
        self.origins: set[tuple[int, ...]] = set()
        """Of items, those that were admitted."""

    def raise_malformed(self, what: str) -> NoReturn:
        raise SourceError(f"{self.path} is malformed: {what}")

    def metadata(self, node: object) -> DcpMetadata:
        state = self.read_fields(node, "the metadata of a checkpoint", *_METADATA_CLASSES)
        described, stored = state.get("state_dict_metadata"), state.get("storage_data")
        if not isinstance(described, dict):
            self.raise_malformed("it has no table of tensors")
        if not isinstance(stored, dict):
            raise UnsupportedError(f"{self.path} does not say where its tensors are; a storage of its own wrote it")
        tensors, objects = {}, []
        for key, value in described.items():
            if not is_text(key) or not key:
                self.raise_malformed(f"a tensor has the name {ascii(key)[:100]}")
            if _is_call_of(value, _BYTES_METADATA_CLASS):
                objects.append(key)
            else:
                tensors[key] = self.tensor(key, value)
        version = state.get("version")
        return DcpMetadata(
            path=self.path,
            version=version[:20] if isinstance(version, str) else "",
            tensors=tensors,
            objects=tuple(objects),
            places=self.places(state.get("planner_data")),
            items=self.items(stored),
            flattened=self.read_flattened_keys(state.get("mcore_data")),
        )

    def check_hash_collisions(self, place: tuple[object, ...]) -> None:
        """Raise HostileError where many places have one hash, with which a table of them takes quadratic time.

        The hash of numbers is no secret, so that a writer can choose them.
        """
        if self.hashes.setdefault(hash(place), place) != place:
            self.clashes += 1
            if self.clashes > _MAX_HASH_COLLISIONS:
                raise HostileError(f"{self.path} has places that were chosen so that a table of them takes very long")

    def read_fields(self, node: object, what: str, *kinds: str) -> dict[Any, Any]:
        """Return the attributes of an object of a class of torch that is one of `kinds`."""
        if not isinstance(node, CallNode) or str(node.function) not in kinds or not isinstance(node.state, dict):
            self.raise_malformed(f"it holds something else in place of {what}")
        return node.state

    def tensor(self, key: str, node: object) -> DeclaredTensor:
        state = self.read_fields(node, f"a description of {key!r}", _TENSOR_METADATA_CLASS)
        shape, chunks = self.size(state.get("size"), key), state.get("chunks")
        if not isinstance(chunks, list):
            self.raise_malformed(f"tensor {key!r} has no list of boxes")
        boxes, known = [], self.boxes
        for chunk in chunks:
            if is_folded(chunk, CHUNK):
                origin, extents = chunk.values
            else:
                attributes = self.read_fields(chunk, f"a box of {key!r}", str(CHUNK))
                origin, extents = self.size(attributes.get("offsets"), key), self.size(attributes.get("sizes"), key)
            boxes.append(known.get((origin, extents, shape)) or self.box(key, origin, extents, shape))
        return DeclaredTensor(self.dtype(state.get("properties"), key), shape, tuple(boxes))

    def box(self, key: str, origin: tuple[int, ...], extents: tuple[int, ...], shape: tuple[int, ...]) -> Box:
        """Return a box of a tensor; raises SourceError for one that is not inside the tensor."""
        if len(origin) != len(extents) or len(origin) != len(shape):
            self.raise_malformed(f"tensor {key!r} of {len(shape)} dims has a box of {len(extents)}")
        self.check_hash_collisions((origin, extents, shape))
        box = Box(origin, extents)
        if not Box.whole(shape).contains(box):
            self.raise_malformed(f"tensor {key!r}: the box {box} is not inside the shape {list(shape)}")
        self.boxes[origin, extents, shape] = box
        return box

    def dtype(self, node: object, key: str) -> str:
        """Return the type, which alone of the properties means anything."""
        state = node.state if isinstance(node, CallNode) and str(node.function) in _TENSOR_PROPERTIES_CLASSES else None
        if isinstance(state, dict):  # before torch 2.0 there was no __getstate__
            state = (state.get("dtype"),)
        if not isinstance(state, tuple) or not state or not isinstance(state[0], GlobalNode):
            self.raise_malformed(f"tensor {key!r} has no type")
        return state[0].name

    def size(self, node: object, key: str) -> tuple[int, ...]:
        """Return the numbers of a `torch.Size`, or of a tuple or list in its place."""
        found = as_sizes(node)
        if found is None:
            self.raise_malformed(f"tensor {key!r} has something else in place of sizes")
        return found

    def places(self, node: object) -> dict[str, tuple[str | int, ...]]:
        if not isinstance(node, dict):
            return {}
        return {
            key: value
            for key, value in node.items()
            if isinstance(value, tuple)
            and all(isinstance(part, str | int) for part in value)
            and ".".join(map(str, value)) == key
        }

    def read_flattened_keys(self, node: object) -> dict[str, tuple[int, ...]]:
        """Return what Megatron-LM core 0.12 to 0.15 says beside torch's own fields (`strategies/torch.py`)."""
        if not isinstance(node, dict):
            return {}
        said = ((key, value.get(_FLATTENED_SHAPE_KEY)) for key, value in node.items() if isinstance(value, dict))
        return {key: self.size(value, str(key)) for key, value in said if isinstance(key, str) and value is not None}

    def items(self, stored: dict[Any, Any]) -> dict[str, dict[tuple[int, ...] | None, StoredItem]]:
        found: dict[str, dict[tuple[int, ...] | None, StoredItem]] = {}
        files = self.files
        for index, info in stored.items():
            if type(index) is FoldedCall and index.function is INDEX:  # as `is_folded`, without a call for each
                key, origin = index.values
            else:
                state = self.read_fields(index, "the place of an item", str(INDEX))
                key, offset = state.get("fqn"), state.get("offset")
                if not isinstance(key, str):
                    self.raise_malformed("an item has no name")
                origin = None if offset is None else self.size(offset, key)
            if origin is not None and origin not in self.origins:
                self.check_hash_collisions(origin)
                self.origins.add(origin)
            item = None
            if type(info) is FoldedCall and info.function is INFO:
                file, begin, length = info.values
                if file in files and 0 <= begin < _BYTE_OFFSET_LIMIT and 0 <= length < _BYTE_OFFSET_LIMIT:  # nearly all
                    item = StoredItem(files[file], begin, length)
            item = item or self.item(key, info)
            of_key = found.get(key)
            if of_key is None:
                of_key = found[key] = {}
            if of_key.setdefault(origin, item) is not item:
                self.raise_malformed(f"it says twice where {key!r} at {origin} is")
        return found

    def item(self, key: str, node: object) -> StoredItem:
        if type(node) is FoldedCall and node.function is INFO:
            file, offset, length = node.values
            transforms: object = ()
        else:
            state = self.read_fields(node, f"where {key!r} is", str(INFO), str(OLMO_INFO))
            file, offset, length = state.get("relative_path"), state.get("offset"), state.get("length")
            transforms = state.get("transform_descriptors") or ()
        known = self.files.get(file) if type(file) is str else None
        if known is None:
            known = self.files[file] = self.file(key, file)
        if (
            type(offset) is not int
            or type(length) is not int
            or not (0 <= offset < _BYTE_OFFSET_LIMIT and 0 <= length < _BYTE_OFFSET_LIMIT)
        ):
            self.raise_malformed(f"{key!r} is at byte {ascii(offset)[:40]}, {ascii(length)[:40]} bytes long")
        if transforms == ():  # nearly all
            return StoredItem(known, offset, length)
        if not isinstance(transforms, tuple | list) or not all(isinstance(t, str) for t in transforms):
            self.raise_malformed(f"{key!r} was changed in ways that are not named")
        return StoredItem(known, offset, length, tuple(transforms))

    def file(self, key: str, file: object) -> str:
        """Return the path of a file in the source; raises HostileError for what is no name of a file beside it."""
        if not is_text(file):
            self.raise_malformed(f"{key!r} is in a file without a name")
        if not file or file in {".", ".."} or any(c in file for c in "/\\\0:"):
            raise HostileError(
                f"{self.path}: {key!r} is in {ascii(file)[:100]}, which is not the name of a file beside it",
                hint="torch never writes such a name; do not load this checkpoint",
            )
        return self.folder + file


def _is_call_of(node: object, kind: str) -> bool:
    return isinstance(node, CallNode) and str(node.function) == kind
