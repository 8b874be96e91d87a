"""Estimates what a rank needs to serve, and how long a context or how large a batch fits."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import UsageError
from shardctl.base.value import value_class
from shardctl.estimate.runtime import list_runtime_terms
from shardctl.estimate.serving.engine_budget import (
    build_outside_term,
    build_reserve_term,
    build_rounding_term,
    count_engine_room,
    get_engine_rules,
)
from shardctl.estimate.serving.kv_cache import count_source_tokens, count_units_per_rank, list_cache_terms
from shardctl.estimate.serving.mxfp4_kernels import build_padding_term
from shardctl.estimate.term import MemoryTerm, sum_terms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardctl.estimate.model.layer_graph import LayerAttention, LayerExperts, LayerGraph, ModelLayer
    from shardctl.estimate.model.rank_shards import RankShards
    from shardctl.estimate.workload import ServingWorkload
    from shardctl.tensors.mesh import Mesh

MOST: Final = 1 << 40
"""No context and no batch is larger; what fits this fits anything."""
_HIDDEN_STATES_PER_LAYER: Final = 4
"""Hidden states of all tokens that a layer has beside those of its MLP: its input, the residual, the normalised ones
and the output of the attention."""
_RETAINED_HIDDEN_TENTHS: Final = 9
"""Tenths of the hidden states that stay while sampling."""
_FORWARD_PASS_PERCENT: Final = (60, 100, 130)
"""Hundredths of the modelled forward pass to be expected: a compiled graph reuses buffers, eager code keeps more."""


def list_serving_terms(
    anatomy: LayerGraph, holding: RankShards, mesh: Mesh, work: ServingWorkload, *, dtype: str
) -> tuple[MemoryTerm, ...]:
    """List what one rank needs for `work`; `dtype` is that of activations (safetensors' name).

    Weights are exact, as stored; caches are described by `list_cache_terms`. The peak is that of a forward pass or of
    the sampler, whichever is higher: the second's term is what it needs beyond the first's.
    Raises UsageError for a dtype that does not exist.
    """
    return (
        MemoryTerm("weights", "weights", holding.nbytes),
        *_list_other_terms(anatomy, holding, mesh, work, dtype=dtype),
    )


def find_longest_context(
    anatomy: LayerGraph,
    holdings: Sequence[RankShards],
    mesh: Mesh,
    work: ServingWorkload,
    *,
    dtype: str,
    budget: int,
) -> int | None:
    """Find the most tokens per sequence for which each rank needs at most `budget` bytes, at the batch of `work`.

    It is exact: one token more does not fit. 0 if not even one does, None if memory does not limit it (fixed states).
    """
    return _find_largest_number(lambda n: replace(work, context=n), anatomy, holdings, mesh, dtype, budget)


def find_largest_batch(
    anatomy: LayerGraph,
    holdings: Sequence[RankShards],
    mesh: Mesh,
    work: ServingWorkload,
    *,
    dtype: str,
    budget: int,
) -> int | None:
    """Find the most sequences for which each rank needs at most `budget` bytes, at the context of `work`.

    As `find_longest_context`: exact, 0 for none, None for a model that keeps nothing of any sequence; but never more
    than `work.rows`, if those are given.
    """
    most = _find_largest_number(lambda n: replace(work, batch=n), anatomy, holdings, mesh, dtype, budget)
    return most if work.rows is None or (most is not None and most < work.rows) else work.rows


@value_class
class CacheRoom:
    """What a device has left for caches, with its interval: of all ranks that of the one with the fewest tokens."""

    nbytes: int
    low: int
    high: int
    request: int
    """Bytes that one sequence of the workload's context may take alone, which the engine requires to start."""
    context: int

    def count_tokens(self) -> tuple[int, int, int]:
        """Count tokens of such sequences as vLLM's log does ("GPU KV cache size"): usual, least and most."""
        usual, low, high = (max(0, size) * self.context // self.request for size in (self.nbytes, self.low, self.high))
        return usual, low, high

    @property
    def concurrency(self) -> float:
        """What vLLM's log calls "Maximum concurrency", which counts what one sequence may take for every sequence."""
        return max(0, self.nbytes) / self.request


def measure_cache_room(
    anatomy: LayerGraph,
    holdings: Sequence[RankShards],
    mesh: Mesh,
    work: ServingWorkload,
    *,
    dtype: str,
    budget: int,
) -> CacheRoom | None:
    """Measure what `budget` bytes of a device leave for caches; None for a model that caches nothing.

    Of an engine, it is what its log says: what its part of the device leaves, whether or not all else fits beside it.
    """
    found = []
    alone = replace(work, batch=1)
    for holding in _choose_heaviest(holdings):
        terms = list_serving_terms(anatomy, holding, mesh, work, dtype=dtype)
        request = sum(term.nbytes for term in list_cache_terms(anatomy, holding, mesh, alone, dtype=dtype))
        if not request:
            continue
        others = [term for term in terms if term.category != "kv cache"]
        if work.budget is None:
            room = tuple(
                budget - sum(sizes) for sizes in zip(*((t.nbytes, t.high, t.low) for t in others), strict=True)
            )
        else:
            room = count_engine_room(work.budget, others)
        usual, low, high = room
        found.append(CacheRoom(usual, low, high, request, work.context))
    return min(found, key=lambda one: one.nbytes / one.request, default=None)


def _find_largest_number(
    ask: Callable[[int], ServingWorkload],
    anatomy: LayerGraph,
    holdings: Sequence[RankShards],
    mesh: Mesh,
    dtype: str,
    budget: int,
) -> int | None:
    """Find the largest number whose work fits on all ranks: what each needs never falls as the number grows."""
    heaviest = [(holding.nbytes, holding) for holding in _choose_heaviest(holdings)]

    def fits(number: int) -> bool:
        work = ask(number)
        return all(
            weights + sum_terms(_list_other_terms(anatomy, holding, mesh, work, dtype=dtype)).nbytes <= budget
            for weights, holding in heaviest
        )

    if fits(MOST):
        return None
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _choose_heaviest(holdings: Sequence[RankShards]) -> list[RankShards]:
    """Choose the heaviest rank of each stage, which decides: the others differ in nothing but their weights."""
    heaviest: dict[tuple[object, ...], tuple[int, RankShards]] = {}
    for holding in holdings:
        key = (holding.stage, holding.layers)
        nbytes = holding.nbytes
        if nbytes > heaviest.get(key, (-1, holding))[0]:
            heaviest[key] = nbytes, holding
    return [holding for _, holding in heaviest.values()]


def _list_other_terms(
    anatomy: LayerGraph, holding: RankShards, mesh: Mesh, work: ServingWorkload, *, dtype: str
) -> Iterator[MemoryTerm]:
    """List all but the weights."""
    if dtype not in BY_NAME:
        raise UsageError(f"there is no element type {dtype!r}", hint=f"the types are {', '.join(BY_NAME)}")
    bits = BY_NAME[dtype].bits
    passing = [*_list_gathered_terms(holding, mesh), *_list_forward_terms(anatomy, holding, mesh, work, bits)]
    rounded = work.budget is not None and work.budget.engine == "sglang"
    padding = build_padding_term(anatomy, holding, mesh, work.budget) if work.budget is not None else None
    outside = build_outside_term(work.budget, mesh.degree("tp")) if work.budget is not None else None
    found = (
        *([padding] if padding is not None else []),
        *([outside] if outside is not None else []),
        *list_cache_terms(anatomy, holding, mesh, work, dtype=dtype),
        *passing,
        *([build_rounding_term(len(holding.layers))] if rounded else []),
        *list_runtime_terms(mesh, serving=True, allocated=sum(term.nbytes for term in passing)),
    )
    yield from found
    if work.budget is not None:
        yield build_reserve_term(work.budget, found)


def _list_gathered_terms(holding: RankShards, mesh: Mesh) -> Iterator[MemoryTerm]:
    """List weights that fsdp ranks gather before use."""
    if mesh.degree("fsdp") == 1:
        return
    units = {unit: sum(part.gathered_bytes for part in parts) for unit, parts in holding.units().items()}
    layer = max((nbytes for unit, nbytes in units.items() if unit is not None), default=0)
    root = units.get(None, 0)
    yield MemoryTerm(
        "gathered weights",
        "workspace",
        root + 2 * layer,
        "root + 2 * layer",
        {"root": root, "layer": layer},
        "FSDP2: the root unit, and a layer while the next is gathered",
        interval=(max(root, layer), root + 2 * layer),
    )


def _list_forward_terms(
    anatomy: LayerGraph, holding: RankShards, mesh: Mesh, work: ServingWorkload, bits: int
) -> Iterator[MemoryTerm]:
    """List the peak of a forward pass, and what the sampler needs beyond it."""
    cp = mesh.degree("cp")
    tokens = -(-min(work.batched_tokens, work.batch * work.context) // cp)
    read = -(-min(work.batched_tokens, work.batch * count_source_tokens(anatomy, work)) // cp)
    layers = anatomy.layers[holding.layers.start : holding.layers.stop]
    passes = {one: (read if one.encoder else tokens, _count_peak_elements(one, mesh)) for one in dict.fromkeys(layers)}
    widest = max(passes, key=lambda one: prod(passes[one]), default=None)
    peak = 0
    if widest is not None:
        n, elements = passes[widest]
        peak = n * elements * bits // 8
        yield MemoryTerm(
            "forward pass",
            "activations",
            peak,
            "n * elements * bytes",
            {"n": n, "elements": elements, "bytes": bits / 8, "h": widest.hidden, **_count_part_elements(widest, mesh)},
            "buffers of one layer of vLLM: 4 h and its attention's or its MLP's, whichever are more",
            interval=(peak * _FORWARD_PASS_PERCENT[0] // 100, peak * _FORWARD_PASS_PERCENT[2] // 100),
        )
    last = holding.layers.stop == len(anatomy.layers)
    if not (last and anatomy.generates and anatomy.vocabulary):
        return
    rows = max(work.batch, work.rows or 0)
    logits = 4 * rows * anatomy.vocabulary
    hidden = tokens * anatomy.hidden * bits // 8 * _RETAINED_HIDDEN_TENTHS // 10
    rules = get_engine_rules(work.budget.version if work.budget is not None else None)
    kept = min(rows, rules.sampler_rows)
    hidden += 4 * kept * anatomy.vocabulary
    low, usual, high = (max(0, logits * share // 10 + hidden - peak) for share in rules.sampler)
    yield MemoryTerm(
        "sampler beyond the forward pass",
        "workspace",
        usual,
        "max(0, (each * B + rows) * V * 4 + 0.9 * n * h * bytes - forward)",
        {
            "each": rules.sampler[1] / 10,
            "rows": kept,
            "B": rows,
            "V": anatomy.vocabulary,
            "n": tokens,
            "h": anatomy.hidden,
            "bytes": bits / 8,
            "forward": peak,
        },
        "vLLM, v1/sample/ops/topk_topp_sampler.py: 9.7 where top-p sorts (startup logs of 0.6 to 0.8), 3.5 with Triton "
        "or FlashInfer, 1.5 with Model Runner V2 to 0.32; a rank of tp that samples has the logits of the whole "
        "vocabulary, and B is max_num_seqs",
        # Where sampling is greedy or tp's other ranks do not sample, it needs less.
        interval=(min(low, usual), high),
    )


def _count_peak_elements(layer: ModelLayer, mesh: Mesh) -> int:
    """Count elements per token at the peak of a layer."""
    return _HIDDEN_STATES_PER_LAYER * layer.hidden * layer.streams + max(
        _count_part_elements(layer, mesh).values(), default=0
    )


def _count_part_elements(layer: ModelLayer, mesh: Mesh) -> dict[str, int]:
    """Count elements per token of the parts of a layer, of which one runs at a time."""
    tp = mesh.degree("tp")
    found = {}
    if layer.attention is not None:
        found["attention"] = _count_attention_elements(layer.attention, tp)
    if layer.state is not None:
        # The input's two halves, the convolution's output and the scan's.
        found["state"] = 4 * count_units_per_rank(layer.state.channels, tp) + count_units_per_rank(
            layer.state.grouped, tp
        )
    if layer.mlp:
        found["mlp"] = (3 if layer.gated else 2) * count_units_per_rank(layer.mlp, tp)
    if layer.experts is not None:
        found["experts"] = _count_expert_elements(layer.experts, layer, mesh)
    return found


def _count_attention_elements(attention: LayerAttention, tp: int) -> int:
    """Count queries, keys, values and the output; latents are unfolded into keys and values for new tokens."""
    heads = count_units_per_rank(attention.heads, tp)
    if attention.latent and attention.kind != "latent":
        keys = 0  # one vector is both, for all heads
    else:
        keys = heads if attention.kind == "latent" else count_units_per_rank(attention.kv_heads, tp)
    return (
        heads * (attention.head_dim + attention.value_dim)
        + keys * (attention.head_dim + attention.value_dim)
        + attention.latent
    )


def _count_expert_elements(experts: LayerExperts, layer: ModelLayer, mesh: Mesh) -> int:
    """Count the buffers of fused experts: one for what goes in and what comes out, and one for the activation's output.

    Each token has a row for each expert that it goes to, on every rank, whoever has that expert (vLLM,
    fused_moe/fused_moe.py, `intermediate_cache13` and `intermediate_cache2`). The router's logits are in fp32.
    """
    up = (2 if layer.gated else 1) * count_units_per_rank(experts.size, mesh.etp)
    width = experts.width or layer.hidden
    rows = experts.chosen * (max(up, width) + count_units_per_rank(experts.size, mesh.etp))
    shared = 3 * count_units_per_rank(experts.shared, mesh.degree("tp"))
    return max(rows + layer.hidden + 2 * experts.count, shared)
