"""Describes Seed-OSS: Llama's names, biases on q, k and v, and dropout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import DECODER, assume_sizes, build_decoder_classes, build_decoder_facts
from shardctl.models.tables.family import Family
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims


def _build_facts(config: ModelConfig) -> ModelDims:
    return build_decoder_facts(
        config,
        head_dim=None if "head_dim" in config.values else 128,
        kv_heads=8,
        qkv_bias=config.read_flag("attention_bias", default=True),
        o_bias=config.read_flag("attention_out_bias", default=False),
        mlp_bias=config.read_flag("mlp_bias", default=False),
    )


SEED_OSS: Final = Family(
    name="seed_oss",
    rows=DECODER,
    facts=_build_facts,
    classes=build_decoder_classes("SeedOss", question="transformer"),
    prefixes=("model", "transformer"),
    traits=LayerFeatures(
        activation=("hidden_act", "silu"),
        norm="rms",
        dropout=("residual_dropout", 0.1),
        attention_dropout=("attention_dropout", 0.1),
    ),
    assumed={**assume_sizes(155136, 4096, 27648, 64, 80), "num_key_value_heads": 8},
)
