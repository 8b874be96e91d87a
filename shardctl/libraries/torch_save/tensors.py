"""Finds the tensors among the nodes of a torch pickle, and where their elements are in their storages.

Only the exact names that tensors need have a meaning here (torch `_utils.py`, `_tensor.py` and `serialization.py`);
every other node is opaque.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final, NoReturn

from shardctl.base.dtype import BY_NAME, BY_TORCH, STORAGES, DType
from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.base.value import value_class
from shardctl.libraries.torch_save.pickle_tree import CallNode, GlobalNode, PersistentNode, as_mapping
from shardctl.tensors.manifest import Region, compute_dense_strides

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_STORAGE_DTYPES: Final = {storage: name for name, storage in STORAGES.items()}
_OTHER_STORAGES: Final = {
    "ComplexDoubleStorage": 16,
    "QInt32Storage": 4,
    "QInt8Storage": 1,
    "QUInt2x4Storage": 1,
    "QUInt4x2Storage": 1,
    "QUInt8Storage": 1,
    "UntypedStorage": 1,
    "_UntypedStorage": 1,
}
"""Element sizes, in bytes, of the storages that say nothing of a dtype, or of one that safetensors lacks."""
_REBUILD_FUNCTION_MODULES: Final = frozenset({"torch._utils", "torch._tensor"})
_STORAGE_MODULES: Final = frozenset({"torch", "torch.cuda", "torch.storage"})
_PLAIN_TENSOR_CLASSES: Final = frozenset(
    {
        "torch.Tensor",
        "torch._tensor.Tensor",
        "torch.nn.parameter.Buffer",
        "torch.nn.parameter.Parameter",
        "torch.nn.parameter.UninitializedParameter",
    }
)
"""Classes whose elements mean what their bytes say."""
_UNSUPPORTED_REBUILD_FUNCTIONS: Final = {
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "lives on a device whose storage is not in the file",
    "torch._utils._rebuild_device_tensor_from_numpy": "lives on a device whose storage is not in the file",
    "torch._utils._rebuild_meta_tensor_no_storage": "is on the meta device, so the file has no data of it",
    "torch._utils._rebuild_nested_tensor": "is a nested tensor",
    "torch._utils._rebuild_qtensor": "is a quantized tensor of torch.quantization",
    "torch._utils._rebuild_sparse_csr_tensor": "is sparse",
    "torch._utils._rebuild_sparse_tensor": "is sparse",
    "torch._utils._rebuild_wrapper_subclass": "is a tensor subclass without a storage of its own",
    "torch.distributed._shard.sharded_tensor.api.ShardedTensor": "is one rank's part of a ShardedTensor",
    "torch.distributed._tensor.api.DTensor": "is one rank's part of a DTensor",
    "torch.distributed.tensor.DTensor": "is one rank's part of a DTensor",
    "torch.distributed.tensor._api.DTensor": "is one rank's part of a DTensor",
}
"""Tensors that would be lost if they were taken for something opaque."""
_TENSOR_CLASS_SUFFIXES: Final = ("Tensor", "Parameter", "Buffer")
"""How the names of torch's classes of tensors end."""
_SET_BYTES: Final = frozenset({"data", "imag", "real"})
"""Attributes whose setting gives a tensor other elements."""
_ID_PARTS: Final = 6
_MAX_REBUILD_ARGUMENTS: Final = 16
"""Arguments of a function that makes a tensor; `_rebuild_wrapper_subclass` has most."""
_MAX_STORAGE_KEY_CHARACTERS: Final = 1_000
"""Characters of a storage's key or location; real ones have ten."""
_MAX_WRAPPING_DEPTH: Final = 8
"""Calls around a tensor, such as a Parameter of a subclass; real files have two."""
_MAX_TENSOR_NDIM: Final = 64
"""Torch and NumPy have no more."""
_INT64_LIMIT: Final = 1 << 63
"""No extent, stride, offset or size is this large."""


