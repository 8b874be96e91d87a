"""Computes the bytes of a rank's cache: keys and values, latents, windows and fixed states."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import UsageError
from shardctl.base.value import value_class
from shardctl.estimate.serving.engine_budget import get_engine_rules
from shardctl.estimate.serving.paged_groups import CachedLayer, list_grouped_terms
from shardctl.estimate.term import MemoryTerm

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardctl.base.dtype import DType
    from shardctl.estimate.model.layer_graph import LayerAttention, LayerGraph, LayerState, ModelLayer, TokenCache
    from shardctl.estimate.model.rank_shards import RankShards
    from shardctl.estimate.workload import ServingWorkload
    from shardctl.tensors.mesh import Mesh

_CACHE_PAGES_SOURCE: Final = "pages of the cache: vLLM, v1/kv_cache_interface.py"


@value_class
class CacheElement:
    """One element of keys and values as a cache holds it."""

    bits: Fraction
    """With its part of the scales that lie beside it."""


NVFP4: Final = CacheElement(Fraction(9, 2))
"""4 bits, and an E4M3 scale for 16 elements of a head (vLLM's `nvfp4_kv_cache_full_dim`, `utils/torch_utils.py`)."""


def count_elements_per_token(attention: LayerAttention, tp: int) -> int:
    """Count elements that a layer caches of one token on a rank.

    Heads are divided over tp, and where there are fewer of them than ranks, each is on several. What latent attention
    caches is shared by all heads, and therefore on every rank (DeepSeek-V2, sec. 2.1; vLLM's MLA backends).
    """
    if attention.latent:
        return attention.latent
    return count_units_per_rank(attention.kv_heads, tp) * (attention.head_dim + attention.value_dim)


def count_units_per_rank(units: int, tp: int) -> int:
    """Count how many of `units` that may be on several ranks each rank of tp holds, at least one.

    >>> count_units_per_rank(8, 4), count_units_per_rank(8, 16), count_units_per_rank(0, 2)
    (2, 1, 0)
    """
    return -(-units // tp)


def count_source_tokens(anatomy: LayerGraph, work: ServingWorkload) -> int:
    """Count tokens of one sequence that the encoder reads: what the config fixes (Whisper), else what is asked."""
    return anatomy.source_positions or work.source or work.context


def list_cache_terms(
    anatomy: LayerGraph, holding: RankShards, mesh: Mesh, work: ServingWorkload, *, dtype: str
) -> tuple[MemoryTerm, ...]:
    """List the caches of one rank for `work`; none for a model that does not generate.

    `dtype` is that of activations and, unless `work` says otherwise, of keys and values. tp divides heads and the
    channels of states, pp layers, and cp the pages of full attention; dp and fsdp ranks each have sequences of their
    own. Of an encoder-decoder, `work.context` is the most tokens of the decoder, and `count_source_tokens` are the
    encoder's.

    Full attention is exact; a window is what an engine needs that frees pages as soon as it may, from what transformers
    keeps to what an engine needs that never does.
    """
    if not anatomy.generates:
        return ()
    cached, active = _get_cache_element(anatomy, work.kv_dtype or dtype), _get_dtype(dtype)
    if work.budget is not None and work.budget.engine == "vllm":
        layers = _list_cached_layers(anatomy, mesh, cached, active)
        if layers is not None:
            batches = mesh.degree("pp") + get_engine_rules(work.budget.version).ahead
            return tuple(list_grouped_terms(layers, holding.layers, work, batches=batches))
    return tuple(_list_terms(anatomy, holding.layers, mesh, work, cached, active))


def _list_cached_layers(
    anatomy: LayerGraph, mesh: Mesh, cached: CacheElement, active: DType
) -> list[list[CachedLayer]] | None:
    """List what each layer caches, where vLLM groups layers that differ; None where all attention is full or latent."""
    tp = mesh.degree("tp")
    attentions = [layer.attention for layer in anatomy.layers if layer.attention is not None]
    plain = not any(one.latent or one.besides or one.cross for one in attentions)
    if not plain or not any(layer.state or (layer.attention and layer.attention.window) for layer in anatomy.layers):
        return None
    found = []
    for layer in anatomy.layers:
        some = []
        if layer.attention is not None and not layer.attention.shares_kv and not layer.encoder:
            width = count_elements_per_token(layer.attention, tp) * cached.bits / 8
            some.append(CachedLayer(width, layer.attention.window))
        if layer.state is not None:
            nbytes = _compute_layer_state_bytes(layer.state, active, tp, smallest=True)
            some.append(CachedLayer(Fraction(0), state=nbytes))
        found.append(some)
    return found


def _list_terms(
    anatomy: LayerGraph, held: range, mesh: Mesh, work: ServingWorkload, cached: CacheElement, active: DType
) -> Iterator[MemoryTerm]:
    tp, cp = mesh.degree("tp"), mesh.degree("cp") * work.decode_cp
    layers = anatomy.layers[held.start : held.stop]
    found = _count_attentions(layers)
    pages = -(-work.context // work.page)
    common = {"B": work.batch, "c": work.context, "p": work.page, "bytes": float(cached.bits / 8)}
    for kind, name in (("full", "keys and values"), ("latent", "latent keys and values")):
        some = {one: n for one, n in found.items() if one.kind == kind and not one.shares_kv}
        elements = sum(n * count_elements_per_token(one, tp) for one, n in some.items())
        if elements:
            rank = -(-pages // cp) * work.page
            yield MemoryTerm(
                name,
                "kv cache",
                elements * work.batch * rank * cached.bits // 8,
                f"{_format_elements(kind)} * B * ceil(ceil(c / p) / cp) * p * bytes",
                {**_collect_head_symbols(some, tp), "cp": cp, **common},
                _CACHE_PAGES_SOURCE,
            )
    yield from _list_besides(found, work, cp, cached)
    for window in sorted({one.window for one in found if one.window is not None}):
        some = {one: n for one, n in found.items() if one.window == window}
        elements = sum(n * count_elements_per_token(one, tp) for one, n in some.items())
        kept = [elements * tokens * cached.bits // 8 for tokens in _count_windowed_tokens(window, pages, work)]
        yield MemoryTerm(
            f"keys and values in a window of {window}",
            "kv cache",
            kept[1],
            f"{_format_elements('latent' if any(one.latent for one in some) else 'full')} * min(B * ceil(c / p), "
            "B * (ceil(min(c, w - 1) / p) + 1) + ceil(n / p)) * p * bytes",
            {**_collect_head_symbols(some, tp), **common, "w": window, "n": work.batched_tokens},
            f"SlidingWindowSpec, {_CACHE_PAGES_SOURCE}; at least what transformers' DynamicSlidingWindowLayer keeps, at"
            " most all tokens, where an engine reserves full pages",
            interval=None if work.context < window else (kept[0], kept[2]),
        )
    for pictured in sorted({one.pictured for one in found if one.pictured}):
        some = {one: n for one, n in found.items() if one.pictured == pictured}
        elements = sum(n * count_elements_per_token(one, tp) for one, n in some.items())
        yield MemoryTerm(
            "keys and values of a picture",
            "kv cache",
            elements * work.batch * pictured * cached.bits // 8,
            f"{_format_elements('full')} * B * s * bytes",
            {**_collect_head_symbols(some, tp), "B": work.batch, "s": pictured, "bytes": common["bytes"]},
            "one picture of the most tiles for each sequence, as transformers caches it (MllamaTextCrossAttention)",
        )
    crossing = {one: n for one, n in found.items() if one.cross}
    if crossing:
        source = count_source_tokens(anatomy, work)
        tokens = -(-source // work.page) * work.page
        elements = sum(n * count_elements_per_token(one, tp) for one, n in crossing.items())
        yield MemoryTerm(
            "keys and values of the encoder",
            "kv cache",
            elements * work.batch * tokens * cached.bits // 8,
            f"{_format_elements('full')} * B * ceil(s / p) * p * bytes",
            {**_collect_head_symbols(crossing, tp), **common, "s": source},
            f"CrossAttentionSpec, {_CACHE_PAGES_SOURCE}",
        )
    states = Counter(layer.state for layer in layers if layer.state is not None)
    past = sum(layer.past for layer in layers)
    if states or past:
        most, least = (
            sum(n * _compute_layer_state_bytes(one, active, tp, smallest=small) for one, n in states.items())
            + past * active.bits // 8
            for small in (False, True)
        )
        yield MemoryTerm(
            "states of fixed size",
            "kv cache",
            most * work.batch,
            "B * state",
            {"B": work.batch, "state": most, "L": states.total(), "tp": tp},
            "transformers' LinearAttentionLayer, whose recurrent states are fp32; at least vLLM's "
            "(model_executor/layers/mamba/mamba_utils.py), which keeps them in the model's type unless told otherwise "
            "and the convolution's window without its last token",
            interval=(least * work.batch, most * work.batch) if least < most else None,
        )


def _list_besides(
    found: Mapping[LayerAttention, int], work: ServingWorkload, cp: int, cached: CacheElement
) -> Iterator[MemoryTerm]:
    """List what attention caches besides keys and values, by name."""
    caches = Counter({some: 0 for one in found for some in one.besides})
    for one, n in found.items():
        caches.update(dict.fromkeys(one.besides, n))
    for some, layers in caches.items():
        build = _build_waiting_term if some.waiting else _build_vector_term
        yield build(some, layers, work, cp, cached)


def _build_vector_term(
    some: TokenCache, layers: int, work: ServingWorkload, cp: int, cached: CacheElement
) -> MemoryTerm:
    """A vector for every so many tokens, in pages as those of keys and values."""
    pages = -(-work.context // work.page)
    vectors = -(-(-(-pages // cp) * work.page) // some.tokens)
    kept, packed = (layers * work.batch * vectors * n // 8 for n in (some.elements * cached.bits, some.packed * 8))
    least = layers * work.batch * (work.context // cp // some.tokens) * some.elements * cached.bits // 8
    return MemoryTerm(
        some.name,
        "kv cache",
        kept,
        "L * elements * B * ceil(ceil(ceil(c / p) / cp) * p / tokens) * bytes",
        {
            "L": layers,
            "elements": some.elements,
            "tokens": some.tokens,
            "cp": cp,
            "B": work.batch,
            "c": work.context,
            "p": work.page,
            "bytes": float(cached.bits / 8),
        },
        (
            f"transformers' cache, which has the model's type; of vLLM's a vector has {some.packed} bytes"
            if some.packed
            else f"transformers' cache; {_CACHE_PAGES_SOURCE}, tokens_per_state"
        ),
        interval=(min(kept, packed), max(kept, packed)) if some.packed and some.tokens == 1 else (least, kept),
    )


def _build_waiting_term(
    some: TokenCache, layers: int, work: ServingWorkload, cp: int, cached: CacheElement
) -> MemoryTerm:
    """What waits to be compressed, as a window."""
    _, needed, _ = _count_windowed_tokens(some.waiting, -(-work.context // work.page), work)
    kept = layers * needed * some.packed
    least = layers * work.batch * (work.context // cp % some.tokens) * some.elements * cached.bits // 8
    return MemoryTerm(
        some.name,
        "kv cache",
        kept,
        "L * width * min(B * ceil(c / p), B * (ceil(min(c, w - 1) / p) + 1) + ceil(n / p)) * p",
        {
            "L": layers,
            "width": some.packed,
            "w": some.waiting,
            "B": work.batch,
            "c": work.context,
            "p": work.page,
            "n": work.batched_tokens,
        },
        f"SlidingWindowMLASpec, {_CACHE_PAGES_SOURCE}, in fp32; transformers keeps what is left over, in the model's"
        " type",
        interval=(min(least, kept), kept),
    )


def _count_windowed_tokens(window: int, pages: int, work: ServingWorkload) -> tuple[int, int, int]:
    """Count tokens of all sequences: that are kept at least, that a paged cache needs, and that are reserved at most.

    A query sees the window's tokens, itself among them: of the past, one less. Of new tokens there are no more than
    one forward pass has, over all sequences.
    """
    past, whole = min(work.context, window - 1), work.batch * pages
    needed = work.batch * (-(-past // work.page) + 1) - (-work.batched_tokens // work.page)
    return work.batch * past, min(whole, needed) * work.page, whole * work.page


def _compute_layer_state_bytes(state: LayerState, dtype: DType, tp: int, *, smallest: bool) -> int:
    """Compute bytes of a state of one layer and sequence.

    The `smallest` that an engine may keep, or transformers' own.
    """
    groups = state.grouped // state.groups * count_units_per_rank(state.groups, tp)
    convolution = (count_units_per_rank(state.channels, tp) + groups) * (state.window - smallest)
    wide = BY_NAME["F32"] if state.recurrent_fp32 and not smallest else dtype
    return (convolution * dtype.bits + count_units_per_rank(state.recurrent, tp) * wide.bits) // 8


def _format_elements(kind: str) -> str:
    return "L * latent" if kind == "latent" else "L * 2 * ceil(kv_heads / tp) * head_dim"


def _collect_head_symbols(some: Mapping[LayerAttention, int], tp: int) -> dict[str, float | str]:
    """Collect the symbols of `_format_elements`; where layers differ, those of the layer with the most."""
    one = max(some, key=lambda attention: count_elements_per_token(attention, tp))
    count = sum(some.values())
    if one.latent:
        return {"L": count, "latent": one.latent}
    return {"L": count, "kv_heads": one.kv_heads, "head_dim": one.head_dim, "tp": tp}


def _count_attentions(layers: Sequence[ModelLayer]) -> Counter[LayerAttention]:
    """Count the attentions of each kind that caches; one with KV sharing may cache its indexer's keys."""
    return Counter(
        layer.attention
        for layer in layers
        if layer.attention is not None
        and (not layer.attention.shares_kv or layer.attention.besides)
        and not layer.encoder
        for _ in range(layer.halves)
    )


def _get_dtype(name: str) -> DType:
    if name not in BY_NAME:
        raise UsageError(f"there is no element type {name!r}", hint=f"the types are {', '.join(BY_NAME)}")
    return BY_NAME[name]


def _get_cache_element(anatomy: LayerGraph, name: str) -> CacheElement:
    """Get the element of a cache of the type `name`; raises UsageError where no engine has a cache of that type."""
    if name != "NVFP4":
        return CacheElement(Fraction(_get_dtype(name).bits))
    if any(one.latent or one.besides for layer in anatomy.layers if (one := layer.attention)):
        raise UsageError(
            "--kv-dtype nvfp4 applies to keys and values of heads, but this model caches latents",
            hint="use fp8; vLLM packs latents in a way of its own (nvfp4_ds_mla)",
        )
    return NVFP4
