"""Describes GLM-4, as `glm` (its first checkpoints) and as `glm4` (those of 0414): gate and up projection fused.

The text model of GLM-OCR has a layer after the last that predicts a further token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import (
    EMBEDDING,
    FUSED_GATED,
    HEADS,
    LAST_NORM,
    LAYER,
    NORMS,
    QKVO,
    assume_sizes,
    build_decoder_classes,
    build_decoder_facts,
)
from shardctl.models.tables.experts import build_predicting_ends, build_predicting_rows
from shardctl.models.tables.family import Family, Row, RowIndex
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_KV_HEADS: Final = 2
_HEAD_DIM: Final = 128
"""What both config classes assume where a config is silent."""
_GLM_ROWS: Final = (*EMBEDDING, *QKVO, *FUSED_GATED, *NORMS, *LAST_NORM, *HEADS)
_GLM4_LAYER: Final = (
    *QKVO,
    *FUSED_GATED,
    *NORMS,
    Row(f"{LAYER}.post_self_attn_layernorm.weight", "hidden"),
    Row(f"{LAYER}.post_mlp_layernorm.weight", "hidden"),
)
_MTP_LAYER_PREFIX: Final = ".layers.{next}"
_MTP_EXTRA_TENSORS: Final = {
    "embed_tokens": "vocab hidden",
    "enorm": "hidden",
    "hnorm": "hidden",
    "eh_proj": "hidden hidden+hidden",
    "shared_head.norm": "hidden",
    "shared_head.head": "vocab hidden",
}
"""What a layer that predicts has besides, as in vLLM's `glm_ocr_mtp.py`."""
_VISION_LANGUAGE_DEFAULTS: Final[Mapping[str, object]] = {
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 1.0,
    "head_dim": None,
}
"""What the text models of GLM-4.1V and GLM-OCR assume otherwise."""


def _build_facts(config: ModelConfig) -> ModelDims:
    bias = config.read_flag("attention_bias", default=True)
    return build_decoder_facts(config, kv_heads=_KV_HEADS, head_dim=_HEAD_DIM, qkv_bias=bias)


def _build_glm4_facts(config: ModelConfig) -> ModelDims:
    layers = config.size("num_hidden_layers")
    following = range(layers, layers + config.count("num_nextn_predict_layers", 0))
    return _build_facts(config).extend_dims(indices={"next": RowIndex(following)})


GLM: Final = Family(
    name="glm",
    rows=_GLM_ROWS,
    facts=_build_facts,
    classes=build_decoder_classes("Glm", question=None),
    prefixes=("model",),
    traits=LayerFeatures(activation=("hidden_act", "silu"), norm="rms", joined_queries=True),
    assumed=assume_sizes(151552, 4096, 13696, 40, 32),
)
GLM4: Final = Family(
    name="glm4",
    rows=(
        *EMBEDDING,
        *_GLM4_LAYER,
        *LAST_NORM,
        *HEADS,
        *build_predicting_rows(_GLM4_LAYER, _MTP_LAYER_PREFIX, ""),
        *build_predicting_ends(_MTP_LAYER_PREFIX, _MTP_EXTRA_TENSORS),
    ),
    facts=_build_glm4_facts,
    classes=build_decoder_classes("Glm4", question=None),
    prefixes=("model",),
    traits=LayerFeatures(activation=("hidden_act", "silu"), norm="rms", joined_queries=True),
    assumed=assume_sizes(151552, 4096, 13696, 40, 32),
    inner_kinds={
        "glm4v_text": {**_VISION_LANGUAGE_DEFAULTS, "max_position_embeddings": 32768},
        "glm_ocr_text": {
            **_VISION_LANGUAGE_DEFAULTS,
            **assume_sizes(59392, 1024, 4096, 16, 16),
            "num_key_value_heads": 8,
            "attention_bias": False,
        },
    },
)
