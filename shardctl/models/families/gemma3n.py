"""Describes the text model of Gemma 3n: several streams that layers mix, and an embedding for each layer.

Names and shapes follow transformers 5 (`models/gemma3n/modeling_gemma3n.py`). The last layers take the keys and values
of earlier ones, and have no projections to them, though files do. The mixtures of Matformer have MLPs of two sizes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.models.tables.decoder import (
    EMBEDDING,
    GATED,
    HEADS,
    LAST_NORM,
    LAYER,
    NORMS,
    assume_sizes,
    build_decoder_facts,
)
from shardctl.models.tables.experts import add_condition
from shardctl.models.tables.family import Family, LogicalDim, ModelClass, Row, RowIndex
from shardctl.models.tables.layer_features import FurtherTensor, LayerFeatures
from shardctl.models.tables.windows import WindowRule

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_ATTENTION, _ALTUP, _LAUREL = f"{LAYER}.self_attn", f"{LAYER}.altup", f"{LAYER}.laurel"
_GATED_MLP_ROWS: Final = tuple(row for row in GATED if not row.when)
_DEFAULT_SPARSE_LAYER_COUNT: Final = 10
"""The first of so many layers are sparse where a config of more does not say which are."""
_MAX_MLP_SIZES: Final = 2
"""Sizes of MLPs that the table has words for."""
_MODEL_ROWS: Final = (
    *EMBEDDING,
    Row(f"{_ATTENTION}.q_proj.weight", "q hidden"),
    Row(f"{_ATTENTION}.q_proj.bias", "q", "qkv_bias"),
    Row(f"{_ATTENTION}.q_norm.weight", "head"),
    Row(f"{_ATTENTION}.k_proj.weight", "kv hidden", needed="own_kv"),
    Row(f"{_ATTENTION}.k_proj.bias", "kv", "qkv_bias", needed="own_kv"),
    Row(f"{_ATTENTION}.v_proj.weight", "kv hidden", needed="own_kv"),
    Row(f"{_ATTENTION}.v_proj.bias", "kv", "qkv_bias", needed="own_kv"),
    Row(f"{_ATTENTION}.k_norm.weight", "head", needed="own_kv"),
    Row(f"{_ATTENTION}.o_proj.weight", "hidden q"),
    Row(f"{_ATTENTION}.o_proj.bias", "hidden", "qkv_bias"),
    *add_condition(_GATED_MLP_ROWS, "!wide"),
    *add_condition((replace(row, dims=row.dims.replace("ffn", "dffn")) for row in _GATED_MLP_ROWS), "wide"),
    *NORMS,
    Row(f"{LAYER}.pre_feedforward_layernorm.weight", "hidden"),
    Row(f"{LAYER}.post_feedforward_layernorm.weight", "hidden"),
    Row(f"{_ALTUP}.correct_output_scale", "hidden"),
    Row(f"{_ALTUP}.correction_coefs.weight", "copies copies"),
    Row(f"{_ALTUP}.prediction_coefs.weight", "mixes copies"),
    Row(f"{_ALTUP}.modality_router.weight", "copies hidden"),
    Row(f"{_ALTUP}.router_norm.weight", "hidden"),
    Row(f"{_LAUREL}.linear_left.weight", "laurel hidden"),
    Row(f"{_LAUREL}.linear_right.weight", "hidden laurel"),
    Row(f"{_LAUREL}.post_laurel_norm.weight", "hidden"),
    Row(f"{LAYER}.per_layer_input_gate.weight", "part hidden"),
    Row(f"{LAYER}.per_layer_projection.weight", "hidden part"),
    Row(f"{LAYER}.post_per_layer_input_norm.weight", "hidden"),
    *LAST_NORM,
    Row(".embed_tokens_per_layer.weight", "part_vocab all_parts", on="first"),
    Row(".per_layer_model_projection.weight", "all_parts hidden", on="first"),
    Row(".per_layer_projection_norm.weight", "part", on="first"),
    Row(".altup_projections.{copy}.weight", "hidden hidden", on="first"),
    Row(".altup_unembed_projections.{joined}.weight", "hidden hidden", on="last"),
    *HEADS,
)


def _build_facts(config: ModelConfig) -> ModelDims:
    sizes = _list_mlp_sizes(config)
    usual, *others = dict.fromkeys(sizes)
    bias, layers = config.read_flag("attention_bias", default=False), len(sizes)
    alike = replace(config, values={**config.values, "intermediate_size": usual})
    facts = build_decoder_facts(alike, tied=True, head_dim=256, kv_heads=2, qkv_bias=bias)
    copies, part = config.size("altup_num_inputs", 4), config.size("hidden_size_per_layer_input", 256)
    return facts.extend_dims(
        dims={
            "dffn": LogicalDim(others[0] if others else usual, axis="tp"),
            "copies": LogicalDim(copies),
            "mixes": LogicalDim(copies**2),
            "laurel": LogicalDim(config.size("laurel_rank", 64)),
            "part": LogicalDim(part),
            "all_parts": LogicalDim(layers * part),
            "part_vocab": LogicalDim(config.size("vocab_size_per_layer_input", 262144), axis="tp", even=False),
        },
        indices={word: RowIndex(range(copies - 1)) for word in ("copy", "joined")},
        flags={
            "own_kv": frozenset(range(max(layers - config.count("num_kv_shared_layers", 15), 0))),
            "wide": frozenset(n for n, size in enumerate(sizes) if size != usual),
            "sparse": _list_sparse_layers(config, layers),
        },
    )


def _list_sparse_layers(config: ModelConfig, layers: int) -> frozenset[int]:
    """List the layers whose MLPs let only a part of the gate through, in training too."""
    shares = config.values.get("activation_sparsity_pattern")
    if shares is None:
        return frozenset(range(_DEFAULT_SPARSE_LAYER_COUNT if layers > _DEFAULT_SPARSE_LAYER_COUNT else 0))
    if not isinstance(shares, list) or not all(isinstance(share, int | float) for share in shares):
        raise SourceError(f"config.json has activation_sparsity_pattern = {shares!r} where a list is expected")
    return frozenset(n for n, share in enumerate(shares) if share > 0)


def _list_mlp_sizes(config: ModelConfig) -> list[int]:
    """List the intermediate size of each layer; raises UnsupportedError where there are more than two."""
    layers, sizes = config.size("num_hidden_layers"), config.values.get("intermediate_size")
    if not isinstance(sizes, list):
        return [config.size("intermediate_size")] * layers
    sizes = [replace(config, values={"intermediate_size": size}).size("intermediate_size") for size in sizes]
    if len(sizes) != layers:
        raise SourceError(f"config.json has {len(sizes)} numbers as intermediate_size for {layers} layers")
    if len(set(sizes)) > _MAX_MLP_SIZES:
        raise UnsupportedError(f"config.json has an intermediate_size of {len(set(sizes))} different numbers")
    return sizes


_EXTRA_SAVED_ACTIVATIONS: Final = (
    FurtherTensor("fp32 copies of values that are normed", "values", width=4),
    FurtherTensor("statistics of their norms", "key_rows", width=8),
    FurtherTensor("what the router of streams norms behind the layer, in fp32, also normed", "hidden", width=8),
    FurtherTensor("statistics of that norm", width=8),
    FurtherTensor("inputs of the router of streams", "hidden", width=4),
    FurtherTensor("choices of streams, in fp32, and what they are made of", dims="copies", width=14),
    FurtherTensor("coefficients of the streams", dims="mixes"),
    FurtherTensor("all streams, before and behind the layer", "hidden", dims="copies", width=4),
    FurtherTensor("the stream that is corrected, before its scale", "hidden"),
    FurtherTensor("input of the gate of the layer's own embedding", "hidden"),
    FurtherTensor("input of the second matrix of the learned residual", dims="laurel"),
    FurtherTensor("the gate of the layer's own embedding, activated, and what it leaves of it", dims="part", width=6),
    FurtherTensor("what exceeds the cut of a sparse activation", "intermediate", when="sparse"),
    FurtherTensor("deviations of the gate, of which a multiple is the cut", when="sparse"),
)
GEMMA3N_TEXT: Final = Family(
    name="gemma3n_text",
    rows=_MODEL_ROWS,
    facts=_build_facts,
    classes={"Gemma3nForCausalLM": ModelClass("model", "lm"), "Gemma3nTextModel": ModelClass()},
    prefixes=("model", "model.language_model"),
    traits=LayerFeatures(
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        norm="rms32",
        window=WindowRule(512, "all but every nth", period=5),
        logit_cap=("final_logit_softcapping", 30.0),
        powered_norms=True,
        further=_EXTRA_SAVED_ACTIVATIONS,
    ),
    assumed={**assume_sizes(262400, 2048, 16384, 35, 8), "num_key_value_heads": 2},
)
