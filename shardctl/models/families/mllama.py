"""Describes Llama 3.2 Vision: a Llama with layers that attend to a picture only, and what it sees with.

Names and shapes follow transformers 5 (`models/mllama/modeling_mllama.py`). The embedding has eight rows more than the
head, of which one is the picture's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.models.submodels.towers import ModelTower, build_tower_classes, build_tower_family
from shardctl.models.tables.decoder import (
    GATED,
    HEADS,
    LAST_NORM,
    LAYER,
    NORMS,
    QKVO,
    assume_sizes,
    build_decoder_facts,
)
from shardctl.models.tables.experts import add_condition
from shardctl.models.tables.family import Family, LogicalDim, ModelClass, ModelDims, Row, RowIndex
from shardctl.models.tables.layer_features import FurtherTensor, LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig

_CROSS_ATTENTION_PREFIX: Final = f"{LAYER}.cross_attn"
_DEFAULT_CROSS_ATTENTION_LAYERS: Final = (3, 8, 13, 18, 23, 28, 33, 38)
"""The layers that attend to the picture where `cross_attention_layers` does not say so."""
_EXTRA_EMBEDDING_TOKENS: Final = 8
"""Rows of the embedding that the head does not have."""
_TEXT_ROWS: Final = (
    Row(".embed_tokens.weight", "embedded hidden", on="first"),
    Row(f"{LAYER}.cross_attn_attn_gate", "1", "cross"),
    Row(f"{LAYER}.cross_attn_mlp_gate", "1", "cross"),
    Row(f"{_CROSS_ATTENTION_PREFIX}.q_proj.weight", "q hidden", "cross"),
    Row(f"{_CROSS_ATTENTION_PREFIX}.k_proj.weight", "kv hidden", "cross"),
    Row(f"{_CROSS_ATTENTION_PREFIX}.v_proj.weight", "kv hidden", "cross"),
    Row(f"{_CROSS_ATTENTION_PREFIX}.o_proj.weight", "hidden q", "cross"),
    Row(f"{_CROSS_ATTENTION_PREFIX}.q_norm.weight", "head", "cross"),
    Row(f"{_CROSS_ATTENTION_PREFIX}.k_norm.weight", "head", "cross"),
    *add_condition(NORMS[:1], "cross"),
    *add_condition((row for row in QKVO if not row.when), "!cross"),
    *(row for row in GATED if not row.when),
    *add_condition(NORMS[:1], "!cross"),
    *NORMS[1:],
    *LAST_NORM,
    *(row for row in HEADS if not row.when),
    Row("lm_head.weight", "vocab hidden", "lm", "last"),
)


def _build_facts(config: ModelConfig) -> ModelDims:
    facts = build_decoder_facts(config, kv_heads=8)
    crossing = config.values.get("cross_attention_layers")
    if crossing is not None and not (isinstance(crossing, list) and all(type(n) is int for n in crossing)):
        raise SourceError(f"config.json has cross_attention_layers = {crossing!r} where numbers of layers are expected")
    return facts.extend_dims(
        dims={"embedded": LogicalDim(facts.size("vocab") + _EXTRA_EMBEDDING_TOKENS, axis="tp", even=False)},
        flags={"cross": frozenset(_DEFAULT_CROSS_ATTENTION_LAYERS if crossing is None else crossing)},
    )


MLLAMA_TEXT: Final = Family(
    name="mllama_text_model",
    rows=_TEXT_ROWS,
    facts=_build_facts,
    classes={"MllamaForCausalLM": ModelClass("model", "lm"), "MllamaTextModel": ModelClass()},
    prefixes=("model", "language_model.model"),
    traits=LayerFeatures(
        activation=("hidden_act", "silu"),
        norm="rms",
        attention_dropout=("dropout", 0.0),
        further=(FurtherTensor("results of attention and MLP, before their gates", "hidden", width=4, when="cross"),),
    ),
    assumed={**assume_sizes(128256, 4096, 14336, 40, 32), "num_key_value_heads": 8},
)


def _build_biased_rows(name: str, dims: str) -> tuple[Row, ...]:
    return (Row(f"{name}.weight", dims), Row(f"{name}.bias", dims.split(maxsplit=1)[0]))


def _build_encoder_rows(layer: str) -> tuple[Row, ...]:
    return (
        *(Row(f"{layer}.self_attn.{name}_proj.weight", "hidden hidden") for name in "qkvo"),
        *_build_biased_rows(f"{layer}.mlp.fc1", "ffn hidden"),
        *_build_biased_rows(f"{layer}.mlp.fc2", "hidden ffn"),
        *_build_biased_rows(f"{layer}.input_layernorm", "hidden"),
        *_build_biased_rows(f"{layer}.post_attention_layernorm", "hidden"),
    )


_PLACES, _GLOBAL = ".gated_positional_embedding", ".global_transformer.layers.{global_layer}"
_VISION_ENCODER_ROWS: Final = (
    Row(".class_embedding", "hidden"),
    Row(".patch_embedding.weight", "hidden channels patch patch"),
    Row(f"{_PLACES}.gate", "1"),
    Row(f"{_PLACES}.embedding", "positions hidden"),
    Row(f"{_PLACES}.tile_embedding.weight", "ratios tiled_positions"),
    Row(".pre_tile_positional_embedding.gate", "1"),
    Row(".pre_tile_positional_embedding.embedding.weight", "ratios tiled"),
    Row(".post_tile_positional_embedding.gate", "1"),
    Row(".post_tile_positional_embedding.embedding.weight", "ratios tiled"),
    *_build_biased_rows(".layernorm_pre", "hidden"),
    *_build_biased_rows(".layernorm_post", "hidden"),
    *_build_encoder_rows(".transformer.layers.{layer}"),
    Row(f"{_GLOBAL}.gate_attn", "1"),
    Row(f"{_GLOBAL}.gate_ffn", "1"),
    *_build_encoder_rows(_GLOBAL),
)
_DEFAULT_ASPECT_RATIO_COUNT: Final = 8
"""Shapes of a picture cut into four tiles, where `supported_aspect_ratios` does not list them."""


def _build_vision_facts(config: ModelConfig) -> ModelDims:
    hidden, patch, tiles = config.size("hidden_size", 1280), config.size("patch_size", 14), _count_tiles(config)
    ratios = config.values.get("supported_aspect_ratios")
    places = _count_tile_tokens(config)
    return ModelDims(
        dims={
            "hidden": LogicalDim(hidden),
            "ffn": LogicalDim(config.size("intermediate_size", 5120)),
            "channels": LogicalDim(config.size("num_channels", 3)),
            "patch": LogicalDim(patch),
            "positions": LogicalDim(places),
            "ratios": LogicalDim(1 + (len(ratios) if isinstance(ratios, list) else _DEFAULT_ASPECT_RATIO_COUNT)),
            "tiled": LogicalDim(tiles * hidden),
            "tiled_positions": LogicalDim(tiles * places * hidden),
            "output": LogicalDim(config.size("vision_output_dim", 7680)),
        },
        indices={
            "layer": RowIndex(range(config.size("num_hidden_layers", 32))),
            "global_layer": RowIndex(range(config.size("num_global_layers", 8))),
        },
    )


def _count_tiles(config: ModelConfig) -> int:
    return config.size("max_num_tiles", 4)


def _count_tile_tokens(config: ModelConfig) -> int:
    """Count the vectors that become of a tile: one for each patch, and one for all."""
    return (config.size("image_size", 448) // config.size("patch_size", 14)) ** 2 + 1


def _add_picture(config: ModelConfig, facts: ModelDims) -> ModelDims:
    """Say how many vectors a picture has that layers attend to: those of all its tiles."""
    seen = config.part("vision_config")
    return facts.extend_dims(dims={"picture": LogicalDim(_count_tiles(seen) * _count_tile_tokens(seen))})


MLLAMA: Final = build_tower_family(
    "mllama",
    build_tower_classes("Mllama"),
    MLLAMA_TEXT,
    (ModelTower("vision_config", "vision_model", _VISION_ENCODER_ROWS, _build_vision_facts),),
    after=(
        Row(".multi_modal_projector.weight", "hidden vision_output", on="first"),
        Row(".multi_modal_projector.bias", "hidden", on="first"),
    ),
    facts=_add_picture,
    legacy={"^language_model.lm_head": "lm_head", "^language_model.model": "language_model"},
)
