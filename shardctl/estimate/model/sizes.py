"""Computes how many elements the tensors of one layer have on one rank, by the names that profiles use."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal, get_args

from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.estimate.model.layer_graph import LayerAttention, LayerExperts, ModelLayer
    from shardctl.estimate.workload import TrainingWorkload
    from shardctl.models.tables.layer_features import LayerStyle
    from shardctl.tensors.mesh import Mesh

Size = Literal[
    "sequences",
    "tokens",
    "pairs",
    "hidden",
    "streamed",
    "norms",
    "normed",
    "norm_rows",
    "inputs",
    "readings",
    "drops",
    "head_norms",
    "head_norm_rows",
    "latent_norms",
    "latent_norm_rows",
    "latent_products",
    "rotary_keys",
    "queries",
    "keys",
    "values",
    "repeated_keys",
    "repeated_values",
    "contexts",
    "rows",
    "key_rows",
    "scores",
    "compressed",
    "biases",
    "intermediate",
    "steps",
    "router",
    "chosen",
    "routed_hidden",
    "narrowed",
    "narrow_products",
    "adapter_inputs",
    "routed",
    "expert_routed",
    "expert_hidden",
    "expert_matrix",
    "routed_steps",
    "idle_hidden",
    "chunk_logits",
    "head_matrix",
    "logits",
    "gathered_logits",
    "inner",
    "projected",
    "convolved",
    "low",
    "low_rank",
    "low_states",
    "noted_states",
    "decays",
    "channels",
    "group_rows",
    "state_heads",
    "state_pairs",
    "pair_rows",
    "final_states",
    "padding",
    "chunk_states",
    "chunk_products",
    "split_products",
    "grouped",
]
"""What a tensor's elements are counted by. `sequences`, `tokens`: one per sequence; per token. `pairs`: one per
query and key, of all heads together. `hidden`: a token's; `streamed`: of its further states, where it has several.
`norms`, `norm_rows`,
`normed`: of all norms of whole tokens; of their statistics; of what they norm. `inputs`: of what enters attention and
MLP. `readings`: of that, once more for each further matrix that reads it. `drops`: of the outputs that dropout changes.
`head_norms`, `head_norm_rows`: of norms of queries and keys. `latent_norms`, `latent_products`: what latent attention
compresses to; what it makes keys and values from. `rotary_keys`: of its keys' rotary part, which all heads share.
`repeated_...`: keys, values, once per query head. `contexts`: attention's result. `rows`, `key_rows`: one per query and
head; one per key and head. `scores`: one per query, key and head. `compressed`: one
per vector that is made of several tokens and attended to, too. `biases`: that, but once for all sequences.
`intermediate`: of dense MLPs and shared experts. `steps`: of results within the activation function. `router`: tokens
times experts. `chosen`: tokens times experts chosen. `routed_hidden`, `routed`, `routed_steps`: of the tokens that this
rank's experts get; `expert_routed`, `expert_hidden`, `expert_matrix`: of those that one of them gets, as many as of any
other; of one of its matrices; `narrowed`: of their latents; `narrow_products`: of a token's products with the first
matrices of adapters; `adapter_inputs`: of what those read; `idle_hidden`: of those that idle experts give back.
`logits`, `gathered_logits`: of this rank's part of the vocabulary; of all; `chunk_logits`: those of the tokens whose
loss is computed at once; `head_matrix`: the head's weights.

