"""Takes apart the buckets in which Megatron-LM's distributed optimizer keeps its states (`dp_reshardable`).

A rank's parameters lie in a bucket one behind another, the last of the module first, each from a multiple of 64
elements (`_ParamAndGradBuffer` of `distributed/param_and_grad_buffer.py`; `sharded_param_state_dp_reshardable` of
`optimizer/distrib_optimizer.py`). No file names them, so `dist_parameters` lists them in the order of the modules. This
is held against what the files do say: every parameter begins and ends where an item does, every bucket ends with a
parameter, and the optimizer's copies of weights have the values of the weights.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import field, replace
from typing import TYPE_CHECKING, Final

from shardctl.base.value import state_class
from shardctl.libraries.arrays.composite import round_up_to_multiple
from shardctl.libraries.megatron.buffer_layout import ALIGNMENT
from shardctl.libraries.megatron.dist_parameters import ModuleOrder, RankParameter, StoredModules, UnknownOrderError
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Chunk, Region, Tensor, locate_dense_run
from shardctl.tensors.training import format_state_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from shardctl.tensors.mesh import Mesh

KEY: Final = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)"
    r"\.dtype_\(torch\.(\w+), torch\.\w+\)\.bucket_idx_(\d+)\.(\w+)"
)
"""The key of a bucket: optimizer, group of ranks, buffer, type of its parameters, bucket and state."""
_FLOAT_DTYPES: Final = frozenset({"F32", "F16", "BF16"})


@state_class
class _Buffer:
    """The buckets of one type of parameters in one chunk of layers of a rank."""

    dtype: str
    """Of its parameters, as torch calls it."""
    buckets: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """The states of each bucket, by its number."""

    @property
    def sizes(self) -> list[int]:
        """How many elements each bucket has."""
        return [next(iter(self.buckets[number].values())).shape[0] for number in sorted(self.buckets)]

    @property
    def states(self) -> list[dict[str, Tensor]]:
        """The states of each bucket, in the order of buckets."""
        return [self.buckets[number] for number in sorted(self.buckets)]

    def list_bucket_edges(self) -> list[frozenset[int]]:
        """Where the items of each bucket begin and end."""
        return [
            frozenset(edge for c in next(iter(held.values())).chunks for edge in (c.box.origin[0], c.box.stop[0]))
            for held in self.states
        ]


@state_class
class UnpackedBuckets:
    """The states that were found in buckets."""

    states: dict[str, Tensor] = field(default_factory=dict)
    """By canonical name, with the shapes of their parameters."""
    title: str = ""
    """What messages call the order of the parameters."""
    compared: int = 0
    """Values that were compared with those of weights."""


def unpack_buckets(
    buckets: Mapping[str, Tensor],
    arrays: Mapping[str, Tensor],
    mesh: Mesh,
    check: Callable[[Mapping[str, Tensor]], int],
) -> UnpackedBuckets:
    """Unpack the states in `buckets`, by key, as those of the weights' `arrays`, which ranks of `mesh` wrote.

    `check` counts the values that it compared, and raises UnknownOrderError for states that are not those of weights.

    Raises UnknownOrderError, which says why, if no known order of parameters fits what the files say.
    """
    ranks = _sort_buckets(buckets)
    modules = StoredModules(arrays, mesh)
    reasons: list[str] = []
    for order in modules.list_orders():
        try:
            states = _collect_states(_place_ranks(ranks, modules, order), arrays)
            return UnpackedBuckets(states, order.title, check(states))
        except UnknownOrderError as error:
            reasons.append(str(error))
    raise UnknownOrderError(reasons[0] if reasons else "no order of parameters is known")


def _sort_buckets(buckets: Mapping[str, Tensor]) -> dict[tuple[int, int], list[_Buffer]]:
    """Sort buckets into the buffers of each rank, by the optimizer's and the rank's number."""
    found: dict[tuple[int, int], dict[int, _Buffer]] = {}
    for key, tensor in buckets.items():
        match = KEY.fullmatch(key)
        if match is None:
            raise UnknownOrderError(f"the key {key!r} is not known")
        if tensor.dtype.name not in _FLOAT_DTYPES or len(tensor.shape) != 1:
            raise UnknownOrderError(f"{key!r} is {tensor.dtype} {list(tensor.shape)}, which are no plain values")
        chain, rank, number, dtype, bucket, state = match.groups()
        buffers = found.setdefault((int(chain or 0), int(rank)), {})
        buffer = buffers.setdefault(int(number), _Buffer(dtype))
        buffer.buckets.setdefault(int(bucket), {})[state] = tensor
    for rank_buffers in found.values():
        for buffer in rank_buffers.values():
            if any(len({each.shape for each in held.values()}) > 1 for held in buffer.buckets.values()):
                raise UnknownOrderError("the states of a bucket have different sizes")
    return {at: [buffers[number] for number in sorted(buffers)] for at, buffers in sorted(found.items())}


def _place_ranks(
    ranks: Mapping[tuple[int, int], list[_Buffer]], modules: StoredModules, order: ModuleOrder
) -> Iterator[tuple[RankParameter, Mapping[str, Tensor], int]]:
    """Yield every parameter of every rank with its bucket's states and where in them it begins.

    Stages have as many layers as fit their buckets, in the order in which data flows.
    """
    chains = sorted({chain for chain, _ in ranks})
    kinds = modules.list_kinds(order)
    if len(chains) != len(kinds):
        raise UnknownOrderError(f"there are {len(chains)} optimizers where {len(kinds)} are known")
    counts: list[int] = []
    for chain, kind in zip(chains, kinds, strict=True):
        mine = {rank: buffers for (each, rank), buffers in ranks.items() if each == chain}
        if sorted(mine) != list(range(modules.count_ranks(kind))):
            raise UnknownOrderError(f"{len(mine)} ranks have buckets, but {modules.count_ranks(kind)} were expected")
        chunks = modules.count_chunks(len(mine[0]), len({buffer.dtype for buffer in mine[0]}))
        turns = [(chunk, stage) for chunk in range(chunks) for stage in range(modules.stages)]
        first = 0
        for turn, (chunk, stage) in enumerate(turns):
            last = turn == len(turns) - 1
            held = [(rank, buffers) for rank, buffers in mine.items() if modules.find_stage(kind, rank) == stage]
            known = counts[turn] if len(counts) > turn else None
            tries = [known] if known is not None else modules.list_counts(first, len(turns), last=last)
            for count in tries:
                layers = range(first, first + count)
                fits = [
                    _place_rank(buffers, chunk, chunks, modules.list_parameters(kind, rank, layers, last=last))
                    for rank, buffers in held
                ]
                if all(fit is not None for fit in fits):
                    break
            else:
                raise UnknownOrderError(
                    f"no number of layers, in the order {order.title}, fills the buckets of stage {stage}"
                )
            if known is None:
                counts.append(count)
            first += count
            yield from (each for fit in fits for each in fit or ())


def _place_rank(
    buffers: Sequence[_Buffer], chunk: int, chunks: int, parameters: Sequence[RankParameter]
) -> list[tuple[RankParameter, Mapping[str, Tensor], int]] | None:
    """Place a rank's parameters of a chunk of layers in its buffers; None if they do not fit."""
    count = len(buffers) // chunks
    found: list[tuple[RankParameter, Mapping[str, Tensor], int]] = []
    left = list(parameters)
    for buffer in buffers[chunk * count : (chunk + 1) * count]:
        own = [each for each in left if each.dtype == buffer.dtype]
        left = [each for each in left if each.dtype != buffer.dtype]
        starts = _place_parameters([each.size for each in own], buffer.sizes, buffer.list_bucket_edges())
        if starts is None:
            return None
        states = buffer.states
        found += [(each, states[bucket], start) for each, (bucket, start) in zip(own, starts, strict=True)]
    return None if left else found


