"""Describes vLLM's arrays of Llama and models with its names, with one MLP per layer or with experts.

Names and orders are those of vLLM 0.25.1, `model_executor/models/` (`llama.py`, `phi3.py`, `gemma2.py`, `mixtral.py`,
`qwen3_moe.py`, `gpt_oss.py`, `deepseek_v2.py`); what 0.11.2 calls otherwise stands beside it. Of two names for one
array, `ShardedStateLoader` keeps the one that sorts first: a tied head, but not the embedding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import PartitionError
from shardctl.libraries.arrays.composite import CompositeArray, SchemaEntry, join_arrays
from shardctl.libraries.vllm.feed_forward import USUAL, list_experts, list_feed_forward
from shardctl.libraries.vllm.rank import HeadRun, QkvRows, build_zero_entry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardctl.libraries.vllm.rank import VllmRank
    from shardctl.models import Model

_EMBEDDING_NAME: Final = "model.embed_tokens.weight"
_LM_HEAD_NAME: Final = "lm_head.weight"
_LAYER_NORM_NAMES: Final = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "post_feedforward_layernorm_1",
    "post_feedforward_layernorm_2",
    "pre_feedforward_layernorm_2",
    "post_self_attn_layernorm",
    "post_mlp_layernorm",
    "attention_layernorm",
    "feedforward_layernorm",
    "operator_norm",
    "ffn_norm",
)
_FEED_FORWARD: Final = ("mlp", "block_sparse_moe", "feed_forward")
_LAST_NORMS: Final = ("model.norm", "model.embedding_norm")
_PARAMETER_NAMES: Final = ("weight", "bias")
_PER_LAYER_INPUT_MODULES: Final = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
_HEAD_NORMS: Final = ("query_layernorm", "key_layernorm", "q_layernorm", "k_layernorm")
_LATENT_DOWN: Final = ("q_a_proj", "kv_a_proj_with_mqa")

_DECAY_DTYPE: Final = BY_NAME["F32"]
"""vLLM keeps the logarithm of the decay in fp32, whatever the type of the others."""


def list_decoder_entries(here: VllmRank, model: Model) -> Iterator[SchemaEntry]:
    """List the arrays of a rank."""
    embedding = "model.embedding.weight" if model.family == "gpt_oss" else _EMBEDDING_NAME
    headless = _is_headless(here, model.family)
    if here.begins and (_LM_HEAD_NAME not in model.aliases or headless or not here.asks):
        yield here.vocabulary(_EMBEDDING_NAME, embedding)
    if here.asks and not headless:
        yield here.vocabulary(_LM_HEAD_NAME)
    if here.ends:
        yield from here.same(*(f"{norm}.{kind}" for norm in _LAST_NORMS for kind in _PARAMETER_NAMES))
    yield from _list_layer_inputs(here)
    shared = 0
    for number in here.layers:
        layer = new = f"model.layers.{number}"
        if _shares_kv(here, f"{layer}.self_attn"):
            if len(here.layers) < model.layers:
                raise PartitionError(
                    f"vLLM makes no stages of {model.architecture} where layers borrow keys and values of earlier ones",
                    hint="leave --pp out",
                )
            new, shared = f"model.cross_decoder.decoder_layers.{shared}", shared + 1
        for entry in _list_layer(here, layer):
            yield entry if new == layer else replace(entry, name=entry.name.replace(layer, new, 1))


def _list_layer(here: VllmRank, layer: str) -> Iterator[SchemaEntry]:
    yield from here.same(*(f"{layer}.{norm}.{kind}" for norm in _LAYER_NORM_NAMES for kind in _PARAMETER_NAMES))
    if here.parts.model.family == "gpt_oss":
        yield from _list_gpt_oss_layer(here, layer)
        return
    if f"{layer}.linear_attn.A_log" in here:
        yield from _list_linear_attention(here, f"{layer}.linear_attn")
    elif f"{layer}.conv.conv.weight" in here:
        yield from _list_short_convolution(here, f"{layer}.conv", f"{layer}.short_conv")
    elif f"{layer}.self_attn.kv_b_proj.weight" in here:
        yield from _choose_latent(here)(here, f"{layer}.self_attn")
    else:
        yield from _list_attention(here, f"{layer}.self_attn", f"{layer}.self_attn")
    for module in _FEED_FORWARD:
        yield from list_feed_forward(here, f"{layer}.{module}")
    yield from _list_gemma4_extras(here, layer)


def _shares_kv(here: VllmRank, have: str) -> bool:
    """Return whether attention has KV sharing with an earlier layer; vLLM has such layers in a module of their own."""
    key = f"{have}.k_proj.weight"
    return f"{have}.q_proj.weight" in here and (key not in here or here.parts.is_optional(key))


def _is_headless(here: VllmRank, family: str) -> bool:
    """Return whether the class has no head at all, but asks the embedding."""
    if family == "gemma":
        return not here.latest
    return family in {"gemma2", "cohere", "cohere2"} or (family == "gemma3_text" and not here.modern)


def _list_attention(here: VllmRank, have: str, new: str) -> Iterator[SchemaEntry]:
    borrows = _shares_kv(here, have)
    if borrows:
        yield from here.column_layer(f"{have}.q_proj")
    for kind in _PARAMETER_NAMES:
        if not borrows and f"{have}.q_proj.{kind}" in here:
            names = [f"{have}.{part}_proj" for part in ("qkv" if f"{have}.v_proj.weight" in here else "qkk")]
            parts = (HeadRun((here[f"{name}.{kind}"],), here.parts.unit(f"{name}.weight")) for name in names)
            yield here.attention(f"{new}.qkv_proj.{kind}", QkvRows(*parts))
        elif f"{have}.qkv_proj.{kind}" in here:
            yield here.attention(f"{new}.qkv_proj.{kind}", _build_heads(here, f"{have}.qkv_proj.{kind}"))
    out = "out_proj" if f"{have}.out_proj.weight" in here else "o_proj"
    yield from here.row_layer(f"{have}.{out}", f"{new}.{out}")
    yield from here.scales(f"{new}.attn")
    if here.parts.model.family == "minimax_m2":
        yield from _list_wide_norms(here, have)
        return
    norms = (f"{have}.q_norm.weight", *(() if borrows else (f"{have}.k_norm.weight",)))
    if norms[0] in here and len(here[norms[0]].shape) > 1:  # Cohere's, of which each head has one
        yield from (SchemaEntry(norm, here.rows(norm)) for norm in norms)
        return
    yield from here.same(*norms, *(f"{have}.{name}.weight" for name in _HEAD_NORMS))


def _list_wide_norms(here: VllmRank, have: str) -> Iterator[SchemaEntry]:
    """List norms over all heads together, of which a rank has the weights of its heads."""
    yield SchemaEntry(f"{have}.q_norm.weight", here.rows(f"{have}.q_norm.weight"))
    keys = HeadRun((here[f"{have}.k_norm.weight"],), here.parts.unit(f"{have}.k_proj.weight"))
    start = here.index * len(keys) // here.tp
    yield SchemaEntry(f"{have}.k_norm.weight", keys.slice_heads(start, start + max(len(keys) // here.tp, 1)))


def _build_heads(here: VllmRank, name: str) -> QkvRows:
    """Build the heads of an array that has all queries, then all keys, then all values."""
    return QkvRows(*(HeadRun((part,), unit) for part, unit in here.sections(name)))


def _list_layer_inputs(here: VllmRank) -> Iterator[SchemaEntry]:
    """List what makes the inputs of each layer of a small Gemma 4: an embedding of its own, and a projection."""
    if "model.embed_tokens_per_layer.weight" in here:
        yield here.vocabulary("model.embed_tokens_per_layer.weight")
        yield from here.column_layer("model.per_layer_model_projection")
        yield from here.same("model.per_layer_projection_norm.weight")


def _list_gemma4_extras(here: VllmRank, layer: str) -> Iterator[SchemaEntry]:
    """List what only layers of Gemma 4 have: a factor, inputs of each layer, and experts beside the MLP."""
    yield from here.same(f"{layer}.layer_scalar")
    yield from here.same(*(f"{layer}.{name}.weight" for name in _PER_LAYER_INPUT_MODULES))
    if f"{layer}.router.proj.weight" in here:
        yield from here.same(*(f"{layer}.router.{name}" for name in ("proj.weight", "scale", "per_expert_scale")))
        yield from list_experts(here, layer, USUAL, f"{layer}.router.proj")


def _choose_latent(here: VllmRank) -> Callable[[VllmRank, str], Iterator[SchemaEntry]]:
    """Choose how latent attention is done."""
    if here.parts.model.family == "mistral4":
        return _list_whole_attention
    if here.for_sglang:
        return _list_sglang_latent
    return _list_latent_attention if here.latent else _list_expanded_attention


def _list_whole_attention(here: VllmRank, have: str) -> Iterator[SchemaEntry]:
    """List latent attention as the class of transformers has it, whole on every rank."""
    names = ("q_a_layernorm", "kv_a_layernorm", *_LATENT_DOWN, "q_proj", "q_b_proj", "kv_b_proj", "o_proj")
    yield from here.same(*(f"{have}.{name}.{kind}" for name in names for kind in _PARAMETER_NAMES))
    yield from here.scales(f"{have}.attn")


def _list_expanded_attention(here: VllmRank, have: str) -> Iterator[SchemaEntry]:
    """List latent attention done with whole heads, as under ``VLLM_MLA_DISABLE=1``."""
    names = (f"{part}.weight" for part in ("q_a_layernorm", "kv_a_layernorm", *_LATENT_DOWN))
    yield from here.same(*(f"{have}.{name}" for name in names))
    for part in ("q_proj", "q_b_proj", "kv_b_proj"):
        yield from here.column_layer(f"{have}.{part}")
    yield from here.row_layer(f"{have}.o_proj")
    yield from here.scales(f"{have}.attn")


def _list_sglang_latent(here: VllmRank, have: str) -> Iterator[SchemaEntry]:
    """List latent attention as SGLang has it: as with whole heads, but the projections to latents are one."""
    down = [f"{have}.{part}.weight" for part in _LATENT_DOWN]
    joined = down[0] in here
    yield from (each for each in _list_expanded_attention(here, have) if not joined or each.name not in down)
    if joined:
        yield SchemaEntry(f"{have}.fused_qkv_a_proj_with_mqa.weight", join_arrays([here[name] for name in down]))


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


def _list_linear_attention(here: VllmRank, have: str) -> Iterator[SchemaEntry]:
    """List the arrays of a layer with gated DeltaNet."""
    yield SchemaEntry(f"{have}.A_log", here.rows(f"{have}.A_log"), dtype=_DECAY_DTYPE)
    yield SchemaEntry(f"{have}.dt_bias", here.rows(f"{have}.dt_bias"))
    yield from here.same(f"{have}.norm.weight")
    yield from here.row_layer(f"{have}.out_proj")
    yield SchemaEntry(f"{have}.conv1d.weight", join_arrays([*_share_sections(here, f"{have}.conv1d.weight")]))
    if f"{have}.in_proj_qkvz.weight" in here:  # Qwen3-Next's, one key head after another in both
        for name in ("in_proj_qkvz.weight", "in_proj_ba.weight"):
            yield SchemaEntry(f"{have}.{name}", join_arrays([*_share_sections(here, f"{have}.{name}")]))
        return
    for new, parts in (("in_proj_qkvz", ("in_proj_qkv", "in_proj_z")), ("in_proj_ba", ("in_proj_b", "in_proj_a"))):
        rows = [rows for part in parts for rows in _share_sections(here, f"{have}.{part}.weight")]
        yield SchemaEntry(f"{have}.{new}.weight", join_arrays(rows))


def _share_sections(here: VllmRank, name: str) -> Iterator[CompositeArray]:
    """Yield this rank's rows of each section, by whole heads."""
    for part, unit in here.sections(name):
        heads = part.shape[0] // unit
        if heads % here.tp:
            raise PartitionError(f"{name}: {heads} key heads of linear attention cannot be divided over tp={here.tp}")
        yield part.share(0, here.index, here.tp)


def _list_short_convolution(here: VllmRank, have: str, new: str) -> Iterator[SchemaEntry]:
    """List the arrays of a layer with a short convolution, LFM2's, whose channels are cut."""
    yield from here.column_layer(f"{have}.conv", f"{new}.conv")
    yield from here.row_layer(f"{have}.out_proj", f"{new}.out_proj")
    for kind in ("weight", "bias"):
        if f"{have}.in_proj.{kind}" in here:
            yield SchemaEntry(f"{new}.in_proj.{kind}", join_arrays([*_share_sections(here, f"{have}.in_proj.{kind}")]))
