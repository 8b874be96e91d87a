"""Describes CLIP and SigLIP: a transformer for texts beside one for images, each also by itself.

Names and shapes follow transformers 5 (`models/clip/modeling_clip.py`, `models/siglip/modeling_siglip.py`). The layers
of a pipeline are those of the text model and then those of the vision model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.models.submodels.nesting import join_facts, nest_facts, nest_rows
from shardctl.models.tables.family import Family, LogicalDim, ModelClass, ModelDims, Row, RowIndex
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig

_LAYER_PREFIX: Final = ".encoder.layers.{layer}"


def _build_linear_rows(name: str, dims: str) -> tuple[Row, ...]:
    return (Row(f"{name}.weight", dims), Row(f"{name}.bias", dims.split(maxsplit=1)[0]))


def _build_norm_rows(name: str, on: str = "", when: str = "") -> tuple[Row, ...]:
    return (Row(f"{name}.weight", "hidden", when, on), Row(f"{name}.bias", "hidden", when, on))


_ATTENTION_ROWS: Final = (
    *_build_linear_rows(f"{_LAYER_PREFIX}.self_attn.k_proj", "q hidden"),
    *_build_linear_rows(f"{_LAYER_PREFIX}.self_attn.v_proj", "q hidden"),
    *_build_linear_rows(f"{_LAYER_PREFIX}.self_attn.q_proj", "q hidden"),
    *_build_linear_rows(f"{_LAYER_PREFIX}.self_attn.out_proj", "hidden q"),
)
_MLP_ROWS: Final = (
    *_build_linear_rows(f"{_LAYER_PREFIX}.mlp.fc1", "ffn hidden"),
    *_build_linear_rows(f"{_LAYER_PREFIX}.mlp.fc2", "hidden ffn"),
)
_CLIP_LAYER: Final = (
    *_ATTENTION_ROWS,
    *_build_norm_rows(f"{_LAYER_PREFIX}.layer_norm1"),
    *_MLP_ROWS,
    *_build_norm_rows(f"{_LAYER_PREFIX}.layer_norm2"),
)
_SIGLIP_LAYER: Final = (
    *_build_norm_rows(f"{_LAYER_PREFIX}.layer_norm1"),
    *_ATTENTION_ROWS,
    *_build_norm_rows(f"{_LAYER_PREFIX}.layer_norm2"),
    *_MLP_ROWS,
)
_TEXT_EMBEDDING_ROWS: Final = (
    Row(".embeddings.position_ids", "1 *", on="first", buffer="I64"),
    Row(".embeddings.token_embedding.weight", "vocab hidden", on="first"),
    Row(".embeddings.position_embedding.weight", "positions hidden", on="first"),
)
_PATCH_EMBEDDING_ROWS: Final = (
    Row(".embeddings.position_ids", "1 *", on="first", buffer="I64"),
    Row(".embeddings.patch_embedding.weight", "hidden channels patch patch", on="first"),
)
_POSITION_EMBEDDING_ROWS: Final = (Row(".embeddings.position_embedding.weight", "patches hidden", on="first"),)
_CLIP_TEXT: Final = (*_TEXT_EMBEDDING_ROWS, *_CLIP_LAYER, *_build_norm_rows(".final_layer_norm", "last"))
CLIP_EYES: Final = (
    Row(".embeddings.class_embedding", "hidden", on="first"),
    *_PATCH_EMBEDDING_ROWS,
    *_POSITION_EMBEDDING_ROWS,
    *_build_norm_rows(".pre_layrnorm", "first"),
    *_CLIP_LAYER,
    *_build_norm_rows(".post_layernorm", "last"),
)
"""The vision model."""
_SIGLIP_TEXT: Final = (
    *_TEXT_EMBEDDING_ROWS,
    *_SIGLIP_LAYER,
    *_build_norm_rows(".final_layer_norm", "last"),
    Row(".head.weight", "projection hidden", on="last"),
    Row(".head.bias", "projection", on="last"),
)
SIGLIP_EYES: Final = (
    *_PATCH_EMBEDDING_ROWS,
    Row(".embeddings.patch_embedding.bias", "hidden", on="first"),
    *_POSITION_EMBEDDING_ROWS,
    *_SIGLIP_LAYER,
    *_build_norm_rows(".post_layernorm", "last"),
    Row(".head.probe", "1 1 hidden", "head", on="last"),
    Row(".head.attention.in_proj_weight", "hidden+hidden+hidden hidden", "head", on="last"),
    Row(".head.attention.in_proj_bias", "hidden+hidden+hidden", "head", on="last"),
    Row(".head.attention.out_proj.weight", "hidden hidden", "head", on="last"),
    Row(".head.attention.out_proj.bias", "hidden", "head", on="last"),
    *_build_norm_rows(".head.layernorm", "last", "head"),
    Row(".head.mlp.fc1.weight", "pooled hidden", "head", on="last"),
    Row(".head.mlp.fc1.bias", "pooled", "head", on="last"),
    Row(".head.mlp.fc2.weight", "hidden pooled", "head", on="last"),
    Row(".head.mlp.fc2.bias", "hidden", "head", on="last"),
)
"""The vision model, whose head pools by attention; that is whole on every tp rank."""
_AFTER_TEXT: Final = {"last": "text_end"}
_BEFORE_IMAGES: Final = {"first": "vision_start"}
_CLIP_ROWS: Final = (
    Row("logit_scale", "", on="last"),
    *nest_rows(_CLIP_TEXT, "text_model", word="text_", stages=_AFTER_TEXT),
    *nest_rows(CLIP_EYES, "vision_model", word="vision_", stages=_BEFORE_IMAGES),
    Row("visual_projection.weight", "projection vision_hidden", on="last"),
    Row("text_projection.weight", "projection text_hidden", on="last"),
)
_SIGLIP_ROWS: Final = (
    Row("logit_scale", "1", on="last"),
    Row("logit_bias", "1", on="last"),
    *nest_rows(_SIGLIP_TEXT, "text_model", word="text_", stages=_AFTER_TEXT),
    *nest_rows(SIGLIP_EYES, "vision_model", word="vision_", stages=_BEFORE_IMAGES),
)
_PROJECTED_TEXT: Final = (*_CLIP_TEXT, Row("text_projection.weight", "projection hidden", "projected", on="last"))
_PROJECTED_EYES: Final = (*CLIP_EYES, Row("visual_projection.weight", "projection hidden", "projected", on="last"))

# What the config classes assume where a config is silent; configs that lie in another's often are.
_BASE_SIZE_DEFAULTS: Final = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}
_VISION_DEFAULTS: Final = {**_BASE_SIZE_DEFAULTS, "num_channels": 3, "image_size": 224}
_CLIP_TEXT_DEFAULTS: Final = {
    "vocab_size": 49408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "projection_dim": 512,
}
_CLIP_VISION_DEFAULTS: Final = {**_VISION_DEFAULTS, "patch_size": 32, "projection_dim": 512}
_SIGLIP_TEXT_DEFAULTS: Final = {**_BASE_SIZE_DEFAULTS, "vocab_size": 32000, "max_position_embeddings": 64}
_SIGLIP_VISION_DEFAULTS: Final = {**_VISION_DEFAULTS, "patch_size": 16}


def _build_tower_facts(config: ModelConfig) -> ModelDims:
    hidden = config.size("hidden_size")
    return ModelDims(
        dims={
            "hidden": LogicalDim(hidden),
            "q": LogicalDim(hidden, config.divided("hidden_size", "num_attention_heads"), "tp", noun="attention heads"),
            "ffn": LogicalDim(config.size("intermediate_size"), axis="tp"),
            "pooled": LogicalDim(config.size("intermediate_size")),
            "projection": LogicalDim(config.size("projection_dim", hidden)),
        },
        indices={"layer": RowIndex(range(config.size("num_hidden_layers")), layer=0)},
    )


def _build_text_facts(config: ModelConfig) -> ModelDims:
    words = LogicalDim(config.size("vocab_size"), axis="tp", even=False)
    return _build_tower_facts(config).extend_dims(
        dims={"vocab": words, "positions": LogicalDim(config.size("max_position_embeddings"))}
    )


def _build_vision_facts(config: ModelConfig, extra: int) -> ModelDims:
    patch = config.size("patch_size")
    return _build_tower_facts(config).extend_dims(
        dims={
            "channels": LogicalDim(config.size("num_channels")),
            "patch": LogicalDim(patch),
            "patches": LogicalDim((config.size("image_size") // patch) ** 2 + extra),
        },
        flags={"head": config.read_flag("vision_use_head", default=True)},
    )


def _build_clip_text_facts(config: ModelConfig) -> ModelDims:
    return _build_text_facts(config.over(_CLIP_TEXT_DEFAULTS))


def build_clip_vision_facts(config: ModelConfig) -> ModelDims:
    """Build what the rows of CLIP's vision model need to know; there is a position for the class token."""
    return _build_vision_facts(config.over(_CLIP_VISION_DEFAULTS), 1)


