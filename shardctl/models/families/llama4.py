"""Describes Llama 4: transposed experts, gate columns before up columns, a shared expert; and what it sees with.

Names and shapes follow the Hub (`models/llama4/modeling_llama4.py`). `Llama4ForConditionalGeneration`, which sees, has
the whole of `Llama4ForCausalLM` in `language_model`, its head included.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.models.families.vision_towers import build_seeing_heads
from shardctl.models.submodels.towers import ModelTower, build_tower_family
from shardctl.models.tables.decoder import (
    EMBEDDING,
    HEADS,
    LAST_NORM,
    LAYER,
    NORMS,
    QKVO,
    assume_sizes,
    build_decoder_facts,
)
from shardctl.models.tables.experts import add_expert_facts, build_shared_expert_rows, count_experts
from shardctl.models.tables.family import Family, LogicalDim, ModelClass, ModelDims, Row, RowIndex
from shardctl.models.tables.layer_features import LayerFeatures
from shardctl.models.tables.windows import WindowRule, mark_rotary_layers

if TYPE_CHECKING:
    from collections.abc import Collection

    from shardctl.models.tables.config import ModelConfig

_MLP_MODULE_NAME: Final = "feed_forward"
_LLAMA4_TEXT_ROWS: Final = (
    *EMBEDDING,
    *QKVO,
    Row(f"{LAYER}.{_MLP_MODULE_NAME}.gate_proj.weight", "dffn hidden", when="!moe"),
    Row(f"{LAYER}.{_MLP_MODULE_NAME}.up_proj.weight", "dffn hidden", when="!moe"),
    Row(f"{LAYER}.{_MLP_MODULE_NAME}.down_proj.weight", "hidden dffn", when="!moe"),
    Row(f"{LAYER}.{_MLP_MODULE_NAME}.experts.gate_up_proj", "expert hidden effn+effn", when="moe"),
    Row(f"{LAYER}.{_MLP_MODULE_NAME}.experts.down_proj", "expert effn hidden", when="moe"),
    Row(f"{LAYER}.{_MLP_MODULE_NAME}.router.weight", "experts hidden", when="moe"),
    *build_shared_expert_rows(f"{_MLP_MODULE_NAME}.shared_expert"),
    *NORMS,
    *LAST_NORM,
    *HEADS,
)

_CHUNKED_ATTENTION_RULE: Final = WindowRule(
    8192, "rotary", period=4, key="attention_chunk_size", period_key="no_rope_layer_interval"
)
"""Layers with rotary positions attend within chunks, and norm queries and keys."""


def _build_facts(config: ModelConfig) -> ModelDims:
    bias, ffn = config.read_flag("attention_bias", default=False), config.size("intermediate_size")
    facts = build_decoder_facts(config, head_dim=128, kv_heads=8, qkv_bias=bias, o_bias=bias)
    count = count_experts(config, "num_local_experts")
    marks = mark_rotary_layers(_CHUNKED_ATTENTION_RULE, config, config.size("num_hidden_layers"))
    rotary = frozenset(n for n, marked in enumerate(marks) if marked)
    return add_expert_facts(facts, count, ffn, moe=_list_expert_layers(config), shared=ffn).extend_dims(
        dims={"dffn": LogicalDim(config.size("intermediate_size_mlp", 16384), axis="tp")},
        flags={"qk_norm": config.read_flag("use_qk_norm", default=True), "rotary": rotary},
    )


def _list_expert_layers(config: ModelConfig) -> Collection[int]:
    """List the layers that have experts."""
    listed = config.entries("moe_layers")
    if listed is None:
        step = config.size("interleave_moe_layer_step", 1)
        return range(step - 1, config.size("num_hidden_layers"), step)
    return frozenset(listed)


LLAMA4_TEXT: Final = Family(
    name="llama4_text",
    rows=_LLAMA4_TEXT_ROWS,
    facts=_build_facts,
    classes={"Llama4ForCausalLM": ModelClass("model", "lm"), "Llama4TextModel": ModelClass()},
    prefixes=("model",),
    traits=LayerFeatures(
        activation=("hidden_act", "silu"),
        norm="rms",
        window=_CHUNKED_ATTENTION_RULE,
        experts_per_token=1,
        narrow_experts=True,
        cast_experts=True,
        narrow_softmax=True,
        every_expert=True,
    ),
    weightless=(Row(f"{LAYER}.self_attn.qk_norm.weight", "head", when="qk_norm rotary"),),
    assumed={**assume_sizes(202048, 5120, 8192, 48, 40), "num_local_experts": 16},
)


def _build_biased_rows(name: str, dims: str) -> tuple[Row, ...]:
    return (Row(f"{name}.weight", dims), Row(f"{name}.bias", dims.split(maxsplit=1)[0]))


_VISION_LAYER_PREFIX: Final = ".model.layers.{layer}"
_VISION_ENCODER_ROWS: Final = (
    Row(".class_embedding", "hidden"),
    Row(".positional_embedding_vlm", "positions hidden"),
    Row(".patch_embedding.linear.weight", "seen pixels"),
    *_build_biased_rows(".layernorm_pre", "hidden"),
    *_build_biased_rows(".layernorm_post", "hidden"),
    *_build_biased_rows(f"{_VISION_LAYER_PREFIX}.self_attn.q_proj", "q hidden"),
    *_build_biased_rows(f"{_VISION_LAYER_PREFIX}.self_attn.k_proj", "q hidden"),
    *_build_biased_rows(f"{_VISION_LAYER_PREFIX}.self_attn.v_proj", "q hidden"),
    *_build_biased_rows(f"{_VISION_LAYER_PREFIX}.self_attn.o_proj", "hidden q"),
    *_build_biased_rows(f"{_VISION_LAYER_PREFIX}.mlp.fc1", "ffn hidden"),
    *_build_biased_rows(f"{_VISION_LAYER_PREFIX}.mlp.fc2", "hidden ffn"),
    *_build_biased_rows(f"{_VISION_LAYER_PREFIX}.input_layernorm", "hidden"),
    *_build_biased_rows(f"{_VISION_LAYER_PREFIX}.post_attention_layernorm", "hidden"),
    Row(".vision_adapter.mlp.fc1.weight", "adapter shuffled"),
    Row(".vision_adapter.mlp.fc2.weight", "adapted inner"),
)


def _build_vision_facts(config: ModelConfig) -> ModelDims:
    patch, image = config.size("patch_size", 14), config.size("image_size", 448)
    hidden, adapted = config.size("hidden_size", 768), config.size("projector_output_dim", 4096)
    return ModelDims(
        dims={
            "hidden": LogicalDim(hidden),
            "seen": LogicalDim(hidden, axis="tp"),
            "q": build_seeing_heads(hidden, config.size("num_attention_heads", 16)),
            "ffn": LogicalDim(config.size("intermediate_size", 5632), axis="tp"),
            "shuffled": LogicalDim(config.size("intermediate_size", 5632)),
            "positions": LogicalDim((image // patch) ** 2 + 1),
            "pixels": LogicalDim(config.size("num_channels", 3) * patch**2),
            "adapter": LogicalDim(config.size("projector_input_dim", 4096), axis="tp"),
            "adapted": LogicalDim(adapted),
            "inner": LogicalDim(adapted, axis="tp"),
            "output": LogicalDim(config.size("vision_output_dim", 7680)),
        },
        indices={"layer": RowIndex(range(config.size("num_hidden_layers", 34)))},
    )


def _add_projector_facts(_: ModelConfig, facts: ModelDims) -> ModelDims:
    return facts.extend_dims(dims={"joint": LogicalDim(facts.size("hidden"), tower_axis="tp")})


_MULTIMODAL_FAMILY: Final = build_tower_family(
    "llama4",
    {"Llama4ForConditionalGeneration": ModelClass("", "lm")},
    LLAMA4_TEXT,
    (
        ModelTower("vision_config", "vision_model", _VISION_ENCODER_ROWS, _build_vision_facts),
        Row(".multi_modal_projector.linear_1.weight", "joint vision_output", on="first"),
    ),
    under="language_model.model",
    facts=_add_projector_facts,
)
LLAMA4: Final = replace(
    _MULTIMODAL_FAMILY,
    rows=tuple(
        replace(row, name=row.name.replace("lm_head", ".language_model.lm_head")) for row in _MULTIMODAL_FAMILY.rows
    ),
    prefixes=(),
)
"""Its head is that of the model inside, and there is no base model around both."""
