"""Divides tensors into the blocks that Distributed Shampoo preconditions, and spreads blocks over ranks as it does.

The rules are those of facebookresearch/optimizers f606606, distributed_shampoo: `merge_small_dims`, `multi_dim_split`
and `distribute_buffer_sizes` of `utils/shampoo_utils.py`, and the buffer of `distributor/shampoo_ddp_distributor.py`.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import product
from math import ceil, prod
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

Block = tuple[int, ...]
"""The shape of a block."""

LONGEST: Final = 1024
"""Elements of the longest dim of a block, and of dims that are taken as one (`max_preconditioner_dim`)."""
_BLOCK_ALIGNMENT_BYTES: Final = 64
"""Bytes to whose multiple a block's part of the buffer is padded (`AlignedMemoryCostModel`)."""
_COMMUNICATED_ELEMENT_BYTES: Final = 4
"""Bytes of an element that is sent (`communication_dtype`, float32)."""


def count_blocks(shape: tuple[int, ...]) -> Counter[Block]:
    """Count the blocks of a tensor by their shapes.

    >>> sorted(count_blocks((2048, 1100)).items())
    [((1024, 76), 2), ((1024, 1024), 2)]
    """
    if not prod(shape):
        return Counter()
    sides = [_split_dim(n) for n in _merge_small_dims(shape)]
    found: Counter[Block] = Counter()
    for chosen in product(*(each.items() for each in sides)):
        found[tuple(side for side, _ in chosen)] += prod(count for _, count in chosen)
    return found


def count_packed_sides(block: Block) -> int:
    """Count the elements of half a symmetric matrix, its diagonal included, for each dim of a block."""
    return sum(side * (side + 1) // 2 for side in block)


def count_gathered_bytes(loads: Sequence[int]) -> int:
    """Count the bytes of the buffer that ranks gather all updates in: as many for each as the most loaded one has."""
    return max(loads) * len(loads)


@lru_cache(maxsize=256)
def spread_blocks(
    blocks: tuple[tuple[Block, int], ...], ranks: int
) -> tuple[tuple[int, ...], tuple[Counter[Block], ...]]:
    """Spread blocks over ranks: each, the largest first, to the rank that has least.

    Returns for each rank the bytes of updates that it sends, and its blocks. `blocks` are in the order of the
    parameters, which decides between blocks of one size, but equal ones may be together.
    """
    heap = [(0, rank) for rank in range(ranks)]
    heapify(heap)
    found: list[Counter[Block]] = [Counter() for _ in range(ranks)]
    for cost, block, count in sorted(((_count_sent_bytes(b), b, n) for b, n in blocks), key=lambda one: -one[0]):
        left = count
        while left:
            if left >= ranks and max(heap)[0] - heap[0][0] <= cost:
                # Each rank takes one before any takes two.
                rounds, left = divmod(left, ranks)
                for each in found:
                    each[block] += rounds
                heap = [(load + rounds * cost, rank) for load, rank in heap]  # in the same order
                continue
            load, rank = heap[0]
            found[rank][block] += 1
            heapreplace(heap, (load + cost, rank))
            left -= 1
    loads = {rank: load for load, rank in heap}
    return tuple(loads[rank] for rank in range(ranks)), tuple(found)


def _count_sent_bytes(block: Block) -> int:
    return ceil(_COMMUNICATED_ELEMENT_BYTES * prod(block) / _BLOCK_ALIGNMENT_BYTES) * _BLOCK_ALIGNMENT_BYTES


def _split_dim(n: int) -> dict[int, int]:
    """Return the sides that a dim is split into, and how many of each."""
    whole, rest = divmod(n, LONGEST)
    return {side: count for side, count in ((LONGEST, whole), (rest, int(rest > 0))) if count}


def _merge_small_dims(shape: tuple[int, ...]) -> list[int]:
    """Merge neighbouring dims, from the last on, while their product is not too long; leave out those of one."""
    several = [n for n in reversed(shape) if n != 1] or [1]
    merged = several[:1]
    for n in several[1:]:
        if merged[-1] * n <= LONGEST:
            merged[-1] *= n
        else:
            merged.append(n)
    return merged[::-1]
