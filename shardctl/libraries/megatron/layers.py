"""Describes what Megatron-LM makes of a model: whole arrays under megatron-core's local names, and their cuts.

Names and cuts are those of Megatron-LM core 0.16: `transformer/attention.py` (queries, keys and values of a group one
behind another; `multi_latent_attention.py` for DeepSeek's), `transformer/mlp.py` (gate over up), `transformer/moe`
(router, experts, the shared expert and its gate) and `models/common/embeddings`. A rank's part of an array is the join
of its part of each piece: `[gate; up]` of a rank is its gate over its up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import UnsupportedError
from shardctl.base.value import value_class
from shardctl.libraries.arrays.composite import CompositeArray, interleave_arrays, join_arrays
from shardctl.libraries.arrays.schema import ModelParts
from shardctl.libraries.megatron import hybrid_layers as hybrid
from shardctl.libraries.megatron.delta_layers import divide_gated_queries, list_delta_arrays
from shardctl.libraries.megatron.family_features import MISSING, TRAITS
from shardctl.libraries.megatron.ranks import TITLE
from shardctl.libraries.megatron.turning_layers import list_sinks, list_turning_experts
from shardctl.libraries.megatron.whole_array import WholeArray
from shardctl.tensors.manifest import GAMMA_LESS_ONE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.models import Model
    from shardctl.tensors.naming_scheme import NamingScheme

BY_GROUP, BY_HEAD, BY_KIND = "by group", "by head", "by kind"
"""How rows of queries, keys and values follow each other: since `checkpoint_version` 2.0, in 1.0, and in 0.

In 1.0 the first row of a head's query, of its key and of its value take turns with the second and so on; in 0 all
queries of a rank stand before all its keys (`fix_query_key_value_ordering` of `megatron/training/checkpointing.py`).
"""
ZERO_CENTRED: Final = "zero_centred"
"""The fact that says whether norms keep their weights less one (`--apply-layernorm-1p`)."""
_PARAMETER_NAMES: Final = ("weight", "bias")
_LATENT_PROJECTIONS: Final = (
    ("linear_q_proj", "q_proj", True),
    ("linear_q_down_proj", "q_a_proj", False),
    ("linear_q_up_proj", "q_b_proj", True),
    ("linear_kv_down_proj", "kv_a_proj_with_mqa", False),
    ("linear_kv_up_proj", "kv_b_proj", True),
)
"""Projections of latent attention, and whether they are those of heads, which are cut in any case."""
_LATENT_NORMS: Final = (("q_layernorm", "q_a_layernorm"), ("kv_layernorm", "kv_a_layernorm"))
_MOE_MODULES: Final = (("block_sparse_moe", ("w1", "w3", "w2")), ("mlp", ("gate_proj", "up_proj", "down_proj")))
ROUTERS: Final = (*(f"{module}.gate" for module, _ in _MOE_MODULES), "mixer.gate", "mlp.router")
"""How routers of layers are called."""
_MXFP4_BLOCKS_SUFFIX: Final = ".experts.down_proj_blocks"
"""How gpt-oss's experts in MXFP4 end, which its table has beside the others."""
_SHARED_EXPERT_MODULES: Final = ("shared_expert", "shared_experts")
_GPT2_MODULES: Final = (
    ("input_layernorm", "ln_1", None),
    ("self_attention.linear_proj", "attn.c_proj", 1),
    ("self_attention.linear_qkv", "attn.c_attn", 0),
    ("pre_mlp_layernorm", "ln_2", None),
    ("mlp.linear_fc1", "mlp.c_fc", 0),
    ("mlp.linear_fc2", "mlp.c_proj", 1),
)
"""GPT-2's modules, and the dim along which their weights are divided, once they are transposed."""
_BIAS_OF_ROUTER: Final = BY_NAME["F32"]


@value_class
class LayerVariant:
    """What differs between versions of the layers."""

    rows: str = BY_GROUP
    """How rows of queries, keys and values follow each other."""
    latents_cut: bool = False
    """Whether the projections down to latents are divided, as by local layers; Transformer Engine's are whole."""


FURTHER_LAYERS: Final = "its own are whole, and as the last layer; --only mtp --to hf writes others by themselves"
"""Why layers that predict further tokens are left behind."""


def build_model_parts(model: Model, dialect: NamingScheme) -> ModelParts:
    """Build the model's tensors, as the dialect's norms keep them; those of some models have them so, too."""
    changed = dialect.read_flag(ZERO_CENTRED) and not TRAITS[model.family].centred
    return ModelParts(model, TITLE, GAMMA_LESS_ONE if changed else "")


