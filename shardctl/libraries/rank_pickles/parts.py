"""Finds what one rank's pickle holds of a tensor: all of it, or the boxes of a DTensor or ShardedTensor.

Both are pickled as a wrapper around local tensors, with the mesh and placements, or with offsets and sizes, in their
state (torch `distributed/tensor/_api.py`, `_dtensor_spec.py`, `distributed/device_mesh.py`; and
`distributed/_shard/sharded_tensor/api.py`).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, product
from math import prod
from typing import TYPE_CHECKING, Any, Final, NoReturn

from shardctl.base.dtype import BY_TORCH
from shardctl.base.errors import HostileError, SourceError, UnsupportedError
from shardctl.base.value import value_class
from shardctl.libraries.torch_save.pickle_tree import CallNode, GlobalNode
from shardctl.libraries.torch_save.tensors import StorageView, as_sizes, as_tensor
from shardctl.tensors.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.base.dtype import DType

_TYPE_REBUILD_FUNCTIONS: Final = frozenset({"torch._tensor._rebuild_from_type_v2"})
_SUBCLASS_REBUILD_FUNCTION: Final = "torch._utils._rebuild_wrapper_subclass"
_PARAMETER_REBUILD_FUNCTIONS: Final = frozenset(
    {"torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"}
)
_DTENSOR_CLASSES: Final = frozenset(
    {
        "torch.distributed.tensor.DTensor",
        "torch.distributed.tensor._api.DTensor",
        "torch.distributed._tensor.api.DTensor",
    }
)
_SHARDED_TENSOR_CLASS: Final = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
_PLACEMENT_MODULE_PREFIXES: Final = (
    "torch.distributed.tensor.placement_types.",
    "torch.distributed._tensor.placement_types.",
)
_INT64_LIMIT: Final = 1 << 63
_MAX_MESH_AXES: Final = 16
_MAX_FLATTENED_AXIS_DEPTH: Final = 3
"""Axes flattened within each other."""
_MIN_WRAPPER_ARGUMENTS: Final = 3
"""Arguments of a wrapper, up to its shape: class, type, shape."""

_MAX_BOXES_PER_TENSOR: Final = 1 << 12
"""Boxes of one tensor on one rank; a fused projection under tensor parallelism has two or three."""
_Runs = tuple[tuple[int, int], ...]
"""First index and number of indices of each stretch, in the order in which a rank has them."""


@value_class
class AxisPlacement:
    """What one axis of the mesh does to a tensor."""

    size: int
    """Ranks along the axis."""
    index: int
    """This rank's, among them."""
    dim: int | None = None
    """The dim of the tensor that it cuts; None for none."""
    factor: int = 1
    """Parts of which it takes a share each (`_StridedShard`)."""


@value_class
class LocalPiece:
    """A box of a tensor and the local tensor that has its elements."""

    box: Box
    view: StorageView
    at: tuple[int, ...]
    """Where in the local tensor the box begins."""


