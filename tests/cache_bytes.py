"""Bytes that a plan's caches take, by what they are for."""

from __future__ import annotations

from fractions import Fraction

from shardctl.estimate.model.rank_shards import RankShards
from shardctl.estimate.serving.kv_cache import list_cache_terms
from shardctl.estimate.workload import ServingWorkload
from shardctl.tensors.mesh import Mesh

CROSS = "keys and values of the encoder"
STATES = "states of fixed size"


def hold_layers(shape, layers=None):
    """A rank that holds all layers, or some."""
    return RankShards(0, "only", {}, 1, 0, layers if layers is not None else range(len(shape.layers)), ())


def _sum_terms(shape, work, dtype, tp, layers, wanted):
    terms = list_cache_terms(shape, hold_layers(shape, layers), Mesh.of(tp=tp), work, dtype=dtype)
    return sum(term.nbytes for term in terms if wanted(term.name))


def bytes_per_token(shape, *, dtype, tp=1, layers=None):
    """Of one sequence, as long as it is within every window: without states, and without what waits."""
    attentions = [layer.attention for layer in shape.layers if layer.attention is not None]
    tokens = max((some.tokens for one in attentions for some in one.besides), default=1)
    work = ServingWorkload(tokens, 1, page=1)
    grown = _sum_terms(
        shape, work, dtype, tp, layers, lambda name: name not in (CROSS, STATES) and "that wait" not in name
    )
    return Fraction(grown, tokens)


def bytes_per_source_token(shape, *, dtype):
    """Of one token of the encoder that a decoder attends to."""
    return _sum_terms(shape, ServingWorkload(1, 1, page=1, source=1), dtype, 1, None, lambda name: name == CROSS)


def state_bytes(shape, *, dtype, tp=1):
    """Of the states of one sequence."""
    return _sum_terms(shape, ServingWorkload(1, 1, page=1), dtype, tp, None, lambda name: name == STATES)