@value_class
class TorchStorage:
    """A reference to a flat run of bytes elsewhere in the file."""

    key: str
    """What the container calls it."""
    dtype: DType | None
    """The type of its elements; None if it does not say, or has one that safetensors lacks."""
    itemsize: int
    """Bytes of an element."""
    numel: int
    """Number of elements of the whole storage."""
    begin: int = 0
    """First byte of the part that is meant: old legacy files have storages that are views of others."""
    end: int = 0
    """One past its last byte."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole storage."""
        return self.numel * self.itemsize


@value_class
class StorageView:
    """A strided tensor over a storage."""

    storage: TorchStorage
    dtype: DType
    shape: tuple[int, ...]
    """In elements."""
    offset: int
    """Bytes from the start of the whole storage to the first element."""
    strides: tuple[int, ...]
    """Bytes from unit to unit along each dim; those of dims that have fewer than two units are the dense ones."""
    subclass: str = ""
    """The tensor's class, if its elements may mean something else than they say."""


@value_class
class SavedFile:
    """One file that torch.save wrote, read but for its tensors."""

    path: str
    tree: Any
    """What was saved (see `pickle_tree`)."""
    extents: Mapping[str, tuple[int, int]]
    """Absolute byte offset in the file and bytes of each storage, by key."""

    def region(self, view: StorageView, name: str) -> Region:
        """Return where a view's elements are in the file.

        Raises:
            SourceError: the file lacks the storage, or has one of another size than the pickle says. (With
                `mmap=True` torch would return the bytes that follow it as weights.)
        """
        extent = self.extents.get(view.storage.key)
        where = f"{self.path}: tensor {name!r}"
        if extent is None:
            raise SourceError(f"{where} is in storage {view.storage.key!r}, which the file does not have")
        start, nbytes = extent
        if nbytes != view.storage.nbytes:
            raise SourceError(f"{where} is in a storage of {view.storage.nbytes:,} bytes, but the file has {nbytes:,}")
        return Region(self.path, start + view.offset, view.strides)


def parse_storage(node: PersistentNode, where: str) -> TorchStorage:
    """Parse the storage that a persistent id names: `("storage", type, key, location, numel[, view])`."""
    match node.id if isinstance(node.id, tuple) and len(node.id) <= _ID_PARTS else None:
        case ("storage", GlobalNode() as kind, str() as key, _, int() as numel, *rest) if 0 <= numel < _INT64_LIMIT:
            view = rest[0] if rest else None
        case _:
            raise SourceError(f"{where} refers to something that is not a storage")
    dtype = BY_NAME.get(_STORAGE_DTYPES.get(kind.name, ""))
    itemsize = dtype.unit_bytes if dtype else _OTHER_STORAGES.get(kind.name)
    if itemsize is None or kind.module not in _STORAGE_MODULES:
        raise UnsupportedError(f"{where} is in a {kind}, a type of storage that shardctl does not know")
    begin, end = 0, numel * itemsize
    if view is not None:  # (key, first element, number of elements)
        match view:
            case (str(), int() as first, int() as count) if 0 <= first < _INT64_LIMIT and 0 <= count < _INT64_LIMIT:
                begin = first * itemsize
                end = min(begin + count * itemsize, end)
            case _:
                raise SourceError(f"{where} has a malformed view of a storage")
    return TorchStorage(key, dtype, itemsize, numel, begin, end)


