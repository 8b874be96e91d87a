"""Describes Mistral and Ministral: Llama without biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import DECODER, assume_sizes, build_decoder_classes, build_decoder_facts
from shardctl.models.tables.family import Family
from shardctl.models.tables.layer_features import LayerFeatures
from shardctl.models.tables.windows import WindowRule

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_KV_HEADS: Final = 8
"""What the three config classes assume where a config is silent."""
_HEAD_DIM: Final = 128
"""What `Ministral3Config` assumes where a config is silent; null is the hidden size divided by the heads."""


def _build_facts(config: ModelConfig) -> ModelDims:
    return build_decoder_facts(config, kv_heads=_KV_HEADS)


def _build_ministral3_facts(config: ModelConfig) -> ModelDims:
    silent = "head_dim" not in config.values
    return build_decoder_facts(config, kv_heads=_KV_HEADS, head_dim=_HEAD_DIM if silent else None)


_LAYER_FEATURES: Final = LayerFeatures(activation=("hidden_act", "silu"), norm="rms", window=WindowRule(4096))
MISTRAL: Final = Family(
    name="mistral",
    rows=DECODER,
    facts=_build_facts,
    classes=build_decoder_classes("Mistral"),
    prefixes=("model",),
    traits=_LAYER_FEATURES,
    assumed=assume_sizes(32000, 4096, 14336, 32, 32),
)
MINISTRAL: Final = Family(
    name="ministral",
    rows=DECODER,
    facts=_build_facts,
    classes=build_decoder_classes("Ministral", question="transformer"),
    prefixes=("model", "transformer"),
    traits=_LAYER_FEATURES,
    assumed=assume_sizes(32000, 4096, 14336, 32, 32),
)
MINISTRAL3: Final = Family(
    name="ministral3",
    rows=DECODER,
    facts=_build_ministral3_facts,
    classes=build_decoder_classes("Ministral3"),
    prefixes=("model",),
    traits=LayerFeatures(activation=("hidden_act", "silu"), norm="rms", window=WindowRule(None)),
    assumed=assume_sizes(131072, 4096, 14336, 34, 32),
)
