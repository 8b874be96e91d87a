"""Computes the cache of models whose layers differ as vLLM pages it: in groups of layers that share blocks.

vLLM has one pool of blocks. It divides the layers into groups of one kind and one size each, pads the pages of smaller
layers, and a request takes blocks for every group (vLLM 0.33, v1/core/kv_cache_planning.py,
`_get_kv_cache_groups_uniform_page_size`; v1/kv_cache_interface.py).

Of a window, one request takes at most the blocks of its window and of a whole forward pass, which is what vLLM's log
divides the cache by ("Maximum concurrency"). But all requests share the tokens of a forward pass, and before each chunk
the scheduler frees what the window has left behind (v1/core/kv_cache_manager.py, `allocate_slots`;
v1/core/single_type_kv_cache_manager.py, `remove_skipped_blocks`): together they take their windows, and one pass.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from shardctl.base.value import value_class
from shardctl.estimate.term import MemoryTerm

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardctl.estimate.workload import ServingWorkload

_MAX_PADDING_RATIO: Final = Fraction(3, 2)
"""Kinds with less than so many times the layers of the rarest are padded to the most instead."""
_LAYER_GROUPS_SOURCE: Final = "vLLM 0.33, v1/core/kv_cache_planning.py: groups of layers that share a pool of blocks"


@value_class
class CachedLayer:
    """What one layer caches on a rank."""

    per_token: Fraction
    """Bytes of one token; 0 for a state."""
    window: int | None = None
    state: int = 0
    """Bytes of a state, which does not grow."""
    tokens: int = 0
    """Tokens of one block."""
    page: Fraction = Fraction(0)
    """Bytes of one block, with what pads it."""

    @property
    def name(self) -> str:
        """What it is, in words."""
        if self.state:
            return "states of fixed size"
        return "keys and values" if self.window is None else f"keys and values in a window of {self.window}"


def list_grouped_terms(
    layers: Sequence[Sequence[CachedLayer]], held: range, work: ServingWorkload, *, batches: int
) -> Iterator[MemoryTerm]:
    """List what a rank that has the layers `held` reserves, by kind; of each layer there is all that it caches.

    `batches` are the forward passes that may be under way at once.
    """
    named = [(number, one) for number, some in enumerate(layers) for one in some]
    aligned = _align_blocks([one for _, one in named], work.page)
    kinds: dict[CachedLayer, list[int]] = {}
    for (number, _), one in zip(named, aligned, strict=True):
        kinds.setdefault(one, []).append(number)
    groups = _group_layers(kinds)
    widest = max((sum(n in held for n in numbers) for _, numbers in groups), default=0)
    alike = len({(one.window, bool(one.state), one.tokens) for one in kinds}) == 1
    for kind, all_numbers in kinds.items():
        some = [numbers for one, numbers in groups if one == kind]
        least, blocks = _count_blocks(kind, work, batches)
        # Of layers that all need the same tokens a block has the pages of all, and none is padded.
        pages = sum(n in held for n in all_numbers) if alike else len(some) * widest
        yield MemoryTerm(
            kind.name,
            "kv cache",
            round(pages * blocks * kind.page),
            "groups * layers * blocks * page",
            {
                "B": work.batch,
                "groups": 1 if alike else len(some),
                "layers": pages if alike else widest,
                "blocks": blocks,
                "page": float(kind.page),
                "tokens of a block": kind.tokens,
            },
            _LAYER_GROUPS_SOURCE,
            interval=(round(pages * least * kind.page), round(pages * blocks * kind.page)) if least < blocks else None,
        )


def _align_blocks(some: Sequence[CachedLayer], page: int) -> list[CachedLayer]:
    """Return the layers with blocks of one size: those of attention hold a state at least, and smaller ones are padded.

    A block of fewer bytes gets more tokens if that makes it even, as long as it holds any.
    """
    largest = max((one.state for one in some), default=0)
    token = max((one.per_token for one in some), default=Fraction(0))
    tokens = page * max(1, -(-largest // (page * token))) if token else page
    sized = [replace(one, tokens=tokens, page=one.per_token * tokens or Fraction(one.state)) for one in some]
    most = max((one.page for one in sized), default=Fraction(0))
    return [_pad_block(one, most) for one in sized]


def _pad_block(one: CachedLayer, most: Fraction) -> CachedLayer:
    if not one.state and one.page and most % one.page == 0:
        return replace(one, tokens=int(one.tokens * most / one.page), page=most)
    return replace(one, page=most)


def _group_layers(kinds: dict[CachedLayer, list[int]]) -> list[tuple[CachedLayer, list[int]]]:
    """Group the layers of each kind, so that groups have as many layers as the rarest kind."""
    counts = [len(numbers) for numbers in kinds.values()]
    size = min(counts, default=1)
    if max(counts, default=0) < size * _MAX_PADDING_RATIO:
        size = max(counts, default=1)
    return [
        (kind, numbers[start :: -(-len(numbers) // size)])
        for kind, numbers in kinds.items()
        for start in range(-(-len(numbers) // size))
    ]


def _count_blocks(kind: CachedLayer, work: ServingWorkload, batches: int) -> tuple[int, int]:
    """Count the blocks of one group that all requests need at least, while they decode, and at most.

    A window that begins inside a block has one block more than its tokens fill. One request alone gets what vLLM
    requires at its start.
    """
    if kind.state or kind.window is None:
        each = 1 if kind.state else -(-work.context // kind.tokens)
        return work.batch * each, work.batch * each
    passing = batches * work.batched_tokens
    alone, decoding = (
        -(-min(kind.window - 1 + new, work.context) // kind.tokens) + 1 for new in (passing, min(batches, passing))
    )
    most = min(work.batch * alone, work.batch * decoding - (-passing // kind.tokens))
    return most if work.batch == 1 else work.batch * (decoding - 1), most
