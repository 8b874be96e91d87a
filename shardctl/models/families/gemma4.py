"""Describes Gemma 4: wider heads in layers with full attention, layers with KV sharing, and experts.

Names and shapes follow the Hub (`models/gemma4/modeling_gemma4.py`). A layer may have an MLP and experts side by side,
get a part of an embedding of its own, and take the keys and values of an earlier layer: then it has no projections to
them, though files may. In layers with full attention, values may be what the keys are projected to.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.models.families.gemma4_towers import GEMMA4_AUDIO, GEMMA4_PATCHES, GEMMA4_SOUNDS, GEMMA4_VISION
from shardctl.models.submodels.towers import build_tower_classes, build_tower_family
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
from shardctl.models.tables.experts import add_condition, add_expert_facts, build_expert_rows, build_fused_experts
from shardctl.models.tables.family import Family, LogicalDim, ModelClass, Row
from shardctl.models.tables.layer_features import FurtherTensor, LayerFeatures
from shardctl.models.tables.windows import WindowRule

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_FULL_ATTENTION_PERIOD: Final = 6
"""The last of so many layers sees every token, if `layer_types` does not say which do; the last of all always does."""


def _build_attention_rows(word: str, when: str) -> tuple[Row, ...]:
    attention, bias = f"{LAYER}.self_attn", f"{when} qkv_bias"
    return (
        Row(f"{attention}.q_proj.weight", f"{word}q hidden", when),
        Row(f"{attention}.q_proj.bias", f"{word}q", bias),
        Row(f"{attention}.q_norm.weight", f"{word}head", when),
        Row(f"{attention}.k_norm.weight", f"{word}head", when, needed="own_kv"),
        Row(f"{attention}.k_proj.weight", f"{word}kv hidden", when, needed="own_kv"),
        Row(f"{attention}.k_proj.bias", f"{word}kv", bias, needed="own_kv"),
        Row(f"{attention}.v_proj.weight", f"{word}kv hidden", f"{when} own_v", needed="own_kv"),
        Row(f"{attention}.v_proj.bias", f"{word}kv", f"{bias} own_v", needed="own_kv"),
        Row(f"{attention}.o_proj.weight", f"hidden {word}q", when),
        Row(f"{attention}.o_proj.bias", "hidden", bias),
    )


_GATED_MLP_ROWS: Final = tuple(row for row in GATED if not row.when)
_TEXT_ROWS: Final = (
    *EMBEDDING,
    Row(f"{LAYER}.layer_scalar", "1"),
    *_build_attention_rows("", "!full"),
    *_build_attention_rows("full_", "full"),
    *add_condition(_GATED_MLP_ROWS, "!wide"),
    *add_condition((Row(row.name, row.dims.replace("ffn", "dffn")) for row in _GATED_MLP_ROWS), "wide"),
    *NORMS,
    Row(f"{LAYER}.pre_feedforward_layernorm.weight", "hidden"),
    Row(f"{LAYER}.post_feedforward_layernorm.weight", "hidden"),
    Row(f"{LAYER}.per_layer_input_gate.weight", "part hidden", "parts"),
    Row(f"{LAYER}.per_layer_projection.weight", "hidden part", "parts"),
    Row(f"{LAYER}.post_per_layer_input_norm.weight", "hidden", "parts"),
    Row(f"{LAYER}.router.scale", "hidden", "moe"),
    Row(f"{LAYER}.router.per_expert_scale", "experts", "moe"),
    Row(f"{LAYER}.router.proj.weight", "experts hidden", "moe"),
    *build_expert_rows(""),
    Row(f"{LAYER}.post_feedforward_layernorm_1.weight", "hidden", "moe"),
    Row(f"{LAYER}.post_feedforward_layernorm_2.weight", "hidden", "moe"),
    Row(f"{LAYER}.pre_feedforward_layernorm_2.weight", "hidden", "moe"),
    *LAST_NORM,
    Row(".embed_tokens_per_layer.weight", "part_vocab all_parts", "parts", on="first"),
    Row(".per_layer_model_projection.weight", "all_parts hidden", "parts", on="first"),
    Row(".per_layer_projection_norm.weight", "part", "parts", on="first"),
    *HEADS,
)


def _build_facts(config: ModelConfig) -> ModelDims:
    bias = config.read_flag("attention_bias", default=False)
    facts = build_decoder_facts(config, tied=True, head_dim=256, kv_heads=4, qkv_bias=bias)
    layers, heads = config.size("num_hidden_layers"), config.size("num_attention_heads")
    full, same = _list_full_layers(config, layers), config.read_flag("attention_k_eq_v", default=False)
    head, groups = _read_full_heads(config, full, facts.size("kv") // facts.size("head"), same=same)
    if heads % groups:
        raise SourceError(
            f"config.json has {groups} key/value heads of global attention, which does not divide its {heads} heads"
        )
    borrowing = config.count("num_kv_shared_layers", 0)
    own = frozenset(range(max(layers - borrowing, 0)))
    wide = config.read_flag("use_double_wide_mlp", default=False)
    part = config.count("hidden_size_per_layer_input", 256)
    moe = config.read_flag("enable_moe_block", default=False)
    return add_expert_facts(
        facts,
        config.size("num_experts", None if moe else 1),
        config.size("moe_intermediate_size", None if moe else 1),
        moe=moe,
    ).extend_dims(
        dims={
            "full_q": LogicalDim(heads * head, head, "tp", noun="attention heads"),
            "full_kv": LogicalDim(groups * head, head, "tp", shared=True, noun="key/value heads of global attention"),
            "full_head": LogicalDim(head),
            "dffn": LogicalDim(2 * facts.size("ffn"), axis="tp"),
            "part": LogicalDim(part),
            "all_parts": LogicalDim(layers * part),
            "part_vocab": LogicalDim(config.count("vocab_size_per_layer_input", 262144), axis="tp", even=False),
        },
        flags={
            "full": full,
            "own_kv": own,
            "own_v": frozenset(range(layers)) - full if same else True,
            "wide": frozenset(range(layers)) - own if wide else False,
            "parts": part > 0,
        },
    )


def _list_full_layers(config: ModelConfig, layers: int) -> frozenset[int]:
    """List the layers that see every token."""
    kinds = config.values.get("layer_types")
    if kinds is None:
        return frozenset((*range(_FULL_ATTENTION_PERIOD - 1, layers, _FULL_ATTENTION_PERIOD), layers - 1))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise SourceError(f"config.json has layer_types = {kinds!r} where a list of {layers} kinds is expected")
    return frozenset((*(n for n, kind in enumerate(kinds) if kind == "full_attention"), layers - 1))


def _read_full_heads(config: ModelConfig, full: frozenset[int], groups: int, *, same: bool) -> tuple[int, int]:
    """Read the dim of a head and the key/value heads in layers that see every token.

    transformers 5.23 writes them into `per_layer_config`, by layer. Raises UnsupportedError where that speaks of other
    layers, or differently of each.
    """
    given = config.values.get("per_layer_config")
    if given is None:
        own = config.size("num_global_key_value_heads", groups) if same else groups
        return config.size("global_head_dim", 512), own
    if not isinstance(given, dict) or not all(str(n).isdecimal() and isinstance(one, dict) for n, one in given.items()):
        raise SourceError(f"config.json has per_layer_config = {given!r} where sizes by layer are expected")
    kinds = [type(config)(one) for one in given.values()]
    found = {(one.size("head_dim"), one.size("num_key_value_heads", groups)) for one in kinds}
    if (
        {int(n) for n in given} != full
        or len(found) != 1
        or any(not one.values.keys() <= {"head_dim", "num_key_value_heads"} for one in kinds)
    ):
        raise UnsupportedError("config.json has a per_layer_config in which the layers of global attention differ")
    return found.pop()


def _read_seeing(config: ModelConfig, family: Family) -> tuple[LayerFeatures, ModelConfig]:
    """Return the traits of the text model of one that sees: it may get masks, because pictures are seen both ways."""
    texts = family.complete_config(config.part("text_config"))
    usual = "vision" if family is GEMMA4_UNIFIED_TEXT else ""
    seeing = texts.values.get("use_bidirectional_attention", usual) == "vision"
    return replace(family.traits or _LAYER_FEATURES, masked=seeing), texts


_LAYER_FEATURES: Final = LayerFeatures(
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    norm="rms32",
    window=WindowRule(512, "all but every nth", period=_FULL_ATTENTION_PERIOD),
    logit_cap=("final_logit_softcapping", 0.0),
    powered_norms=True,
    further=(
        FurtherTensor("fp32 copies of values that are normed", "values", width=4),
        FurtherTensor("statistics of their norms", "key_rows", width=8),
        FurtherTensor("fp32 copies of what the router norms", "hidden", width=4, when="moe"),
        FurtherTensor("statistics of its norm", width=8, when="moe"),
        FurtherTensor("the router's input, before its scale and with it", "hidden", width=4, when="moe"),
        FurtherTensor("input of the gate of the layer's own embedding", "hidden", when="parts"),
        FurtherTensor("the gate, activated, and what it leaves of that embedding", dims="part", width=6, when="parts"),
    ),
)
GEMMA4_TEXT: Final = Family(
    name="gemma4_text",
    rows=_TEXT_ROWS,
    facts=_build_facts,
    classes={"Gemma4ForCausalLM": ModelClass("model", "lm"), "Gemma4TextModel": ModelClass()},
    prefixes=("model", "model.language_model"),
    fused=build_fused_experts(""),
    traits=_LAYER_FEATURES,
    aliases={"top_k_experts": "num_experts_per_tok"},
    assumed={**assume_sizes(262144, 2304, 9216, 30, 8), "num_key_value_heads": 4},
)


GEMMA4_UNIFIED_TEXT: Final = replace(
    GEMMA4_TEXT,
    name="gemma4_unified_text",
    classes={"Gemma4UnifiedForCausalLM": ModelClass("model", "lm"), "Gemma4UnifiedTextModel": ModelClass()},
    traits=replace(_LAYER_FEATURES, window=WindowRule(1024, "all but every nth", period=_FULL_ATTENTION_PERIOD)),
    fused=(),
    aliases={},
    assumed={**GEMMA4_TEXT.assumed, "hidden_size_per_layer_input": 0},
)
"""That of the model that sees and hears without towers."""


_MULTIMODAL_FAMILY: Final = build_tower_family(
    "gemma4",
    build_tower_classes("Gemma4"),
    GEMMA4_TEXT,
    (GEMMA4_VISION,),
    after=(
        GEMMA4_AUDIO,
        Row(".embed_vision.embedding_projection.weight", "hidden vision_output", "vision_tower", on="first"),
        Row(".embed_audio.embedding_projection.weight", "hidden audio_output", "audio_tower", on="first"),
    ),
)
GEMMA4: Final = replace(_MULTIMODAL_FAMILY, text=partial(_read_seeing, family=GEMMA4_TEXT))

_SEEING_UNIFIED: Final = build_tower_family(
    "gemma4_unified",
    build_tower_classes("Gemma4Unified"),
    GEMMA4_UNIFIED_TEXT,
    (),
    after=(
        GEMMA4_PATCHES,
        GEMMA4_SOUNDS,
        Row(
            ".embed_vision.multimodal_embedder.embedding_projection.weight",
            "hidden vision_output",
            "vision_tower",
            on="first",
        ),
        Row(".embed_audio.embedding_projection.weight", "hidden audio_output", "audio_tower", on="first"),
    ),
    legacy={
        "vision_embedder": "embed_vision",
        "embed_vision.embedding_projection": "embed_vision.multimodal_embedder.embedding_projection",
    },
)
GEMMA4_UNIFIED: Final = replace(_SEEING_UNIFIED, text=partial(_read_seeing, family=GEMMA4_UNIFIED_TEXT))


def _build_assistant_facts(config: ModelConfig) -> ModelDims:
    facts = GEMMA4_TEXT.facts(_complete_assistant(config))
    backbone = config.size("backbone_hidden_size", 1536)
    return facts.extend_dims(
        dims={
            "backbone": LogicalDim(backbone),
            "joined": LogicalDim(2 * backbone),
            "centroids": LogicalDim(config.size("num_centroids", 2048)),
            "tokens": LogicalDim(facts.size("vocab")),
        },
        flags={
            "tied": config.read_flag("tie_word_embeddings", default=True),
            "own_kv": frozenset(),
            "ordered": config.read_flag("use_ordered_embeddings", default=False),
        },
    )


def _complete_assistant(config: ModelConfig) -> ModelConfig:
    """Complete the config of the layers: they have none of what its class forbids."""
    return GEMMA4_TEXT.complete_config(config.part("text_config")).over({"hidden_size_per_layer_input": 0})


def _read_assistant(config: ModelConfig) -> tuple[LayerFeatures | None, ModelConfig]:
    return _LAYER_FEATURES, _complete_assistant(config)


GEMMA4_ASSISTANT: Final = Family(
    name="gemma4_assistant",
    rows=(
        *_TEXT_ROWS,
        Row("pre_projection.weight", "hidden joined", on="first"),
        Row("post_projection.weight", "backbone hidden", on="last"),
        Row("masked_embedding.token_ordering", "tokens", "ordered", "last", dtype="I64"),
        Row("masked_embedding.centroids.weight", "centroids hidden", "ordered", "last"),
    ),
    facts=_build_assistant_facts,
    classes={"Gemma4AssistantForCausalLM": ModelClass("model", "lm")},
    prefixes=("model",),
    text=_read_assistant,
    assumed={"text_config": {}},
)
"""That which guesses tokens for Gemma 4: layers that all take its keys and values, between two projections."""
GEMMA4_UNIFIED_ASSISTANT: Final = replace(
    GEMMA4_ASSISTANT,
    name="gemma4_unified_assistant",
    classes={"Gemma4UnifiedAssistantForCausalLM": ModelClass("model", "lm")},
    assumed={"text_config": {}, "backbone_hidden_size": 3840},
)
