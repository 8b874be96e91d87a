"""Describes vLLM's arrays of Llama and models with its names, with one MLP per layer or with experts.

Names and orders are those of vLLM 0.25.1, `model_executor/models/` (`llama.py`, `phi3.py`, `gemma2.py`, `mixtral.py`,
`qwen3_moe.py`, `gpt_oss.py`, `deepseek_v2.py`); what 0.11.2 calls otherwise stands beside it. Of two names for one
array, `ShardedStateLoader` keeps the one that sorts first: a tied head, but not the embedding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.errors import CutError
from shardctl.libraries.arrays.composite import CompositeArray, SchemaEntry, join_arrays
from shardctl.libraries.vllm.linear_attention import list_linear_attention
from shardctl.libraries.vllm.rank import HeadRun, QkvRows, build_zero_entry
from shardctl.libraries.vllm.routers import list_router

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.libraries.vllm.rank import VllmRank
    from shardctl.models import Model

_EMBEDDING: Final = "model.embed_tokens.weight"
_HEAD: Final = "lm_head.weight"
_USUAL: Final = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL: Final = ("w1", "w3", "w2")
_NORMS: Final = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "post_feedforward_layernorm_1",
    "post_feedforward_layernorm_2",
    "pre_feedforward_layernorm_2",
    "post_self_attn_layernorm",
    "post_mlp_layernorm",
)
_KINDS: Final = ("weight", "bias")
_INPUTS: Final = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
_LATENT_DOWN: Final = ("q_a_proj", "kv_a_proj_with_mqa")


def list_decoder_entries(here: VllmRank, model: Model) -> Iterator[SchemaEntry]:
    """List the arrays of a rank."""
    embedding = "model.embedding.weight" if model.family == "gpt_oss" else _EMBEDDING
    headless = _is_headless(here, model.family)
    if here.begins and (_HEAD not in model.aliases or headless or not here.ends):
        yield here.vocabulary(_EMBEDDING, embedding)
    if here.ends and not headless:
        yield here.vocabulary(_HEAD)
    if here.ends:
        yield from here.same("model.norm.weight")
    yield from _list_layer_inputs(here)
    borrowing = 0
    for number in here.layers:
        layer = new = f"model.layers.{number}"
        if _borrows_keys(here, f"{layer}.self_attn"):
            new, borrowing = f"model.cross_decoder.decoder_layers.{borrowing}", borrowing + 1
        for entry in _list_layer(here, layer):
            yield entry if new == layer else replace(entry, name=entry.name.replace(layer, new, 1))


def _list_layer(here: VllmRank, layer: str) -> Iterator[SchemaEntry]:
    yield from here.same(*(f"{layer}.{norm}.weight" for norm in _NORMS))
    if here.parts.model.family == "gpt_oss":
        yield from _list_gpt_oss_layer(here, layer)
    elif f"{layer}.linear_attn.A_log" in here:
        yield from list_linear_attention(here, f"{layer}.linear_attn")
        yield from _list_mlp(here, f"{layer}.mlp")
    elif f"{layer}.self_attn.kv_b_proj.weight" in here:
        yield from (_list_latent_attention if here.latent else _list_expanded_attention)(here, f"{layer}.self_attn")
        yield from _list_mlp(here, f"{layer}.mlp")
    else:
        yield from _list_attention(here, f"{layer}.self_attn", f"{layer}.self_attn")
        yield from _list_mlp(here, f"{layer}.mlp")
        yield from _list_mixtral_experts(here, f"{layer}.block_sparse_moe")
        yield from _list_gemma4_extras(here, layer)


def _borrows_keys(here: VllmRank, have: str) -> bool:
    """Return whether attention borrows keys and values of a layer before; vLLM has such layers in a module apart."""
    key = f"{have}.k_proj.weight"
    return f"{have}.q_proj.weight" in here and (key not in here or here.parts.is_optional(key))


def _is_headless(here: VllmRank, family: str) -> bool:
    """Return whether the class has no head at all, but asks the embedding."""
    return (
        family == "gemma2" or (family == "gemma" and not here.latest) or (family == "gemma3_text" and not here.modern)
    )


def _list_attention(here: VllmRank, have: str, new: str) -> Iterator[SchemaEntry]:
    borrows = _borrows_keys(here, have)
    if borrows:
        yield from here.column_layer(f"{have}.q_proj")
    for kind in _KINDS:
        if not borrows and f"{have}.q_proj.{kind}" in here:
            names = [f"{have}.{part}_proj" for part in ("qkv" if f"{have}.v_proj.weight" in here else "qkk")]
            parts = (HeadRun((here[f"{name}.{kind}"],), here.parts.unit(f"{name}.weight")) for name in names)
            yield here.attention(f"{new}.qkv_proj.{kind}", QkvRows(*parts))
        elif f"{have}.qkv_proj.{kind}" in here:
            yield here.attention(f"{new}.qkv_proj.{kind}", _build_heads(here, f"{have}.qkv_proj.{kind}"))
    yield from here.row_layer(f"{have}.o_proj", f"{new}.o_proj")
    yield from here.scales(f"{new}.attn")
    if here.parts.model.family == "minimax_m2":
        yield from _list_wide_norms(here, have)
        return
    yield from here.same(f"{have}.q_norm.weight", *(() if borrows else (f"{have}.k_norm.weight",)))
    yield from here.same(f"{have}.query_layernorm.weight", f"{have}.key_layernorm.weight")


def _list_wide_norms(here: VllmRank, have: str) -> Iterator[SchemaEntry]:
    """List norms over all heads together, of which a rank has the weights of its heads."""
    yield SchemaEntry(f"{have}.q_norm.weight", here.rows(f"{have}.q_norm.weight"))
    keys = HeadRun((here[f"{have}.k_norm.weight"],), here.parts.unit(f"{have}.k_proj.weight"))
    start = here.index * len(keys) // here.tp
    yield SchemaEntry(f"{have}.k_norm.weight", keys.between(start, start + max(len(keys) // here.tp, 1)))


def _build_heads(here: VllmRank, name: str) -> QkvRows:
    """Build the heads of an array that has all queries, then all keys, then all values."""
    return QkvRows(*(HeadRun((part,), unit) for part, unit in here.sections(name)))


def _list_mlp(here: VllmRank, have: str) -> Iterator[SchemaEntry]:
    """List an MLP of a layer, or its experts; nothing if it has neither under this name."""
    if f"{have}.gate_proj.weight" in here:
        yield from _list_gated_mlp(here, have, have)
    elif f"{have}.up_proj.weight" in here:
        yield from here.column_layer(f"{have}.up_proj")
        yield from here.row_layer(f"{have}.down_proj")
    elif f"{have}.gate_up_proj.weight" in here:
        halves = (part.share(0, here.index, here.tp) for part, _ in here.sections(f"{have}.gate_up_proj.weight"))
        yield SchemaEntry(f"{have}.gate_up_proj.weight", join_arrays(list(halves)))
        yield from here.row_layer(f"{have}.down_proj")
    elif f"{have}.gate.weight" in here:
        if f"{have}.experts.gate_up_proj" in here:
            yield from _list_stacked_experts(here, f"{have}.experts")
        else:
            yield from _list_experts(here, have, _USUAL, f"{have}.gate")
        yield from list_router(here, have)
        shared = f"{have}.experts._shared_experts{'._layer' if here.modern else ''}"
        if f"{have}.shared_experts.down_proj.weight" in here:
            yield from _list_gated_mlp(here, f"{have}.shared_experts", shared)
        elif f"{have}.shared_expert.down_proj.weight" in here:
            yield from _list_gated_mlp(here, f"{have}.shared_expert", shared)
            yield SchemaEntry(f"{shared}.expert_gate.weight", here[f"{have}.shared_expert_gate.weight"])


def _list_gated_mlp(here: VllmRank, have: str, new: str) -> Iterator[SchemaEntry]:
    yield from here.merged(f"{new}.gate_up_proj", [f"{have}.gate_proj", f"{have}.up_proj"])
    yield from here.row_layer(f"{have}.down_proj", f"{new}.down_proj")


def _list_mixtral_experts(here: VllmRank, have: str) -> Iterator[SchemaEntry]:
    if f"{have}.gate.weight" in here:
        yield from _list_experts(here, have, _MIXTRAL, f"{have}.gate")
        if here.parts.model.family == "mixtral":
            yield from here.same(f"{have}.gate.weight")
        else:
            yield from list_router(here, have)


def _list_experts(here: VllmRank, have: str, parts: tuple[str, str, str], router: str) -> Iterator[SchemaEntry]:
    count = here[f"{router}.weight"].shape[0]
    yield from here.experts(f"{have}.experts", [f"{have}.experts.{number}" for number in range(count)], parts)


def _list_stacked_experts(here: VllmRank, have: str) -> Iterator[SchemaEntry]:
    """List experts that the model has in two arrays, of rows or, as in Qwen3-VL, of columns."""
    both, down = here[f"{have}.gate_up_proj"], here[f"{have}.down_proj"]
    turned = len(here.parts.model.tensors[here.parts.resolve(f"{have}.gate_up_proj")].spec.cuts[2]) > 0
    if turned:
        both, down = both.transposed, down.transposed
    held = here.held(both.shape[0])
    if not held:
        raise CutError(f"{have}: {both.shape[0]} experts are too few for ep={here.tp}")
    both, down = (stack.part(0, held.start, held.stop) for stack in (both, down))
    halves = [here.inside(half, 1) for half in both.shares(1, 2)]
    yield SchemaEntry(f"{here.routed(have)}.w13_weight", join_arrays(halves, 1))
    yield SchemaEntry(f"{here.routed(have)}.w2_weight", here.inside(down, 2))


def _list_layer_inputs(here: VllmRank) -> Iterator[SchemaEntry]:
    """List what makes the inputs of each layer of a small Gemma 4: an embedding of its own, and a projection."""
    if "model.embed_tokens_per_layer.weight" in here:
        yield here.vocabulary("model.embed_tokens_per_layer.weight")
        yield from here.column_layer("model.per_layer_model_projection")
        yield from here.same("model.per_layer_projection_norm.weight")


def _list_gemma4_extras(here: VllmRank, layer: str) -> Iterator[SchemaEntry]:
    """List what only layers of Gemma 4 have: a factor, inputs of each layer, and experts beside the MLP."""
    yield from here.same(f"{layer}.layer_scalar")
    yield from here.same(*(f"{layer}.{name}.weight" for name in _INPUTS))
    if f"{layer}.router.proj.weight" in here:
        yield from here.same(*(f"{layer}.router.{name}" for name in ("proj.weight", "scale", "per_expert_scale")))
        yield from _list_experts(here, layer, _USUAL, f"{layer}.router.proj")


def _list_expanded_attention(here: VllmRank, have: str) -> Iterator[SchemaEntry]:
    """List latent attention done with whole heads, as under ``VLLM_MLA_DISABLE=1``."""
    names = (f"{part}.weight" for part in ("q_a_layernorm", "kv_a_layernorm", *_LATENT_DOWN))
    yield from here.same(*(f"{have}.{name}" for name in names))
    for part in ("q_proj", "q_b_proj", "kv_b_proj"):
        yield from here.column_layer(f"{have}.{part}")
    yield from here.row_layer(f"{have}.o_proj")
    yield from here.scales(f"{have}.attn")


def _list_latent_attention(here: VllmRank, have: str) -> Iterator[SchemaEntry]:
    """List latent attention: its inner module has the same layers under names of its own, some of which sort first."""
    inner = f"{have}.mla_attn"
    yield from here.same(f"{have}.kv_a_layernorm.weight")
    yield from here.column_layer(f"{have}.kv_b_proj")
    if f"{have}.q_a_proj.weight" in here:
        down = [here[f"{have}.{part}.weight"] for part in _LATENT_DOWN]
        yield SchemaEntry(f"{have}.fused_qkv_a_proj.weight", join_arrays(down))
        yield SchemaEntry(f"{inner}.q_a_layernorm.weight", here[f"{have}.q_a_layernorm.weight"])
        yield SchemaEntry(f"{inner}.q_b_proj.weight", here.rows(f"{have}.q_b_proj.weight"))
    else:
        yield from here.same(f"{have}.kv_a_proj_with_mqa.weight")
        yield SchemaEntry(f"{inner}.q_proj.weight", here.rows(f"{have}.q_proj.weight"))
    yield from here.row_layer(f"{have}.o_proj", f"{inner}.o_proj")
    yield from here.scales(f"{inner}.mla_attn")


def _list_gpt_oss_layer(here: VllmRank, layer: str) -> Iterator[SchemaEntry]:
    """List a layer of gpt-oss, whose gate and up rows take turns in the file and in the array."""
    have, new = f"{layer}.self_attn", f"{layer}.attn"
    yield from _list_attention(here, have, new)
    yield SchemaEntry(f"{new}.sinks", here.rows(f"{have}.sinks"))
    yield from here.same(f"{layer}.mlp.router.weight", f"{layer}.mlp.router.bias")
    experts, module = f"{layer}.mlp.experts", here.routed(f"{layer}.mlp.experts")
    count = here[f"{layer}.mlp.router.weight"].shape[0]
    held = here.held(count)

    def mine(name: str) -> CompositeArray:
        return here[f"{experts}.{name}"].part(0, held.start, held.stop)

    yield SchemaEntry(f"{module}.w13_weight", here.inside(mine("gate_up_proj").transposed, 1))
    yield SchemaEntry(f"{module}.w13_bias", here.inside(mine("gate_up_proj_bias"), 1))
    yield SchemaEntry(f"{module}.w2_weight", here.inside(mine("down_proj").transposed, 2))
    bias = mine("down_proj_bias")
    if here.index and not here.whole_experts:  # the first rank adds it
        yield build_zero_entry(f"{module}.w2_bias", bias.shape, here.bias_dtype)
    else:
        yield SchemaEntry(f"{module}.w2_bias", bias)
    yield from here.expert_map(experts, count)