def list_layer_arrays(
    parts: ModelParts, number: int, variant: LayerVariant, held: range | None = None, *, within: str = "model"
) -> Iterator[WholeArray]:
    """List the arrays of a layer; of its routed experts only those that are `held`, if that is given.

    `within` is what has the layer: the model, or what predicts further tokens.
    """
    if parts.model.family == "gpt2":
        yield from _list_gpt2_layer(parts, f"transformer.h.{number}", variant)
        return
    have = f"{within}.layers.{number}"
    if is_hybrid(parts.model):
        yield from hybrid.list_hybrid_arrays(parts, have, held)
        return
    yield from _list_norm(parts, f"{have}.input_layernorm", "input_layernorm")
    if f"{have}.linear_attn.A_log" in parts:
        yield from list_delta_arrays(parts, f"{have}.linear_attn")
    else:
        yield from _list_attention(parts, f"{have}.self_attn", variant)
    yield from _list_norm(parts, f"{have}.post_attention_layernorm", "pre_mlp_layernorm")
    if f"{have}.mlp.router.weight" in parts:
        yield from list_turning_experts(parts, f"{have}.mlp", held)
        return
    routed = next((each for each in _MOE_MODULES if f"{have}.{each[0]}.gate.weight" in parts), None)
    if routed is None:
        yield from _list_gated_mlp(parts, f"{have}.mlp", "mlp", ("gate_proj", "up_proj", "down_proj"))
    else:
        yield from _list_experts(parts, have, *routed, held)


def get_embedding_name(model: Model) -> str:
    """Return the embedding of tokens."""
    if is_hybrid(model):
        return hybrid.EMBEDDING
    return "transformer.wte.weight" if model.family == "gpt2" else "model.embed_tokens.weight"


def list_embeddings(parts: ModelParts) -> Iterator[tuple[str, CompositeArray]]:
    """List the arrays before the first layer.

    That of tokens is the first, and is padded and cut along the vocabulary.
    """
    yield "embedding.word_embeddings.weight", parts[get_embedding_name(parts.model)]
    if parts.model.family == "gpt2":
        yield "embedding.position_embeddings.weight", parts["transformer.wpe.weight"]


def list_last_norm(parts: ModelParts) -> Iterator[WholeArray]:
    """List the arrays of the norm after the last layer."""
    if is_hybrid(parts.model):
        yield from _list_norm(parts, *hybrid.LAST_NORM)
        return
    have = "transformer.ln_f" if parts.model.family == "gpt2" else "model.norm"
    yield from _list_norm(parts, have, "decoder.final_layernorm")


def get_output_layer(parts: ModelParts) -> CompositeArray:
    """Return what makes logits."""
    return parts["lm_head.weight"]


def is_hybrid(model: Model) -> bool:
    """Return whether each layer is one of several kinds: Mamba, attention, an MLP, experts."""
    return TRAITS[model.family].hybrid


def is_tied(model: Model) -> bool:
    """Return whether the head is the embedding."""
    return "lm_head.weight" in model.aliases


def count_experts(model: Model) -> int:
    """Count routed experts of a layer; 0 for a model without any."""
    for number in reversed(range(model.layers)):
        for router_name in ROUTERS:
            router = model.tensors.get(f"model.layers.{number}.{router_name}.weight")
            if router is not None:
                return router.shape[0]
    return 0


def check_model(model: Model) -> None:
    """Raise UnsupportedError for a model that is not laid out as here."""
    if model.encodings or any(name.endswith(_MXFP4_BLOCKS_SUFFIX) for name in model.tensors):
        raise UnsupportedError(
            f"{TITLE} stores quantized weights in formats that shardctl does not know",
            hint="add --dtype bf16, which decodes them on the way",
        )
    if model.family in MISSING:
        raise UnsupportedError(
            f"{TITLE}'s core has no layers for {model.architecture}: the model has {MISSING[model.family]}"
        )
    if model.family not in TRAITS or not model.architecture.endswith(("ForCausalLM", "LMHeadModel")):
        raise UnsupportedError(
            f"{TITLE}'s arrays of {model.architecture or 'this model'} are not known here",
            hint=f"known are models for text of {', '.join(sorted(TRAITS))}",
        )
    if is_hybrid(model):
        hybrid.check_hybrid(model)


def _list_norm(parts: ModelParts, have: str, new: str) -> Iterator[WholeArray]:
    for kind in _PARAMETER_NAMES:
        if f"{have}.{kind}" in parts:
            yield WholeArray(f"{new}.{kind}", (parts[f"{have}.{kind}"],))


