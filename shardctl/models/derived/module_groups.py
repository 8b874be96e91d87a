"""Finds what belongs together in a layer: linears that produce an activation by columns, and the one that sums it.

A circuit is cut as a whole or not at all: its inputs by rows of the weight, its output by columns, in whole heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardctl.models.derived.stored_modules import ModuleTree, StoredModule

QUERIES: Final = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("self.query", "self.key", "self.value"),
    ("attention.query", "attention.key", "attention.value"),
    ("query_proj", "key_proj", "value_proj"),
    ("self.query_proj", "self.key_proj", "self.value_proj"),
    ("wq", "wk", "wv"),
    ("Wq", "Wk", "Wv"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("q_linear", "k_linear", "v_linear"),
    ("q_proj.linear", "k_proj.linear", "v_proj.linear"),
    ("to_q", "to_k", "to_v"),
    ("linear_q", "linear_k", "linear_v"),
    ("query_net", "key_net", "value_net"),
    ("project_q", "project_k", "project_v"),
)
"""What linears are called that make queries, keys and values."""
FUSED_QUERIES: Final = (
    *("qkv_proj", "qkv", "Wqkv", "wqkv", "c_attn", "query_key_value", "qkv_linear", "att_proj"),
    *("self_attn.in_proj", "in_proj_weight"),
)
"""What linears are called that make all three."""
OUTPUTS: Final = (
    *("o_proj", "out_proj", "output.dense", "dense", "wo", "o", "out_lin", "to_out", "to_out.0", "linear_out", "proj"),
    *("c_proj", "output_proj", "out", "Wo", "output", "projection", "projection_layer", "output_linear", "post"),
    *("out_projection", "attention_out", "o_proj.linear"),
)
"""What the linear after attention is called."""
GATED: Final = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("w1", "v1", "w2"),
    ("wi_0", "wi_1", "wo"),
    ("c_fc_0", "c_fc_1", "c_proj"),
    ("gate", "up", "down"),
    ("linear_gate", "up_proj", "down_proj"),
    ("fc1", "fc3", "fc2"),
    ("w_in.w_0", "w_in.w_1", "w_out"),
    ("linear", "linear_v", "linear_1"),
)
"""What the linears of an MLP with a gate are called: gate, up, down."""
FUSED_GATED: Final = (
    ("gate_up_proj", "down_proj"),
    ("up_gate_proj", "down_proj"),
    ("w12", "w3"),
    ("weights_in", "weights_out"),
    ("input_linear", "output_linear"),
    ("Wi", "Wo"),
    ("experts.fc1", "experts.fc2"),
    ("experts.w13_weight", "experts.w2_weight"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("fc1", "fc2"),
)
"""The same with gate and up in one array, one after the other."""
PLAIN: Final = (
    ("up_proj", "down_proj"),
    ("fc1", "fc2"),
    ("c_fc", "c_proj"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("fc_in", "fc_out"),
    ("lin1", "lin2"),
    ("linear1", "linear2"),
    ("linear_1", "linear_2"),
    ("linear_fc1", "linear_fc2"),
    ("wi", "wo"),
    ("w1", "w2"),
    ("w_1", "w_2"),
    ("fc_1", "fc_2"),
    ("ffw_layer_1", "ffw_layer_2"),
    ("intermediate.dense", "output.dense"),
    ("intermediate_dense", "output_dense"),
    ("dense1", "dense2"),
    ("dense_in", "dense_out"),
    ("mlp.in_proj", "mlp.out_proj"),
    ("ffn.0", "ffn.2"),
)
"""What the linears of an MLP without a gate are called."""


@value_class
class AttentionGroup:
    """Queries, keys and values, and the output that sums over heads."""

    owner: str
    queries: StoredModule
    keys: StoredModule
    values: StoredModule
    output: StoredModule


@value_class
class FusedAttentionGroup:
    """The same with one linear for queries, keys and values."""

    owner: str
    fused: StoredModule
    output: StoredModule


@value_class
class SharedAttentionGroup:
    """Attention of a layer whose keys and values are those of another layer."""

    owner: str
    queries: StoredModule
    output: StoredModule


@value_class
class LatentAttentionGroup:
    """Attention whose keys and values come from a latent: what expands it is cut by heads, the latent is whole."""

    owner: str
    expanding: tuple[StoredModule, ...]
    latent: tuple[StoredModule, ...]
    output: StoredModule


@value_class
class FeedForwardGroup:
    """An MLP."""

    owner: str
    inputs: tuple[StoredModule, ...]
    output: StoredModule
    joinable: bool
    """Whether an input of twice the width holds gate and up, one after the other."""


Circuit = AttentionGroup | FusedAttentionGroup | SharedAttentionGroup | LatentAttentionGroup | FeedForwardGroup


def list_circuits(tree: ModuleTree) -> Iterator[Circuit]:
    """List the circuits that names show, the surest first; of several with one module, the first counts."""
    for path, module in tree.modules.items():
        owner, _, last = path.rpartition(".")
        if last in _LATENT_KV_MODULES:
            yield from _find_latent(tree, owner, module)
        if last in _QUERIES_ALONE:
            yield from _find_shared(tree, owner, module)
        for names in _ATTENTION_STARTS.get(last, ()):
            yield from _find_attention(tree, path, names)
        for name in _FUSED_STARTS.get(last, ()):
            yield from _find_fused(tree, path, name)
    for starts in (_GATED_STARTS, _PLAIN_STARTS):
        for path in tree.modules:
            for names in starts.get(path.rpartition(".")[2], ()):
                yield from _find_forward(tree, path, names, gated=starts is _GATED_STARTS)


_LATENT_KV_MODULES: Final = ("kv_b_proj", "kv_b")
_QUERIES_ALONE: Final = ("q_proj",)
"""What queries are called in layers that take keys and values from another layer."""


def _index_starts(every: Iterable[tuple[str, ...]]) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Index the names of circuits by the last word of the first."""
    found: dict[str, tuple[tuple[str, ...], ...]] = {}
    for names in every:
        last = names[0].rpartition(".")[2]
        found[last] = (*found.get(last, ()), names)
    return found


