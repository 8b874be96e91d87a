"""Reads plain values out of the trees of DeepSpeed's pickles: numbers, shapes, settings, flat arrays."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import SourceError
from shardctl.base.settings import is_text
from shardctl.base.value import value_class
from shardctl.libraries.torch_save.pickle_tree import CallNode, GlobalNode, as_mapping
from shardctl.libraries.torch_save.tensors import as_sizes, as_tensor

if TYPE_CHECKING:
    from shardctl.base.dtype import DType
    from shardctl.libraries.torch_save.tensors import SavedFile, StorageView

_INTEGER_LIMIT: Final = 1 << 63
_MAX_FLOAT_MAGNITUDE: Final = 3e38
"""Nothing that is counted or averaged comes near."""


@value_class
class FileArray:
    """A tensor in a file."""

    file: str
    offset: int
    """Bytes from the start of the file to its first element."""
    strides: tuple[int, ...]
    """Bytes."""
    dtype: DType
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.shape)


def locate_array(saved: SavedFile, view: StorageView, name: str) -> FileArray:
    """Locate where a tensor of a file is; raises SourceError if it is not inside its storage."""
    region = saved.region(view, name)
    return FileArray(region.file, region.offset, region.strides, view.dtype, view.shape)


def as_array(saved: SavedFile, node: object, name: str) -> FileArray | None:
    """Return the tensor that a node is; None if it is something else."""
    view = as_tensor(node, f"{saved.path}: {name!r}")
    return locate_array(saved, view, name) if view is not None else None


def parse_flat_array(saved: SavedFile, node: object, name: str) -> FileArray:
    """Parse a flat array without gaps; raises SourceError for anything else."""
    found = as_array(saved, node, name)
    if found is None or len(found.shape) != 1 or (found.size > 1 and found.strides != (found.dtype.unit_bytes,)):
        raise SourceError(f"{saved.path} is malformed: {name} is not a flat tensor")
    return found


def as_dict(node: object) -> dict[Any, Any]:
    """Return the items of a mapping; none for anything else."""
    return as_mapping(node) or {}


def as_list(node: object) -> list[Any]:
    """Return the parts of a list or tuple; none for anything else."""
    return list(node) if isinstance(node, list | tuple) else []


def as_integer(node: object) -> int | None:
    """Return a whole number, or that of a pickled enum (`ZeroStageEnum(2)`)."""
    if isinstance(node, CallNode) and isinstance(node.function, GlobalNode) and len(node.args) == 1:
        node = node.args[0]
    return node if type(node) is int and 0 <= node < _INTEGER_LIMIT else None


def as_number(node: object) -> float | None:
    """Return a number that a float of 32 bits can be near; None for anything else."""
    if isinstance(node, bool) or not isinstance(node, int | float) or not abs(node) <= _MAX_FLOAT_MAGNITUDE:
        return None
    return float(node)


def parse_shape(node: object, where: str) -> tuple[int, ...]:
    """Parse the numbers of a `torch.Size`, or of a tuple or list in its place; raises SourceError for anything else."""
    found = as_sizes(node)
    if found is None:
        raise SourceError(f"{where} has something else in place of a shape")
    return found


def parse_shapes(node: object, where: str) -> dict[str, tuple[int, ...]]:
    """Parse the shapes in a mapping of a pickle, by name; raises SourceError if it is malformed."""
    found = {}
    for name, value in as_dict(node).items():
        if not is_name(name):
            raise SourceError(f"{where} is malformed: a parameter has the name {ascii(name)[:100]}")
        found[name] = parse_shape(value, f"{where}: {name!r}")
    return found


def is_name(node: object) -> bool:
    """Return whether this can name a tensor."""
    return is_text(node) and bool(node)