def as_tensor(node: object, where: str) -> StorageView | None:
    """Return the tensor that a node stands for; None if it is something else. `where` begins messages.

    Raises:
        SourceError: a malformed tensor, or one that does not lie in its storage.
        UnsupportedError: a tensor whose elements are not plainly in a storage, or of a type that safetensors lacks.
    """
    subclass = ""
    for depth in range(_MAX_WRAPPING_DEPTH):
        if not isinstance(node, CallNode) or not _makes_tensor(node.function):
            if depth:
                raise UnsupportedError(f"{where} wraps something that shardctl does not know as a tensor")
            return None
        function, args = str(node.function), node.args
        if function in _UNSUPPORTED_REBUILD_FUNCTIONS:
            raise UnsupportedError(
                f"{where} {_UNSUPPORTED_REBUILD_FUNCTIONS[function]}", hint="save its plain, full tensor instead"
            )
        _check_unchanged(node, where)
        match function, args:
            case (
                ("torch._utils._rebuild_tensor_v2" | "torch._utils._rebuild_tensor"),
                (PersistentNode(), _, _, _, *rest),
            ):
                source = parse_storage(args[0], where)
                return _build_view(source, source.dtype, (*args[1:4], rest[2:]), where, subclass)
            case "torch._utils._rebuild_tensor_v3", (PersistentNode(), _, _, _, _, _, GlobalNode() as kind, *rest):
                return _build_view(
                    parse_storage(args[0], where), _parse_dtype(kind, where), (*args[1:4], rest), where, subclass
                )
            case (("torch._utils._rebuild_parameter" | "torch._utils._rebuild_parameter_with_state"), (inner, *rest)):
                _check_state(rest[2:], where)
                node = inner
            case (
                ("torch._tensor._rebuild_from_type_v2" | "torch._tensor._rebuild_from_type"),
                (
                    GlobalNode() as inner_function,
                    GlobalNode() as kind,
                    tuple() as inner_args,
                    *rest,
                ),
            ):
                if function.endswith("_v2") and str(kind) in _PLAIN_TENSOR_CLASSES:
                    _check_state(rest, where)
                subclass = subclass if str(kind) in _PLAIN_TENSOR_CLASSES else str(kind)
                node = CallNode(inner_function, inner_args)
            case _:
                raise UnsupportedError(
                    f"{where} is made by {function} in a way that shardctl does not know",
                    hint="load it with a version of torch that reads it, and save it again",
                )
    raise SourceError(f"{where} is wrapped more than {_MAX_WRAPPING_DEPTH} times")


def check_storages(persistents: Iterable[PersistentNode], path: str) -> None:
    """Raise SourceError if two mentions of a storage differ: torch believes the first of them, for all.

    Storages without bytes are made anew at each mention, so their types may differ. A view of a storage, as legacy
    files have, has a key of its own.
    """
    known: dict[str, tuple[Any, ...]] = {}
    for node in persistents:
        match node.id if isinstance(node.id, tuple) and len(node.id) <= _ID_PARTS else None:
            case ("storage", GlobalNode() as kind, str() as key, str() as location, int() as numel):
                views: tuple[Any, ...] = ()
            case ("storage", GlobalNode() as kind, str() as key, str() as location, int() as numel, None):
                views = ()
            case (
                "storage",
                GlobalNode() as kind,
                str() as key,
                str() as location,
                int() as numel,
                (str(), int(), int()) as views,
            ):
                pass
            case _:
                continue  # not a storage, or one that no tensor can have
        if (
            len(key) > _MAX_STORAGE_KEY_CHARACTERS
            or len(location) > _MAX_STORAGE_KEY_CHARACTERS
            or (views and len(views[0]) > _MAX_STORAGE_KEY_CHARACTERS)
        ):
            raise SourceError(
                f"{path} has a storage whose key or location has more than {_MAX_STORAGE_KEY_CHARACTERS:,} characters"
            )
        meant = ("ByteStorage" if "Untyped" in kind.name else kind.name, numel, location)
        _check_mention(known, key, meant if numel else ("", 0, location), path)
        if views:
            _check_mention(known, views[0], (*meant, key, *views[1:]), path)


def _check_mention(known: dict[str, tuple[Any, ...]], key: str, meant: tuple[Any, ...], path: str) -> None:
    if known.setdefault(key, meant) != meant:
        raise SourceError(
            f"{path} mentions the storage {key!r} with different types, sizes or places",
            hint="torch.save never writes this, and torch.load would take the first mention for all",
        )


def _makes_tensor(function: object) -> bool:
    """Return whether a call of this makes a tensor in torch, be it one that is read here or not."""
    if not isinstance(function, GlobalNode) or not function.module.startswith("torch"):
        return False
    if function.module in _REBUILD_FUNCTION_MODULES:
        return function.name.startswith("_rebuild_")
    return function.name.endswith(_TENSOR_CLASS_SUFFIXES) or str(function) in _UNSUPPORTED_REBUILD_FUNCTIONS