def _build_siglip_text_facts(config: ModelConfig) -> ModelDims:
    config = config.over(_SIGLIP_TEXT_DEFAULTS)
    projection = LogicalDim(config.size("projection_size", config.size("hidden_size")))
    return _build_text_facts(config).extend_dims(dims={"projection": projection})


def build_siglip_vision_facts(config: ModelConfig) -> ModelDims:
    """Build what the rows of SigLIP's vision model need to know."""
    return _build_vision_facts(config.over(_SIGLIP_VISION_DEFAULTS), 0)


def _join_tower_facts(text: ModelDims, vision: ModelDims) -> ModelDims:
    end = len(text.indices["layer"].values)
    facts = join_facts(nest_facts(text, "text_", layer=0), nest_facts(vision, "vision_", layer=end))
    return replace(facts, stages={"text_end": ("layer", end - 1), "vision_start": ("layer", end)})


def _build_clip_facts(config: ModelConfig) -> ModelDims:
    facts = _join_tower_facts(
        _build_clip_text_facts(config.part("text_config")), build_clip_vision_facts(config.part("vision_config"))
    )
    return facts.extend_dims(dims={"projection": LogicalDim(config.size("projection_dim", 512))})


def _build_siglip_facts(config: ModelConfig) -> ModelDims:
    return _join_tower_facts(
        _build_siglip_text_facts(config.part("text_config")), build_siglip_vision_facts(config.part("vision_config"))
    )