_FUSED_STARTS: Final = {name.rpartition(".")[2]: (name,) for name in FUSED_QUERIES}
_ATTENTION_STARTS: Final = _index_starts(QUERIES)
_GATED_STARTS: Final = _index_starts((*GATED, *FUSED_GATED))
_PLAIN_STARTS: Final = _index_starts(PLAIN)


def _find_owner(path: str, name: str) -> str | None:
    """Return what stands before `name` in a path that ends with it."""
    if path == name:
        return ""
    return path.removesuffix(f".{name}") if path.endswith(f".{name}") else None


def _find_one(tree: ModuleTree, owner: str, names: tuple[str, ...], other: set[str]) -> StoredModule | None:
    """Return the one matrix within `owner` that is called by one of `names`; None if there are several, or none."""
    found = [m for name in names if (m := tree.find(owner, name)) is not None and m.path not in other and m.is_matrix]
    return found[0] if len(found) == 1 else None


def _find_attention(tree: ModuleTree, path: str, names: tuple[str, ...]) -> Iterator[Circuit]:
    owner = _find_owner(path, names[0])
    if owner is None:
        return
    found = [tree.find(owner, name) for name in names]
    output = _find_one(tree, owner, OUTPUTS, {m.path for m in found if m is not None})
    if all(m is not None and m.is_matrix for m in found) and output is not None:
        queries, keys, values = (m for m in found if m is not None)
        yield AttentionGroup(owner, queries, keys, values, output)


def _find_fused(tree: ModuleTree, path: str, name: str) -> Iterator[Circuit]:
    if _find_owner(path, name) is None:
        return
    owner = path.rpartition(".")[0]
    output = _find_one(tree, owner, OUTPUTS, {path})
    if output is not None:
        yield FusedAttentionGroup(owner, tree.modules[path], output)


def _find_latent(tree: ModuleTree, owner: str, module: StoredModule) -> Iterator[Circuit]:
    queries = tree.find(owner, "q_b_proj") or tree.find(owner, "q_proj")
    output = _find_one(tree, owner, OUTPUTS, set())
    if queries is not None and output is not None:
        names = ("q_a_proj", "kv_a_proj_with_mqa", "kv_a_proj", "q_a_layernorm", "kv_a_layernorm")
        latent = tuple(m for name in names if (m := tree.find(owner, name)) is not None)
        yield LatentAttentionGroup(owner, (queries, module), latent, output)


def _find_shared(tree: ModuleTree, owner: str, queries: StoredModule) -> Iterator[Circuit]:
    output = _find_one(tree, owner, OUTPUTS, {queries.path})
    alone = not any(tree.find(owner, name) for name in ("k_proj", "v_proj", *_LATENT_KV_MODULES))
    if alone and queries.is_matrix and output is not None:
        yield SharedAttentionGroup(owner, queries, output)


def _find_forward(tree: ModuleTree, path: str, names: tuple[str, ...], *, gated: bool) -> Iterator[Circuit]:
    owner = _find_owner(path, names[0])
    if owner is None:
        return
    found = [tree.find(owner, name) for name in names]
    if any(m is None for m in found):
        return
    *inputs, output = (m for m in found if m is not None)
    if gated and names in PLAIN and (not output.is_matrix or inputs[0].shape != (2 * output.shape[1], output.shape[0])):
        return
    yield FeedForwardGroup(owner, tuple(inputs), output, gated and names in FUSED_GATED)
