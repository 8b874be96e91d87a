"""Counts the floating-point operations of a rank, for its weights and for attention.

A matrix costs two operations per parameter and token; attention costs two per token, key and element of the heads for
the scores, and as many for their values (Narayanan et al. 2021, appendix; Hoffmann et al. 2022, appendix F). A causal
mask halves the latter, for kernels skip what it hides; those formulas count it whole.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardctl.estimate.model.layer_graph import LayerAttention, LayerExperts, LayerGraph, ModelLayer
    from shardctl.estimate.model.rank_shards import RankShards
    from shardctl.tensors.mesh import Mesh


def count_matrix_operations(anatomy: LayerGraph, holding: RankShards, mesh: Mesh, tokens: float) -> float:
    """Count operations of a forward pass of `tokens` tokens per data-parallel rank through the matrices of a rank.

    An embedding is looked up, which costs none, unless the last stage has it as its head. Of routed experts those
    count that tokens go to, evenly.
    """
    last = holding.stage == mesh.degree("pp") - 1
    routed = _compute_routed_tokens(anatomy, mesh)
    dense, expert = holding.multiplied(last=last)
    return 2 * dense * tokens + 2 * expert * tokens * routed


def count_attention_operations(
    layers: Sequence[ModelLayer], mesh: Mesh, tokens: float, context: float, *, masked: bool = False
) -> float:
    """Count operations of one forward pass for scores and values: each of `tokens` tokens looks at `context` others.

    tp divides the heads. Of a sliding window no more than the window is looked at, and where it is `masked`, a decoder
    looks at what came before: half of its own tokens, and all of an encoder's. Where an indexer chooses tokens, it
    scores all of them on every rank, and attention looks at those that it chose.
    """
    return sum(
        2
        * tokens
        * layer.halves
        * (
            _count_attended_tokens(layer, layer.attention, context, masked=masked)
            * _compute_attention_width(layer.attention)
            / mesh.degree("tp")
            + _count_scored_tokens(layer, layer.attention, context, masked=masked)
            * _compute_indexer_width(layer.attention)
        )
        for layer in layers
        if layer.attention
    )


def compute_used_share(anatomy: LayerGraph, holding: RankShards, mesh: Mesh) -> float:
    """Compute the operations of a rank for each of its weights and tokens, over those of a model without experts.

    Each token goes to few of the experts, and those of a rank get some tokens of other ranks.
    """
    dense, expert = (holding.gathered(expert=of_expert) for of_expert in (False, True))
    return (dense + expert * _compute_routed_tokens(anatomy, mesh)) / (dense + expert) if expert else 1.0


def compute_touched_share(anatomy: LayerGraph, mesh: Mesh, tokens: float) -> float:
    """Compute the part of a rank's experts that `tokens` tokens per data-parallel rank are expected to go to.

    Each token chooses evenly: `1 - (1 - chosen / count) ** tokens` of all that one set of experts serves.
    """
    experts = _find_experts(anatomy)
    if experts is None:
        return 1.0
    together = tokens * mesh.ep * mesh.etp / mesh.degree("tp")
    return 1.0 - math.pow(1 - experts.chosen / experts.count, together)


def _count_seen_tokens(layer: ModelLayer, attention: LayerAttention, context: float, *, masked: bool) -> float:
    if attention.kind == "cross":
        return attention.pictured
    own = context / 2 if masked and not layer.encoder else context
    if attention.window is not None:
        own = min(own, attention.window)
    return own + (context if attention.cross else 0)


def _count_attended_tokens(layer: ModelLayer, attention: LayerAttention, context: float, *, masked: bool) -> float:
    """Those of the window, or all, or those that are chosen; of compressed ones besides."""
    seen = _count_seen_tokens(layer, attention, context, masked=masked)
    scored = _count_scored_tokens(layer, attention, context, masked=masked)
    taken = scored if attention.chosen is None else min(scored, attention.chosen)
    return seen + taken if attention.compressed else taken


def _count_scored_tokens(layer: ModelLayer, attention: LayerAttention, context: float, *, masked: bool) -> float:
    """Those that attention or its indexer chooses of: all that it sees, or compressed ones."""
    if attention.compressed:
        return (context / 2 if masked and not layer.encoder else context) / attention.compressed
    return _count_seen_tokens(layer, attention, context, masked=masked)


def _compute_indexer_width(attention: LayerAttention) -> int:
    return attention.indexer.heads * attention.indexer.width if attention.indexer else 0


def _compute_attention_width(attention: LayerAttention) -> int:
    return attention.heads * (attention.head_dim + attention.value_dim)


def _find_experts(anatomy: LayerGraph) -> LayerExperts | None:
    return next((layer.experts for layer in anatomy.layers if layer.experts), None)


def _compute_routed_tokens(anatomy: LayerGraph, mesh: Mesh) -> float:
    """Compute how many tokens each expert gets for each of a data-parallel rank, if all are chosen equally often.

    The ranks that share one set of experts have `ep * etp / tp` times the tokens of one.
    """
    experts = _find_experts(anatomy)
    if experts is None:
        return 1.0
    return experts.chosen / experts.count * mesh.ep * mesh.etp / mesh.degree("tp")
