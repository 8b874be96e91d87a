"""Describes SmolLM3: Llama's names; layers without rotary positions may have a window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import DECODER, assume_sizes, build_decoder_classes, build_decoder_facts
from shardctl.models.tables.family import Family
from shardctl.models.tables.layer_features import LayerFeatures
from shardctl.models.tables.windows import WindowRule

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims


def _build_facts(config: ModelConfig) -> ModelDims:
    bias = config.read_flag("attention_bias", default=False)
    mlp_bias = config.read_flag("mlp_bias", default=False)
    return build_decoder_facts(config, tied=True, kv_heads=4, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


SMOLLM3: Final = Family(
    name="smollm3",
    rows=DECODER,
    facts=_build_facts,
    classes=build_decoder_classes("SmolLM3", question="transformer"),
    prefixes=("model", "transformer"),
    traits=LayerFeatures(
        activation=("hidden_act", "silu"),
        norm="rms",
        window=WindowRule(None, "not rotary", period=4, switched=True, period_key="no_rope_layer_interval"),
    ),
    assumed={**assume_sizes(128256, 2048, 11008, 36, 16), "num_key_value_heads": 4},
)
