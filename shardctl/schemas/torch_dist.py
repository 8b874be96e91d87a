"""The arrays of Megatron-LM's distributed checkpoints: global ones, whatever mesh writes or reads them.

Names and shapes are those of `sharded_state_dict` in Megatron-LM core 0.12 to 0.16: `transformer/transformer_block.py`
(layers stacked along a new first dim, or each by its number), `transformer/moe/experts.py` (the same of experts),
`transformer/mlp.py` (gate over up, or two arrays) and `transformer/attention.py` (queries, keys and values of a group
one behind another). Norms are named by the projection that follows them, whatever module they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from shardctl.errors import UnsupportedError
from shardctl.schemas.composite import Composite, Entry, join, stack
from shardctl.schemas.schema import Parts, Schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardctl.dialect import Dialect
    from shardctl.models import Model

NAME: Final = "torch_dist"
TITLE: Final = "Megatron-LM"
LAYERS: Final = "layers_by_number"
"""The fact that says whether each layer has arrays of its own; else those of all are stacked."""
EXPERTS: Final = "experts_by_number"
"""The same of experts."""
HALVES: Final = "halves"
"""The fact that says whether gate and up projection are two arrays; else one is over the other."""
SEPARATE_NORMS: Final = "separate_norms"
"""The fact that says whether norms are named as modules of their own (1) or by the projection behind them (0): those
before attention, before an MLP, before experts."""
VOCABULARY: Final = "vocabulary"
"""The fact that says to how many rows the vocabulary is padded; not at all without it."""
FAMILIES: Final = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"})
_EMBEDDING: Final = "model.embed_tokens.weight"
_HEAD: Final = "lm_head.weight"
_NORM: Final = "model.norm.weight"
_KINDS: Final = ("weight", "bias")
_ROUTED: Final = (("block_sparse_moe", ("w1", "w3", "w2")), ("mlp", ("gate_proj", "up_proj", "down_proj")))


@dataclass(frozen=True, slots=True)
class Layer:
    """The arrays of one layer, by Megatron-LM's names without the layer's; those of experts by their numbers."""

    arrays: dict[str, Composite] = field(default_factory=dict)
    experts: list[dict[str, Composite]] = field(default_factory=list)


def _entries(model: Model, dialect: Dialect, rank: int) -> Iterator[Entry]:
    del rank  # arrays are global
    check_model(model)
    parts = Parts(model, TITLE)
    padded = dialect.number(VOCABULARY)

    def vocabulary(name: str) -> Composite:
        whole = parts[name]
        return whole.padded(padded) if padded else whole

    yield Entry("embedding.word_embeddings.weight", vocabulary(_EMBEDDING))
    layers = [layer(parts, number, dialect) for number in range(model.layers)]
    parts.refuse_others(_placed(layers) | {_EMBEDDING, _NORM, _HEAD})
    if dialect.switch(LAYERS):
        for number, each in enumerate(layers):
            yield from _single(each, f"decoder.layers.{number}.", dialect)
    else:
        yield from _stacked(layers, dialect)
    yield Entry("decoder.final_layernorm.weight", parts[_NORM])
    if _HEAD not in model.aliases:
        yield Entry("output_layer.weight", vocabulary(_HEAD))


def _single(each: Layer, prefix: str, dialect: Dialect) -> Iterator[Entry]:
    """The arrays of a layer that is not stacked."""
    for name, content in each.arrays.items():
        yield Entry(prefix + name, content)
    yield from _of_experts(each.experts, f"{prefix}mlp.experts.experts", dialect, lambda one: one)


def _stacked(layers: list[Layer], dialect: Dialect) -> Iterator[Entry]:
    """The arrays of all layers, one behind another along a new first dim."""
    unlike = next((n for n, each in enumerate(layers) if each.arrays.keys() != layers[0].arrays.keys()), None)
    if unlike is not None or len({len(each.experts) for each in layers}) > 1:
        raise UnsupportedError(f"{TITLE} stacks layers that are alike, and layer {unlike or 0} is unlike others")
    for name in layers[0].arrays:
        yield Entry(f"decoder.layers.{name}", stack([each.arrays[name] for each in layers]))
    numbers = range(len(layers[0].experts))
    across = [
        {name: stack([each.experts[n][name] for each in layers]) for name in layers[0].experts[n]} for n in numbers
    ]
    yield from _of_experts(across, "decoder.layers.mlp.experts.experts", dialect, _experts_second)


def _of_experts(
    experts: list[dict[str, Composite]], prefix: str, dialect: Dialect, place: Callable[[Composite], Composite]
) -> Iterator[Entry]:
    if dialect.switch(EXPERTS):
        for number, each in enumerate(experts):
            for name, content in each.items():
                yield Entry(f"{prefix}.{number}.{name}", content)
    elif experts:
        for name in experts[0]:
            yield Entry(f"{prefix}.{name}", place(stack([each[name] for each in experts])))


def _experts_second(stacked: Composite) -> Composite:
    """``[E, L, ...]`` as ``[L, E, ...]``."""
    return stacked.permuted((1, 0, *range(2, len(stacked.shape))))


def layer(parts: Parts, number: int, dialect: Dialect) -> Layer:
    """What Megatron-LM makes of a layer of the model."""
    have, found = f"model.layers.{number}", Layer()
    arrays, attention = found.arrays, f"{have}.self_attn"
    routed = next((each for each in _ROUTED if f"{have}.{each[0]}.gate.weight" in parts), None)
    before, behind = norms(dialect, routed=routed is not None)
    arrays[before] = parts[f"{have}.input_layernorm.weight"]
    arrays["self_attention.linear_proj.weight"] = parts[f"{attention}.o_proj.weight"]
    for kind in _KINDS:
        if f"{attention}.q_proj.{kind}" in parts:
            arrays[f"self_attention.linear_qkv.{kind}"] = _by_group(parts, attention, kind)
    for part in "qk":
        if f"{attention}.{part}_norm.weight" in parts:
            arrays[f"self_attention.{part}_layernorm.weight"] = parts[f"{attention}.{part}_norm.weight"]
    arrays[behind] = parts[f"{have}.post_attention_layernorm.weight"]
    if routed is None:
        names = ("gate_proj", "up_proj", "down_proj")
        arrays |= {f"mlp.{name}": content for name, content in _gated(parts, f"{have}.mlp", names, dialect).items()}
        return found
    module, names = routed
    router = parts[f"{have}.{module}.gate.weight"]
    arrays["mlp.router.weight"] = router
    for expert in range(router.shape[0]):
        found.experts.append(_gated(parts, f"{have}.{module}.experts.{expert}", names, dialect))
    return found


def norms(dialect: Dialect, *, routed: bool) -> tuple[str, str]:
    """The names of the norms before attention and before the MLP, `routed` if that is one of experts."""
    before, dense, experts = dialect.numbers(SEPARATE_NORMS) or (0, 0, 0)
    behind = experts if routed else dense
    return (
        "input_layernorm.weight" if before else "self_attention.linear_qkv.layer_norm_weight",
        "pre_mlp_layernorm.weight" if behind else "mlp.linear_fc1.layer_norm_weight",
    )


def _by_group(parts: Parts, attention: str, kind: str) -> Composite:
    """For each head of keys its heads of queries, itself, and its head of values."""
    q, k, v = (parts[f"{attention}.{part}_proj.{kind}"] for part in "qkv")
    groups = k.shape[0] // parts.unit(f"{attention}.k_proj.weight")
    return join([part.share(0, group, groups) for group in range(groups) for part in (q, k, v)])


def _gated(parts: Parts, have: str, names: tuple[str, str, str], dialect: Dialect) -> dict[str, Composite]:
    gate, up, down = (parts[f"{have}.{name}.weight"] for name in names)
    halves = dialect.switch(HALVES)
    first = (
        {"linear_fc1.weight_w": gate, "linear_fc1.weight_v": up} if halves else {"linear_fc1.weight": join([gate, up])}
    )
    return {**first, "linear_fc2.weight": down}


def _placed(layers: list[Layer]) -> set[str]:
    """The tensors that have a place in a layer."""
    composites = [c for each in layers for part in (each.arrays, *each.experts) for c in part.values()]
    return {piece.tensor for composite in composites for piece in composite.pieces}


def check_model(model: Model) -> None:
    """Raise UnsupportedError for a model that is not laid out as here."""
    if model.unquantised:
        raise UnsupportedError(
            f"{TITLE} has forms of its own for quantised weights, which are not known here",
            hint="convert the model's weights in bfloat16",
        )
    if model.family not in FAMILIES or not model.architecture.endswith("ForCausalLM"):
        raise UnsupportedError(
            f"{TITLE}'s distributed checkpoints of {model.architecture or 'this model'} are not known here",
            hint=f"known are models for text of {', '.join(sorted(FAMILIES))}",
        )


def _left_out(model: Model, dialect: Dialect) -> frozenset[str]:
    """Buffers that are computed from the config."""
    del dialect
    return frozenset(tensor.name for tensor in model.tensors.values() if tensor.row.buffer)


SCHEMA: Final = Schema(NAME, TITLE, _entries, _left_out)
