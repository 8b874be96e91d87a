"""Finds how the parts of tensor-parallel ranks fit together, from what the checkpoint itself says.

The rules are those of `universal_checkpoint_info` (DeepSpeed `checkpoint/ds_to_universal.py`, `merge_tp_slices`),
which Megatron-DeepSpeed and DeepSpeed's automatic tensor parallelism save for its sake.
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

    from shardctl.libraries.deepspeed.files import DeepSpeedFiles
    from shardctl.libraries.deepspeed.model_states import ModelState

_Shape = tuple[int, ...]
_AFFINE_MAP_KEY: Final = "affine_map"
_MAX_SUPPORTED_VERSION: Final = 1


class _AffineMaps:
    """The descriptions that one checkpoint has.

    Raises UnsupportedError for a version that is not known here.
    """

    def __init__(self, info: Mapping[Any, Any]) -> None:
        held = as_dict(info.get(_AFFINE_MAP_KEY))
        version = as_integer(held.get("version")) if held else _MAX_SUPPORTED_VERSION
        if version is None or version > _MAX_SUPPORTED_VERSION:
            raise UnsupportedError(
                f"the checkpoint describes tensor-parallel parts in version {held.get('version')!r}, and"
                f" {_MAX_SUPPORTED_VERSION} is known here",
                hint="DeepSpeed's ds_to_universal.py makes a Universal Checkpoint of it, which shardctl reads",
            )
        self._maps = as_dict(held.get("params"))
        self._patterns = NamePatterns(pattern for pattern in self._maps if isinstance(pattern, str))

    def describe(self, name: str) -> bool:
        """Return whether a tensor is described."""
        return self._patterns.find(name) is not None

    def find(self, name: str, shapes: Mapping[int, _Shape]) -> TensorPartition | None:
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


Shapes = dict[int, _Shape]
"""By tensor-parallel rank."""

_REPLICATED_PATTERNS_KEY: Final = "tp_replicated_parameter_patterns"
_AVERAGED_PATTERNS_KEY: Final = "parameter_to_average_patterns"
_ROW_PARALLEL_PATTERNS_KEY: Final = "parameter_with_row_parallelism_patterns"
_VOCABULARY_PATTERNS_KEY: Final = "vocabulary_parameter_patterns"
_TWO_SUBPARAMETERS_KEY: Final = "parameter_with_2_sub_params_cat_dim_0"
_SUBPARAMETERS_KEY: Final = "parameter_with_sub_params"
_SUBPARAMETER_WIDTHS_KEY: Final = "sub_param_shard_widths"
_UNSUPPORTED_PATTERNS_KEY: Final = "autotp_unsupported_parameter_patterns"
_UNIVERSAL_CHECKPOINT_HINT: Final = (
    "DeepSpeed's ds_to_universal.py may make a Universal Checkpoint of it, which shardctl reads"
)


class ParallelPartitions:
    """How the tensors of one checkpoint are cut."""

    def __init__(self, models: Mapping[int, ModelState], files: DeepSpeedFiles) -> None:
        first = next(iter(models.values()), None)
        said = first.tensor_parallel if first is not None else None
        layers = len({rank for _, rank in files.layers})
        self.ranks = said or (layers if files.layers else len(models))
        """Tensor-parallel ranks; model-parallel ones are those of each pipeline stage in turn."""
        self._info: dict[Any, Any] = next((state.universal for state in models.values() if state.universal), {})
        self._maps = _AffineMaps(self._info)
        listed = [state.buffers for state in models.values() if state.buffers is not None]
        self._buffers = frozenset().union(*listed) if listed else None
        """None if the files do not list them."""
        self._said_of: dict[str, NamePatterns] = {}
        """By key, the patterns of names that the rules have there."""
        self._known: dict[object, TensorPartition | None] = {}
        """The same for each state of a parameter."""

    def cut(self, name: str, shapes: Shapes, *, trained: bool) -> TensorPartition | None:
        """Return how a tensor is cut that model-parallel ranks have in these shapes; None if all have it whole.

        Raises:
            SourceError: a rank has none of it, or one of a strange shape.
            UnsupportedError: the checkpoint does not say how its parts fit together.
        """
        by_rank: Shapes = {}
        for rank, shape in shapes.items():
            if by_rank.setdefault(rank % self.ranks, shape) != shape:
                raise SourceError(
                    f"{name!r} is {list(shape)} on one pipeline stage and {list(by_rank[rank % self.ranks])}"
                )
        alike = len(set(by_rank.values())) == 1
        cut = all(by_rank.values()) and (trained or self._maps.describe(name) or self._is_parameter(name))
        if self.ranks == 1 or (alike and not cut):
            return None
        if len(by_rank) != self.ranks:
            raise SourceError(f"{name!r} is on {len(by_rank)} of {self.ranks} tensor-parallel ranks")
        key = (name, tuple(shapes.items()))
        if key not in self._known:
            parts = self._parts(name, by_rank)
            self._known[key] = parts and TensorPartition(
                self._without_padding(name, parts[0]), {rank: parts[1][rank % self.ranks] for rank in shapes}
            )
        return self._known[key]

    def _is_parameter(self, name: str) -> bool:
        """Return whether ranks may have parts of a tensor that the optimizer does not have: equal shapes prove nothing.

        Where buffers are not listed, the patterns that say how parameters are cut might be applied to one.
        """
        return name not in self._buffers if self._buffers is not None else not self._info

    def _parts(self, name: str, shapes: Shapes) -> tuple[_Shape, dict[int, tuple[tuple[Box, _Shape], ...]]] | None:
        """Return the whole shape, and by rank its boxes with where each begins; None if all ranks have it whole."""
        if not self._info:
            raise UnsupportedError(
                f"{name!r} is on {self.ranks} tensor-parallel ranks, and the checkpoint does not say how their parts "
                "fit together (universal_checkpoint_info)",
                hint="trainers that support Universal Checkpoints save that; or save it with one such rank",
            )
        if self._is_listed(_UNSUPPORTED_PATTERNS_KEY, name):
            raise UnsupportedError(
                f"{name!r} was cut in a way that DeepSpeed itself cannot put together", hint=_UNIVERSAL_CHECKPOINT_HINT
            )
        described = self._maps.find(name, shapes)
        if described is not None:
            return described.shape, dict(described.parts)
        if self._is_listed(_REPLICATED_PATTERNS_KEY, name):
            if len(set(shapes.values())) > 1:
                raise SourceError(f"{name!r} should be whole on every rank, but has the shapes {list(shapes.values())}")
            return None
        if self._is_listed(_AVERAGED_PATTERNS_KEY, name):
            raise UnsupportedError(
                f"{name!r} has different values on every tensor-parallel rank, and DeepSpeed uses their mean",
                hint=_UNIVERSAL_CHECKPOINT_HINT,
            )
        if self._is_listed(_TWO_SUBPARAMETERS_KEY, name):
            widths = [[shape[0] // 2 for shape in shapes.values()] for _ in range(2)]
            return _interleave_parts(name, shapes, 0, widths)
        for number, entry in enumerate(as_list(self._info.get(_SUBPARAMETERS_KEY))):
            held = as_dict(entry)
            pattern = self._find_pattern(f"{_SUBPARAMETERS_KEY} {number}", as_list(held.get("patterns")), name)
            dim = as_integer(held.get("partition_dim"))
            if pattern is not None and dim is not None:
                return _interleave_parts(name, shapes, dim, self._find_section_widths(name, pattern, held, dim))
        dim = 1 if self._is_listed(_ROW_PARALLEL_PATTERNS_KEY, name) else 0
        return _interleave_parts(
            name, shapes, dim, [[shape[dim] if dim < len(shape) else 0 for shape in shapes.values()]]
        )

    def _find_section_widths(self, name: str, pattern: str, held: dict[Any, Any], dim: int) -> list[list[int]]:
        """Return the extents that ranks have of each of several parts that are cut by themselves."""
        said = as_dict(self._info.get(_SUBPARAMETER_WIDTHS_KEY)).get(pattern)
        if said is not None:
            return [[as_integer(n) or 0 for n in as_list(part)] for part in as_list(said)]
        shape = as_list(held.get("shape"))
        extents = as_list(shape[dim]) if dim < len(shape) else []
        if not extents or any(not as_integer(n) or n % self.ranks for n in extents):
            raise UnsupportedError(
                f"the checkpoint does not say how wide the parts of {name!r} are", hint=_UNIVERSAL_CHECKPOINT_HINT
            )
        return [[n // self.ranks] * self.ranks for n in extents]

    def _without_padding(self, name: str, shape: _Shape) -> _Shape:
        rows = as_integer(self._info.get("original_vocab_size"))
        if rows is not None and shape and rows <= shape[0] and self._is_listed(_VOCABULARY_PATTERNS_KEY, name):
            return (rows, *shape[1:])
        return shape

    def _is_listed(self, key: str, name: str) -> bool:
        listed = self._info.get(key)
        return self._find_pattern(key, as_list(listed) or list(as_dict(listed)), name) is not None

    def _find_pattern(self, key: str, patterns: list[Any], name: str) -> str | None:
        if key not in self._said_of:
            self._said_of[key] = NamePatterns(p for p in patterns if isinstance(p, str))
        return self._said_of[key].find(name)


def _interleave_parts(
    name: str, shapes: Shapes, dim: int, widths: list[list[int]]
) -> tuple[_Shape, dict[int, tuple[tuple[Box, _Shape], ...]]]:
    """Return several parts one after another along `dim`, each cut among the ranks.

    `widths` are extents by part and rank.
    """
    order = sorted(shapes)
    shapes = {rank: shapes[rank] for rank in order}
    rest = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes.values()}
    sums = [sum(part[number] for part in widths) if all(number < len(p) for p in widths) else -1 for number in order]
    if len(rest) != 1 or any(dim >= len(s) or s[dim] != n for s, n in zip(shapes.values(), sums, strict=True)):
        raise SourceError(f"{name!r} has shapes that do not fit together along dim {dim}: {list(shapes.values())}")
    boxes: dict[int, list[tuple[Box, _Shape]]] = {rank: [] for rank in order}
    inside = dict.fromkeys(order, 0)
    begin = 0
    for part in widths:
        for rank in order:
            shape, width = shapes[rank], part[rank]
            zeros = (0,) * len(shape)
            box = Box((*zeros[:dim], inside[rank], *zeros[dim + 1 :]), (*shape[:dim], width, *shape[dim + 1 :]))
            boxes[rank].append((box, (*zeros[:dim], begin, *zeros[dim + 1 :])))
            inside[rank] += width
            begin += width
    first = shapes[order[0]]
    return (*first[:dim], begin, *first[dim + 1 :]), {rank: tuple(held) for rank, held in boxes.items()}


def _parse_block(name: str, held: dict[Any, Any], whole: _Shape, own: _Shape) -> tuple[Box, _Shape]:
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


def _find_origin(name: str, node: object, shape: _Shape, extents: _Shape) -> _Shape:
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


def _as_shape(node: object) -> _Shape | None:
    """Return a list of numbers; None for anything else."""
    if not isinstance(node, list | tuple):
        return None
    found = tuple(as_integer(one) for one in node)
    return tuple(one or 0 for one in found) if None not in found else None