def _place_parameters(
    counts: Sequence[int], sizes: Sequence[int], edges: Sequence[frozenset[int]]
) -> list[tuple[int, int]] | None:
    """Place parameters of so many elements in buckets, the last parameter first; None if they do not fit exactly.

    >>> _place_parameters([100, 30], [164], [frozenset({0, 30, 64, 164})])
    [(0, 64), (0, 0)]
    >>> _place_parameters([100, 31], [164], [frozenset({0, 30, 64, 164})])
    """
    found: list[tuple[int, int]] = []
    bucket, at = 0, 0
    for count in reversed(counts):
        start = round_up_to_multiple(at, ALIGNMENT)
        if start and bucket < len(sizes) and start >= sizes[bucket]:
            if sizes[bucket] not in {at, start}:
                return None
            bucket, start = bucket + 1, 0
        at = start + count
        if bucket >= len(sizes) or at > sizes[bucket] or start not in edges[bucket] or at not in edges[bucket]:
            return None
        found.append((bucket, start))
    full = bucket == len(sizes) - 1 and sizes[bucket] in {at, round_up_to_multiple(at, ALIGNMENT)}
    return found[::-1] if full or not (counts or sizes) else None


def _collect_states(
    placed: Iterable[tuple[RankParameter, Mapping[str, Tensor], int]], arrays: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Collect states by canonical name, from parameters and where in their buckets' states they begin."""
    found: dict[str, dict[Box, list[Chunk]]] = {}
    shapes: dict[str, tuple[str, Tensor]] = {}
    for parameter, held, start in placed:
        for state, tensor in held.items():
            _add_parts(found, shapes, parameter, state, tensor, start)
    states = {}
    for name, boxes in found.items():
        array, tensor = shapes[name]
        chunks = tuple(chunk for parts in boxes.values() for chunk in parts)
        states[name] = Tensor(name, tensor.dtype, arrays[array].shape, chunks)
    return states


def _add_parts(
    found: dict[str, dict[Box, list[Chunk]]],
    shapes: dict[str, tuple[str, Tensor]],
    parameter: RankParameter,
    state: str,
    tensor: Tensor,
    start: int,
) -> None:
    """Add what a bucket has of a parameter's state, whose first element is at `start`."""
    chunks = sorted(tensor.chunks, key=lambda chunk: chunk.box.origin)
    origins = [chunk.box.origin[0] for chunk in chunks]
    for array, box in parameter.parts:
        name = format_state_name(state, array)
        shapes[name] = (array, tensor)
        boxes = found.setdefault(name, {})
        if box not in boxes:  # an earlier rank holds the same part, of what is not divided
            parts = boxes.setdefault(box, [])
            for chunk in chunks[max(bisect_right(origins, start) - 1, 0) :]:
                if chunk.box.origin[0] >= start + box.size:
                    break
                parts += _cut_run(chunk, box, start)
        start += box.size


def _cut_run(chunk: Chunk, box: Box, start: int) -> Iterator[Chunk]:
    """Yield what a stored run has of a part, whose elements follow each other from `start` in the bucket."""
    first, stop = max(chunk.box.origin[0], start), min(chunk.box.stop[0], start + box.size)
    if first >= stop or not isinstance(chunk.where, Region):
        return
    if chunk.where.strides != (chunk.dtype.unit_bytes,):
        raise UnknownOrderError(f"{chunk.name!r} is not stored one element after another")
    offset = chunk.where.offset + (first - chunk.box.origin[0]) * chunk.dtype.unit_bytes
    strides, places = locate_dense_run(chunk.dtype, box.shape, first - start, stop - start)
    for each, shift in places:
        moved = Box(tuple(a + b for a, b in zip(box.origin, each.origin, strict=True)), each.shape)
        yield replace(chunk, box=moved, where=Region(chunk.where.file, offset + shift, strides))
