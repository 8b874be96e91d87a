"""Reads plain values out of the trees of DeepSpeed's pickles: numbers, shapes, settings, flat arrays."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

from shardctl.errors import SourceError
from shardctl.formats.pickle_tree import Call, Global, mapping
from shardctl.formats.torch_tensors import as_tensor, sizes
from shardctl.settings import is_text

if TYPE_CHECKING:
    from shardctl.dtype import DType
    from shardctl.formats.torch_tensors import Saved, View

_FAR: Final = 1 << 63
_LARGEST: Final = 3e38
"""Nothing that is counted or averaged comes near."""


@dataclass(frozen=True, slots=True)
class Array:
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


def array(saved: Saved, view: View, name: str) -> Array:
    """Where a tensor of a file is; raises SourceError if it is not inside its storage."""
    region = saved.region(view, name)
    return Array(region.file, region.offset, region.strides, view.dtype, view.shape)


def tensor(saved: Saved, node: object, name: str) -> Array | None:
    """The tensor that a node is; None if it is something else."""
    view = as_tensor(node, f"{saved.path}: {name!r}")
    return array(saved, view, name) if view is not None else None


def flat(saved: Saved, node: object, name: str) -> Array:
    """A flat array without gaps; raises SourceError for anything else."""
    found = tensor(saved, node, name)
    if found is None or len(found.shape) != 1 or (found.size > 1 and found.strides != (found.dtype.unit_bytes,)):
        raise SourceError(f"{saved.path} is malformed: {name} is not a flat tensor")
    return found


def table(node: object) -> dict[Any, Any]:
    """The items of a mapping; none for anything else."""
    return mapping(node) or {}


def items(node: object) -> list[Any]:
    """The parts of a list or tuple; none for anything else."""
    return list(node) if isinstance(node, list | tuple) else []


def integer(node: object) -> int | None:
    """A whole number, or that of a pickled enum (`ZeroStageEnum(2)`)."""
    if isinstance(node, Call) and isinstance(node.function, Global) and len(node.args) == 1:
        node = node.args[0]
    return node if type(node) is int and 0 <= node < _FAR else None


def number(node: object) -> float | None:
    """A number that a float of 32 bits can be near; None for anything else."""
    if isinstance(node, bool) or not isinstance(node, int | float) or not abs(node) <= _LARGEST:
        return None
    return float(node)


def size(node: object, where: str) -> tuple[int, ...]:
    """The numbers of a `torch.Size`, or of a tuple or list in its place; raises SourceError for anything else."""
    found = sizes(node)
    if found is None:
        raise SourceError(f"{where} has something else in place of a shape")
    return found


def shapes(node: object, where: str) -> dict[str, tuple[int, ...]]:
    """By name the shapes in a mapping of a pickle; raises SourceError if it is malformed."""
    found = {}
    for name, value in table(node).items():
        if not is_name(name):
            raise SourceError(f"{where} is malformed: a parameter has the name {ascii(name)[:100]}")
        found[name] = size(value, f"{where}: {name!r}")
    return found


def is_name(node: object) -> bool:
    """Whether this can name a tensor."""
    return is_text(node) and bool(node)