Of recurrent layers: `inner`: of the channels that the states are read into. `projected`, `convolved`: of what a token
is projected to; of what of it is convolved. `low`, `low_rank`, `low_states`: of time steps with B and C before they
are projected, of the former and of the latter (Mamba). `noted_states`: that a kernel notes on its way. `decays`: of
the exponents, which are parameters. `channels`: one per channel. `group_rows`, `state_heads`: one per token and
group; and head of states. `state_pairs`, `pair_rows`: of queries and keys of linear attention; one per each of their
heads. `final_states`, `padding`, `chunk_states`: of the states of each sequence; of what pads its convolution; of
the states of each chunk of tokens. `chunk_products`: one
per two tokens of a chunk, and group or head. `split_products`: those of a kernel that adds up in parts. `grouped`: of
what the heads of a group share (B and C)."""

SIZES: Final[tuple[Size, ...]] = get_args(Size)


@value_class
class MicrobatchShare:
    """What one rank computes of one microbatch."""

    batch: int
    """Sequences."""
    queries: int
    """Tokens of each sequence whose results are this rank's: cp divides them."""
    keys: int
    """Tokens of each sequence that they attend to."""
    tp: int
    etp: int

    @classmethod
    def of(cls, mesh: Mesh, work: TrainingWorkload) -> MicrobatchShare:
        """Return the share of every rank of `mesh`."""
        queries = -(-work.sequence // mesh.degree("cp"))
        return cls(work.micro_batch, queries, work.sequence, mesh.degree("tp"), mesh.degree("etp"))

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return self.batch * self.queries


def compute_layer_sizes(layer: ModelLayer, style: LayerStyle, share: MicrobatchShare) -> Mapping[Size, float]:
    """Compute the elements of each size in one layer, besides those of a recurrent state; those not named have none.

    tp divides heads, intermediate and routed tokens here; what sequence parallelism divides is for a profile to say.
    """
    if layer.attention is not None and layer.attention.kind == "cross" and not layer.attention.pictured:
        return {}  # without a picture such a layer is passed over
    n, hidden = share.tokens, layer.hidden
    cross = layer.attention is not None and layer.attention.cross
    both = layer.mixes and layer.feeds
    # One norm may be before both, which then run side by side.
    inputs = (min(2, layer.norms) if style.side_by_side else 2 * layer.halves + cross) if both else 1
    sizes: dict[Size, float] = {
        "sequences": share.batch,
        "tokens": n,
        "pairs": n * share.keys,
        "hidden": n * hidden,
        "streamed": n * hidden * (layer.streams - 1),
        "norms": n * hidden * layer.norms,
        "norm_rows": n * layer.norms,
        "normed": n * hidden * (1 if both and style.side_by_side else layer.norms),
        "inputs": n * hidden * inputs,
        "drops": n * hidden * (bool(both and not style.undropped) + 1 + cross),
    }
    sizes["readings"] = max(0.0, n * hidden * layer.readers - sizes["inputs"])
    if layer.attention is not None:
        passes = replace(share, batch=share.batch * layer.halves)
        _add_attention_sizes(
            sizes, layer.attention, style, passes, normed=layer.head_norm is not None, whole=layer.head_norm_whole
        )
    dense = layer.mlp + (layer.experts.shared if layer.experts is not None else 0)
    sizes["intermediate"] = n * layer.halves * -(-dense // share.tp)
    sizes["steps"] = sizes["intermediate"] * style.steps
    if layer.experts is not None:
        if style.wide_router and not dense:
            sizes["inputs"] -= n * hidden  # only the router's fp32 copy of it is kept
        _add_expert_sizes(sizes, layer.experts, hidden, share, every=style.every_expert)
        sizes["routed_steps"] = sizes["routed"] * style.expert_steps
    return sizes


def compute_head_sizes(hidden: int, vocabulary: int, share: MicrobatchShare, chunk: int = 0) -> Mapping[Size, float]:
    """Compute the elements of each size in the last norm and the head; `chunk` are tokens of a chunk of the loss."""
    n = share.tokens
    return {
        "tokens": n,
        "hidden": n * hidden,
        "norms": n * hidden,
        "normed": n * hidden,
        "norm_rows": n,
        "inputs": n * hidden,
        "logits": n * -(-vocabulary // share.tp),
        "gathered_logits": n * vocabulary,
        "chunk_logits": chunk * -(-vocabulary // share.tp),
        "head_matrix": hidden * -(-vocabulary // share.tp),
    }


def _add_attention_sizes(
    sizes: dict[Size, float],
    attention: LayerAttention,
    style: LayerStyle,
    share: MicrobatchShare,
    *,
    normed: bool,
    whole: bool,
) -> None:
    """Add self attention, and that to the encoder with it, which is taken to have as many tokens as the decoder."""
    n = share.tokens * (1 + attention.cross)
    heads = -(-attention.heads // share.tp)
    kv_heads = max(1, -(-attention.kv_heads // share.tp))
    wide, value = attention.head_dim, attention.value_dim
    pictured = attention.kind == "cross"
    seen, keys = (share.batch * attention.pictured, attention.pictured) if pictured else (n, share.keys)
    if attention.compressed:
        vectors = share.batch * (share.queries // attention.compressed)
        seen, keys = seen + vectors, keys + share.keys // attention.compressed
        sizes["compressed"] = vectors
    sizes["queries"] = n * heads * wide
    sizes["keys"] = seen * kv_heads * wide
    sizes["values"] = seen * kv_heads * value
    sizes["repeated_keys"], sizes["repeated_values"] = seen * heads * wide, seen * heads * value
    sizes["contexts"] = n * heads * value
    sizes["rows"] = n * heads
    sizes["key_rows"] = seen * kv_heads
    # Windows change nothing here: what is not fused computes all scores, and then masks them.
    sizes["scores"] = n * heads * keys
    if style.position_biases:
        sizes["biases"] = heads * share.queries * share.keys
    if normed:
        sizes["head_norms"] = sizes["queries"] + sizes["keys"]
        sizes["head_norm_rows"] = n + seen if whole else sizes["rows"] + sizes["key_rows"]
    if attention.shares_kv and attention.kind != "latent":  # which an earlier layer keeps, and norms
        own: tuple[Size, ...] = () if heads != kv_heads else ("repeated_keys", "repeated_values")
        sizes |= dict.fromkeys(("keys", "values", "key_rows", *own), 0)
        if normed:
            sizes["head_norms"], sizes["head_norm_rows"] = sizes["queries"], n * (1 if whole else heads)
    if attention.kind == "latent":
        sizes["latent_norms"] = n * (attention.query_rank + attention.key_rank)
        sizes["latent_norm_rows"] = n * (bool(attention.query_rank) + 1)
        sizes["rotary_keys"] = n * (attention.latent - attention.key_rank)
        sizes["latent_products"] = n * heads * (wide - (attention.latent - attention.key_rank) + value)


def _add_expert_sizes(
    sizes: dict[Size, float], experts: LayerExperts, hidden: int, share: MicrobatchShare, *, every: bool
) -> None:
    """Add experts, with tokens routed evenly: each group of `etp` ranks gets its part of those of all ranks."""
    idle = experts.idle / experts.count
    routed = share.tokens * (experts.count if every else experts.chosen * (1 - idle)) * share.etp / share.tp
    sizes["idle_hidden"] = share.tokens * experts.chosen * idle * hidden
    sizes["router"] = share.tokens * experts.count
    sizes["chosen"] = share.tokens * experts.chosen
    sizes["routed_hidden"] = routed * (experts.width or hidden)
    sizes["narrowed"] = share.tokens * experts.width
    sizes["routed"] = routed * -(-experts.size // share.etp)
    alike = experts.count - experts.idle
    sizes["expert_routed"], sizes["expert_hidden"] = sizes["routed"] / alike, sizes["routed_hidden"] / alike
    sizes["expert_matrix"] = (experts.width or hidden) * -(-experts.size // share.etp)