def _check_unchanged(node: CallNode, where: str) -> None:
    """Raise SourceError if something is set on a tensor after it is made: torch would give it other elements."""
    if node.state is not None or node.items is not None or node.elements is not None or node.kwargs:
        raise SourceError(
            f"{where} has state, items or keywords set on it, by which torch would take other elements for it",
            hint="torch.save never writes this; do not load this file with anything that unpickles",
        )
    if len(node.args) > _MAX_REBUILD_ARGUMENTS:
        raise SourceError(f"{where} is made of {len(node.args):,} arguments")


def _check_state(rest: Sequence[Any], where: str) -> None:
    """Raise SourceError if the attributes of a tensor that are set on it hold its elements."""
    state = rest[0] if rest else None
    parts = state if isinstance(state, tuple) and len(state) <= 2 else (state,)  # noqa: PLR2004 - dict and slots
    for part in parts:
        attributes = as_mapping(part) if part is not None else {}
        if attributes is None or not _SET_BYTES.isdisjoint(attributes):
            raise SourceError(
                f"{where} has a state that gives it other elements", hint="torch.save never writes such a state"
            )


def _parse_dtype(kind: GlobalNode, where: str) -> DType:
    dtype = BY_TORCH.get(kind.name) if kind.module == "torch" else None
    if dtype is None:
        raise UnsupportedError(f"{where} has the type {kind}, which safetensors cannot hold")
    return dtype


def _build_view(
    source: TorchStorage, dtype: DType | None, args: Sequence[Any], where: str, subclass: str
) -> StorageView:
    first, size, stride, metadata = args
    if dtype is None:
        raise UnsupportedError(f"{where} has elements of a type that safetensors cannot hold")
    if metadata and as_mapping(metadata[0]) != {} and metadata[0] is not None:
        raise UnsupportedError(
            f"{where} is lazily conjugated or negated, so its bytes are not its values",
            hint="save x.resolve_conj().resolve_neg() instead",
        )
    extents, steps = _parse_sizes(size, where), _parse_sizes(stride, where)
    if type(first) is not int or not 0 <= first < _INT64_LIMIT or len(extents) != len(steps):
        _raise_malformed(where)
    unit = dtype.unit_bytes
    offset = source.begin + first * unit
    reach = offset + unit + sum((extent - 1) * step * unit for extent, step in zip(extents, steps, strict=True))
    if prod(extents) == 0:
        offset = source.begin
    elif reach > source.end:
        raise SourceError(
            f"{where} reaches byte {reach - source.begin:,} of a storage of {source.end - source.begin:,} bytes"
        )
    shape = extents
    if dtype.unit_elements > 1:  # torch counts units, which it calls elements
        if not shape:
            raise UnsupportedError(f"{where} has no dims but holds {dtype.unit_elements} elements of {dtype}")
        shape = (*shape[:-1], shape[-1] * dtype.unit_elements)
    strides = tuple(
        step * unit if extent > 1 else dense
        for extent, step, dense in zip(extents, steps, compute_dense_strides(dtype, shape), strict=True)
    )
    return StorageView(source, dtype, shape, offset, strides, subclass)


def as_sizes(node: object) -> tuple[int, ...] | None:
    """Return the extents, strides or offsets in a tuple, a list or a `torch.Size` of them; None for anything else."""
    if isinstance(node, CallNode) and str(node.function) == "torch.Size" and len(node.args) == 1:
        if node.state is not None or node.items is not None or node.elements is not None or node.kwargs:
            return None
        node = node.args[0]
    if not isinstance(node, tuple | list) or len(node) > _MAX_TENSOR_NDIM:
        return None
    return tuple(node) if all(type(n) is int and 0 <= n < _INT64_LIMIT for n in node) else None


def _parse_sizes(node: object, where: str) -> tuple[int, ...]:
    found = as_sizes(node)
    if found is None:
        _raise_malformed(where)
    return found


def _raise_malformed(where: str) -> NoReturn:
    raise SourceError(f"{where} has an offset, shape or strides that are negative or malformed")