def _read_clip_text(config: ModelConfig) -> tuple[LayerFeatures, ModelConfig]:
    return _CLIP_TRAITS, config.part("text_config")


def _read_siglip_text(config: ModelConfig) -> tuple[LayerFeatures, ModelConfig]:
    return _SIGLIP_TRAITS, config.part("text_config")


_CLIP_TRAITS: Final = LayerFeatures(activation=("hidden_act", "quick_gelu"))
_SIGLIP_TRAITS: Final = LayerFeatures(activation=("hidden_act", "gelu_pytorch_tanh"))
CLIP: Final = Family(
    name="clip",
    rows=_CLIP_ROWS,
    facts=_build_clip_facts,
    classes={"CLIPModel": ModelClass()},
    assumed={"text_config": {}, "vision_config": {}},
    prefixes=("clip",),
    traits=_CLIP_TRAITS,
    text=_read_clip_text,
)
CLIP_TEXT: Final = Family(
    name="clip_text_model",
    rows=_PROJECTED_TEXT,
    facts=_build_clip_text_facts,
    classes={
        "CLIPTextModel": ModelClass(),
        "CLIPTextModelWithProjection": ModelClass("text_model", "projected"),
    },
    prefixes=("text_model",),
    traits=_CLIP_TRAITS,
)
CLIP_VISION: Final = Family(
    name="clip_vision_model",
    rows=_PROJECTED_EYES,
    facts=build_clip_vision_facts,
    classes={
        "CLIPVisionModel": ModelClass(),
        "CLIPVisionModelWithProjection": ModelClass("vision_model", "projected"),
    },
    prefixes=("vision_model",),
    traits=_CLIP_TRAITS,
)
SIGLIP: Final = Family(
    name="siglip",
    rows=_SIGLIP_ROWS,
    facts=_build_siglip_facts,
    classes={"SiglipModel": ModelClass()},
    assumed={"text_config": {}, "vision_config": {}},
    prefixes=("siglip",),
    traits=_SIGLIP_TRAITS,
    text=_read_siglip_text,
)