@value_class
class TensorPart:
    """What a rank has of a tensor."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: DType
    pieces: tuple[LocalPiece, ...]
    divided: bool
    """Whether it says itself that it is a part; a plain tensor does not."""
    ranks: frozenset[int] = frozenset()
    """Other ranks that it mentions."""


_Found = tuple[tuple[LocalPiece, ...], frozenset[int]]


def as_tensor_part(node: object, where: str) -> TensorPart | None:
    """Return what a node stands for, None if it is no tensor. `where` begins messages.

    Raises:
        SourceError: malformed, or the local tensor is not the one that the description is of.
        UnsupportedError: pending sums (`Partial`), placements that are not known, tensors as `as_tensor` refuses.
    """
    if isinstance(node, CallNode) and str(node.function) in _PARAMETER_REBUILD_FUNCTIONS and node.args:
        return as_tensor_part(node.args[0], where) if _is_wrapper(node.args[0]) else _as_plain_part(node, where)
    if not _is_wrapper(node):
        return _as_plain_part(node, where)
    assert isinstance(node, CallNode)  # noqa: S101 - what a wrapper is
    _, kind, args, state, *_ = node.args
    shape, dtype = _parse_sizes(args[2], where), BY_TORCH.get(args[1].name) if isinstance(args[1], GlobalNode) else None
    if dtype is None:
        raise UnsupportedError(f"{where} has the type {ascii(args[1])[:40]}, which safetensors cannot hold")
    found = (
        _parse_sharded_tensor(state, shape, where)
        if str(kind) == _SHARDED_TENSOR_CLASS
        else _parse_dtensor(state, shape, where)
    )
    pieces, ranks = found
    if any(piece.view.dtype != dtype for piece in pieces):
        _raise_malformed(where, f"is {dtype}, but its local tensor is not")
    return TensorPart(shape, dtype, pieces, divided=True, ranks=ranks)


def _is_wrapper(node: object) -> bool:
    """Return whether it is a call that makes a DTensor or a ShardedTensor: `(rebuild, class, arguments, state)`."""
    if not isinstance(node, CallNode) or str(node.function) not in _TYPE_REBUILD_FUNCTIONS:
        return False
    match node.args:
        case (GlobalNode() as rebuild, GlobalNode() as kind, tuple() as args, _, *_) if (
            len(args) >= _MIN_WRAPPER_ARGUMENTS
        ):
            return str(rebuild) == _SUBCLASS_REBUILD_FUNCTION and str(kind) in {
                *_DTENSOR_CLASSES,
                _SHARDED_TENSOR_CLASS,
            }
    return False


def _as_plain_part(node: object, where: str) -> TensorPart | None:
    view = as_tensor(node, where)
    if view is None:
        return None
    whole = LocalPiece(Box.whole(view.shape), view, (0,) * len(view.shape))
    return TensorPart(view.shape, view.dtype, (whole,), divided=False)


# DTensor


def _parse_dtensor(state: object, shape: tuple[int, ...], where: str) -> _Found:
    attributes = _parse_attributes(state, where)
    local, spec = attributes.get("_local_tensor"), attributes.get("_spec")
    if not isinstance(spec, CallNode) or not str(spec.function).endswith(".DTensorSpec"):
        _raise_malformed(where, "has no description of its placements")
    said = _parse_attributes(spec.state, where)
    mesh, listed = said.get("mesh"), said.get("placements")
    if not isinstance(mesh, CallNode) or not isinstance(listed, tuple | list):
        _raise_malformed(where, "has no device mesh or no placements")
    known = _parse_attributes(mesh.state, where)
    extents, index = _parse_mesh_shape(known, where), known.get("_coordinate_on_dim")
    ranks = frozenset(
        rank for key in ("_flatten_rank_map", "_flatten_mesh_list") for rank in _as_numbers(known.get(key)) or ()
    )
    if index is None:  # of a rank that is not in the mesh
        return (), ranks
    at = _as_numbers(index)
    if (
        at is None
        or not len(at) == len(extents) == len(listed)
        or not all(a < n for a, n in zip(at, extents, strict=True))
    ):
        _raise_malformed(where, f"is placed on a mesh of {list(extents)} in a way that does not fit it")
    placements = tuple(
        _parse_placement(node, size, a, len(shape), where) for node, size, a in zip(listed, extents, at, strict=True)
    )
    view = as_tensor(local, where)
    if view is None:
        _raise_malformed(where, "has no local tensor")
    expected = compute_local_shape(shape, placements)
    if view.shape != expected and not (0 in view.shape and 0 in expected):
        raise SourceError(
            f"{where} {list(shape)}: this rank has {list(view.shape)}, but its placements mean {list(expected)}"
        )
    return tuple(LocalPiece(box, view, start) for box, start in list_local_boxes(shape, placements)), ranks


def _parse_mesh_shape(mesh: dict[Any, Any], where: str) -> tuple[int, ...]:
    """Parse ranks along each axis: since torch 2.9 of a layout, before of the tensor of ranks."""
    layout = mesh.get("_layout")
    if isinstance(layout, CallNode):
        state = _parse_attributes(layout.state, where)
        axes = state.get("axes")
        if isinstance(axes, tuple | list):
            extents = [
                _parse_attributes(axis.state, where).get("shape") if isinstance(axis, CallNode) else None
                for axis in axes
            ]
        else:
            shape = state.get("shape")
            extents = list(shape) if isinstance(shape, tuple | list) else [shape]
        sizes = [_multiply_extents(extent) for extent in extents]
    else:
        ranks = as_tensor(mesh.get("mesh"), where)
        sizes = list(ranks.shape) if ranks is not None else [None]
    found = [size for size in sizes if size is not None]
    if len(found) != len(sizes) or len(found) > _MAX_MESH_AXES:
        raise UnsupportedError(f"{where} is on a device mesh of a kind that shardctl does not know")
    return tuple(found)


def _multiply_extents(extent: object, depth: int = _MAX_FLATTENED_AXIS_DEPTH) -> int | None:
    """Return the ranks of one axis, which may be several axes flattened."""
    if isinstance(extent, tuple | list) and len(extent) <= _MAX_MESH_AXES and depth:
        parts = [_multiply_extents(part, depth - 1) for part in extent]
        known = [part for part in parts if part is not None]
        return prod(known) if len(known) == len(parts) else None
    return extent if type(extent) is int and 0 < extent < _INT64_LIMIT else None


def _parse_placement(node: object, size: int, index: int, ndim: int, where: str) -> AxisPlacement:
    function = str(node.function) if isinstance(node, CallNode) else ""
    prefix = next((p for p in _PLACEMENT_MODULE_PREFIXES if function.startswith(p)), None)
    if not isinstance(node, CallNode) or prefix is None:
        _raise_malformed(where, "has something else in place of a placement")
    kind = function.removeprefix(prefix)
    if kind == "Replicate":
        return AxisPlacement(size, index)
    if kind in {"Partial", "_Partial", "MaskPartial", "_MaskPartial", "_NormPartial"}:
        raise UnsupportedError(f"{where} is a sum that the ranks have not added up yet ({kind})")
    if kind not in {"Shard", "_StridedShard"}:
        raise UnsupportedError(f"{where} is placed by {function}, which shardctl does not know")
    state = _parse_attributes(node.state, where) if node.state is not None else {}
    dim = state.get("dim", node.args[0] if node.args else None)
    factor = state.get("split_factor", 1)
    if type(dim) is not int or not -ndim <= dim < ndim or type(factor) is not int or not 0 < factor < _INT64_LIMIT:
        _raise_malformed(where, f"of {ndim} dims is cut along dim {ascii(dim)[:40]}")
    return AxisPlacement(size, index, dim % ndim, factor if kind == "_StridedShard" else 1)


# ShardedTensor


def _parse_sharded_tensor(state: object, shape: tuple[int, ...], where: str) -> _Found:
    """Parse a `state` of `(local shards, metadata, process group, sharding spec, init_rrefs)`."""
    if not isinstance(state, tuple | list) or not state or not isinstance(state[0], tuple | list):
        _raise_malformed(where, "has no list of shards")
    pieces = []
    whole = Box.whole(shape)
    for node in state[0]:
        shard = _parse_attributes(node.state, where) if isinstance(node, CallNode) else {}
        described = shard.get("metadata")
        said = _parse_attributes(described.state, where) if isinstance(described, CallNode) else {}
        origin, extents = _parse_sizes(said.get("shard_offsets"), where), _parse_sizes(said.get("shard_sizes"), where)
        view = as_tensor(shard.get("tensor"), where)
        if view is None:
            _raise_malformed(where, "has a shard without a tensor")
        if len(origin) != len(extents) or len(extents) != len(shape) or not whole.contains(Box(origin, extents)):
            _raise_malformed(where, f"of shape {list(shape)} has a shard of {list(extents)} at {list(origin)}")
        if view.shape != extents:
            raise SourceError(f"{where}: a shard is {list(view.shape)}, but its description says {list(extents)}")
        pieces.append(LocalPiece(Box(origin, extents), view, (0,) * len(extents)))
    return tuple(pieces), frozenset(_list_shard_ranks(state))


def _list_shard_ranks(state: Any) -> Iterator[int]:  # noqa: ANN401 - a node of a tree
    """List the ranks that the metadata of all shards names."""
    metadata = state[1].state if len(state) > 1 and isinstance(state[1], CallNode) else None
    shards = metadata.get("shards_metadata") if isinstance(metadata, dict) else None
    for shard in shards if isinstance(shards, tuple | list) else ():
        said = _merge_attributes(shard.state) if isinstance(shard, CallNode) else None
        device = said.get("placement") if said is not None else None
        rank = _merge_attributes(device.state) if isinstance(device, CallNode) else None
        if rank is not None and type(rank.get("_rank")) is int:
            yield rank["_rank"]


# Nodes


def _merge_attributes(state: object) -> dict[Any, Any] | None:
    """Return the attributes in a pickled state: a dict, or one and that of the slots."""
    if isinstance(state, dict):
        return state
    if isinstance(state, tuple) and all(part is None or isinstance(part, dict) for part in state):
        return {key: value for part in state if part for key, value in part.items()}
    return None


def _parse_attributes(state: object, where: str) -> dict[Any, Any]:
    found = _merge_attributes(state)
    if found is None:
        _raise_malformed(where, "has a description without attributes")
    return found


def _as_numbers(node: object) -> tuple[int, ...] | None:
    if not isinstance(node, tuple | list) or any(type(n) is not int or not 0 <= n < _INT64_LIMIT for n in node):
        return None
    return tuple(node)


def _parse_sizes(node: object, where: str) -> tuple[int, ...]:
    found = as_sizes(node)
    if found is None:
        _raise_malformed(where, "has a shape, sizes or offsets that are negative or malformed")
    return found


def _raise_malformed(where: str, what: str) -> NoReturn:
    raise SourceError(f"{where} {what}")


@lru_cache(maxsize=1 << 14)  # layers are alike
def list_local_boxes(
    shape: tuple[int, ...], placements: tuple[AxisPlacement, ...]
) -> tuple[tuple[Box, tuple[int, ...]], ...]:
    """List the boxes that a rank has of a tensor of `shape`, and where each begins in its own, local tensor.

    >>> [str(b) for b, _ in list_local_boxes((8, 3), (AxisPlacement(2, 1, 0, 2), AxisPlacement(2, 0, 0)))]
    ['[2:4, 0:3]']

    Raises HostileError for placements that divide a tensor into very many boxes.
    """
    runs = _compute_runs(shape, placements)
    if prod(map(len, runs)) > _MAX_BOXES_PER_TENSOR:
        raise HostileError(
            f"placements that divide a tensor of {list(shape)} into more than {_MAX_BOXES_PER_TENSOR:,} boxes"
        )
    starts = [list(accumulate((count for _, count in each), initial=0))[:-1] for each in runs]
    return tuple(
        (Box(tuple(run[0] for run in chosen), tuple(run[1] for run in chosen)), at)
        for chosen, at in zip(product(*runs), product(*starts), strict=True)
    )


@lru_cache(maxsize=1 << 14)
def compute_local_shape(shape: tuple[int, ...], placements: tuple[AxisPlacement, ...]) -> tuple[int, ...]:
    """Compute the shape of what a rank has of a tensor of `shape`."""
    return tuple(sum(count for _, count in each) for each in _compute_runs(shape, placements))


def _compute_runs(shape: tuple[int, ...], placements: tuple[AxisPlacement, ...]) -> list[_Runs]:
    """Compute the stretches of each dim that a rank has."""
    runs: list[_Runs] = [((0, extent),) if extent else () for extent in shape]
    for placement in placements:
        if placement.dim is not None:
            runs[placement.dim] = _share_runs(runs[placement.dim], placement)
    return runs


def _share_runs(runs: _Runs, placement: AxisPlacement) -> _Runs:
    """Return what one rank gets of the stretches that the axes before left."""
    total = sum(count for _, count in runs)
    piece = -(-total // placement.factor)
    if total > piece * _MAX_BOXES_PER_TENSOR:
        raise HostileError(f"a placement divides a dim of {total:,} into more than {_MAX_BOXES_PER_TENSOR:,} parts")
    shares: list[tuple[int, int]] = []
    for start in range(0, total, max(piece, 1)):
        stop = min(start + piece, total)
        part = -(-(stop - start) // placement.size)
        first = min(start + part * placement.index, stop)
        for begin, count in _slice_runs(runs, first, min(first + part, stop)):
            if shares and sum(shares[-1]) == begin:
                shares[-1] = (shares[-1][0], shares[-1][1] + count)
            else:
                shares.append((begin, count))
        if len(shares) > _MAX_BOXES_PER_TENSOR:
            raise HostileError(
                f"placements divide a dim of {total:,} into more than {_MAX_BOXES_PER_TENSOR:,} stretches"
            )
    return tuple(shares)


def _slice_runs(runs: _Runs, start: int, stop: int) -> _Runs:
    """Return the part of the stretches, taken as one, from `start` to `stop`."""
    found, at = [], 0
    for first, count in runs:
        low, high = max(start - at, 0), min(stop - at, count)
        if low < high:
            found.append((first + low, high - low))
        at += count
    return tuple(found)