def _list_attention(parts: ModelParts, have: str, variant: LayerVariant) -> Iterator[WholeArray]:
    yield from list_sinks(parts, have)
    for kind in _PARAMETER_NAMES:
        if f"{have}.o_proj.{kind}" in parts:
            yield WholeArray(
                f"self_attention.linear_proj.{kind}", (parts[f"{have}.o_proj.{kind}"],), _choose_input_dim(kind)
            )
    if f"{have}.kv_b_proj.weight" in parts:
        yield from _list_latent_attention(parts, have, variant)
        return
    for kind in _PARAMETER_NAMES:
        if f"{have}.q_proj.{kind}" in parts:
            q, k, v = (parts[f"{have}.{part}_proj.{kind}"] for part in "qkv")
            head = parts.unit(f"{have}.k_proj.weight")
            gated = TRAITS[parts.model.family].delta
            queries = divide_gated_queries(q, head) if gated else (q,)
            yield _build_qkv(kind, (*queries, k, v), k.shape[0] // head, variant)
    if f"{have}.qkv_proj.weight" in parts:
        qkv = tuple(parts.divide(f"{have}.qkv_proj.weight"))
        groups = qkv[1].shape[0] // parts.unit(f"{have}.qkv_proj.weight")
        yield _build_qkv("weight", (qkv[0], qkv[1], qkv[2]), groups, variant)
    for part in "qk":
        if f"{have}.{part}_norm.weight" in parts:
            yield WholeArray(f"self_attention.{part}_layernorm.weight", (parts[f"{have}.{part}_norm.weight"],))


def _list_latent_attention(parts: ModelParts, have: str, variant: LayerVariant) -> Iterator[WholeArray]:
    for name, old, of_heads in _LATENT_PROJECTIONS:
        for kind in _PARAMETER_NAMES:
            if f"{have}.{old}.{kind}" in parts:
                dim = 0 if of_heads or variant.latents_cut else None
                yield WholeArray(f"self_attention.{name}.{kind}", (parts[f"{have}.{old}.{kind}"],), dim)
    for name, old in _LATENT_NORMS:
        if f"{have}.{old}.weight" in parts:
            yield WholeArray(f"self_attention.{name}.weight", (parts[f"{have}.{old}.weight"],))


def _build_qkv(kind: str, qkv: tuple[CompositeArray, ...], groups: int, variant: LayerVariant) -> WholeArray:
    name = f"self_attention.linear_qkv.{kind}"
    if variant.rows == BY_KIND:
        return WholeArray(name, qkv, 0)
    if variant.rows == BY_HEAD:
        heads = [interleave_arrays([part.share(0, head, groups) for part in qkv]) for head in range(groups)]
        return WholeArray(name, (join_arrays(heads),), 0)
    return WholeArray(name, qkv, 0, groups=groups)


def _list_gated_mlp(
    parts: ModelParts, have: str, new: str, names: tuple[str, str, str], expert: int | None = None
) -> Iterator[WholeArray]:
    gate, up, down = (f"{have}.{name}" for name in names)
    for kind in _PARAMETER_NAMES:
        pieces = tuple(parts[f"{name}.{kind}"] for name in (gate, up) if f"{name}.{kind}" in parts)
        if f"{have}.gate_up_proj.{kind}" in parts:
            pieces = tuple(parts.divide(f"{have}.gate_up_proj.{kind}"))
        if pieces:
            yield WholeArray(f"{new}.linear_fc1.{kind}", pieces, 0, expert)
    for kind in _PARAMETER_NAMES:
        if f"{down}.{kind}" in parts:
            yield WholeArray(f"{new}.linear_fc2.{kind}", (parts[f"{down}.{kind}"],), _choose_input_dim(kind), expert)


def _list_experts(
    parts: ModelParts, have: str, module: str, names: tuple[str, str, str], held: range | None
) -> Iterator[WholeArray]:
    router = parts[f"{have}.{module}.gate.weight"]
    yield WholeArray("mlp.router.weight", (router,))
    balance = f"{have}.{module}.gate.e_score_correction_bias"
    if balance in parts:
        yield WholeArray("mlp.router.expert_bias", (parts[balance],), dtype=_BIAS_OF_ROUTER)
    for expert in held or range(router.shape[0]):
        yield from _list_gated_mlp(parts, f"{have}.{module}.experts.{expert}", "mlp.experts", names, expert)
    for shared in _SHARED_EXPERT_MODULES:
        if f"{have}.mlp.{shared}.gate_proj.weight" in parts:
            yield from _list_gated_mlp(parts, f"{have}.mlp.{shared}", "mlp.shared_experts", names)
    if f"{have}.mlp.shared_expert_gate.weight" in parts:
        yield WholeArray("mlp.shared_experts.gate_weight", (parts[f"{have}.mlp.shared_expert_gate.weight"],))


def _list_gpt2_layer(parts: ModelParts, have: str, variant: LayerVariant) -> Iterator[WholeArray]:
    """List a layer of GPT-2, whose projections are stored transposed, and those of attention in one array."""
    heads = parts[f"{have}.attn.c_proj.weight"].shape[0] // parts.unit(f"{have}.attn.c_proj.weight")
    for new, old, dim in _GPT2_MODULES:
        for kind in _PARAMETER_NAMES:
            stored = parts[f"{have}.{old}.{kind}"]
            whole = stored.transposed if dim is not None and kind == "weight" else stored
            if old == "attn.c_attn":
                yield _build_qkv(kind, tuple(whole.shares(0, 3)), heads, variant)
            else:
                yield WholeArray(f"{new}.{kind}", (whole,), _choose_input_dim(kind) if dim == 1 else dim)


def _choose_input_dim(kind: str) -> int | None:
    """Choose how a projection is divided along its inputs: biases are whole, and added once, after the parts' sum."""
    return 1 if kind == "weight" else None
