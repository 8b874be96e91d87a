"""Reads where the parts of tensor-parallel ranks lie, as DeepSpeed's automatic tensor parallelism describes each block.

Written by DeepSpeed `module_inject/layers.py` (`collect_autotp_universal_checkpoint_info`); a block has its
extents, its offset and its strides in the whole tensor and in the rank's (`checkpoint/affine.py`).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.libraries.deepspeed.patterns import NamePatterns
from shardctl.libraries.deepspeed.pieces import TensorPartition
from shardctl.libraries.deepspeed.values import as_dict, as_integer, as_list
from shardctl.tensors.box import Box

if TYPE_CHECKING:
    from collections.abc import Mapping

Shape = tuple[int, ...]
_KEY: Final = "affine_map"
_VERSION: Final = 1


class AffineMaps:
    """The descriptions that one checkpoint has.

    Raises UnsupportedError for a version that is not known here.
    """

    def __init__(self, info: Mapping[Any, Any]) -> None:
        held = as_dict(info.get(_KEY))
        version = as_integer(held.get("version")) if held else _VERSION
        if version is None or version > _VERSION:
            raise UnsupportedError(
                f"the checkpoint describes tensor-parallel parts in version {held.get('version')!r}, and {_VERSION} is "
                "known here",
                hint="DeepSpeed's ds_to_universal.py makes a Universal Checkpoint of it, which shardctl reads",
            )
        self._maps = as_dict(held.get("params"))
        self._patterns = NamePatterns(pattern for pattern in self._maps if isinstance(pattern, str))

    def describe(self, name: str) -> bool:
        """Return whether a tensor is described."""
        return self._patterns.find(name) is not None

    def find(self, name: str, shapes: Mapping[int, Shape]) -> TensorPartition | None:
        """Find how a tensor is cut that ranks have in these shapes; None if it is not described.

        Raises:
            SourceError: the description does not fit the shapes, or is malformed.
            UnsupportedError: ranks have other values than the whole tensor, or in another order.
        """
        pattern = self._patterns.find(name)
        if pattern is None:
            return None
        held = as_dict(self._maps[pattern])
        whole, ranks = _as_shape(held.get("logical_shape")), as_dict(held.get("ranks"))
        parts = {}
        for rank, shape in shapes.items():
            own = as_dict(ranks.get(rank))
            if whole is None or _as_shape(own.get("shard_shape")) != shape:
                raise SourceError(f"{name!r} is {list(shape)} on rank {rank}, and its description says otherwise")
            blocks = [_parse_block(name, as_dict(each), whole, shape) for each in as_list(own.get("pieces"))]
            if sum(prod(box.shape) for box, _ in blocks) != prod(shape):
                raise SourceError(f"{name!r} on rank {rank} is not what its description has of it")
            parts[rank] = tuple(blocks)
        return TensorPartition(whole, parts) if whole is not None else None


def _parse_block(name: str, held: dict[Any, Any], whole: Shape, own: Shape) -> tuple[Box, Shape]:
    """Parse a box of the rank's tensor, and where it begins in the whole."""
    if held.get("scale", 1) != 1:
        raise UnsupportedError(
            f"ranks have {name!r} multiplied by {held.get('scale')!r}, which shardctl does not undo",
            hint="DeepSpeed's ds_to_universal.py makes a Universal Checkpoint of such weights without optimizer states",
        )
    extents = _as_shape(held.get("shape"))
    if extents is None:
        raise SourceError(f"the description of {name!r} is malformed: a block has no extents")
    here = _find_origin(name, held.get("dest"), own, extents)
    there = _find_origin(name, held.get("source"), whole, extents)
    return Box(here, extents), there


def _find_origin(name: str, node: object, shape: Shape, extents: Shape) -> Shape:
    """Find where a block begins in a tensor of `shape`, from its offset; its strides must be the tensor's own."""
    offset, strides = (*as_list(node), None, None)[:2]
    start, own = as_integer(offset), _as_shape(strides)
    dense = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    if start is None or own is None or len(own) != len(extents):
        raise SourceError(f"the description of {name!r} is malformed: a block has no place")
    if len(shape) != len(extents) or any(a != b for a, b, n in zip(own, dense, extents, strict=True) if n > 1):
        raise UnsupportedError(f"the elements of {name!r} are in another order on ranks, which is not converted")
    origin = []
    for stride in dense:
        origin.append(start // stride if stride else 0)
        start -= origin[-1] * stride
    if start or any(o + n > s for o, n, s in zip(origin, extents, shape, strict=True)):
        raise SourceError(f"the description of {name!r} is malformed: a block is not inside {list(shape)}")
    return tuple(origin)


def _as_shape(node: object) -> Shape | None:
    """Return a list of numbers; None for anything else."""
    if not isinstance(node, list | tuple):
        return None
    found = tuple(as_integer(one) for one in node)
    return tuple(one or 0 for one in found) if None not in found else None
