"""Describes ERNIE 4.5: Llama's names, with biases everywhere or nowhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import DECODER, assume_sizes, build_decoder_facts
from shardctl.models.tables.family import Family, ModelClass
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims


def _build_facts(config: ModelConfig) -> ModelDims:
    bias = config.read_flag("use_bias", default=False)
    head = None if "head_dim" in config.values else 128
    return build_decoder_facts(config, tied=True, head_dim=head, kv_heads=2, qkv_bias=bias, o_bias=bias, mlp_bias=bias)


ERNIE4_5: Final = Family(
    name="ernie4_5",
    rows=DECODER,
    facts=_build_facts,
    classes={"Ernie4_5ForCausalLM": ModelClass("model", "lm"), "Ernie4_5Model": ModelClass()},
    prefixes=("model",),
    traits=LayerFeatures(activation=("hidden_act", "silu"), norm="rms", attention_dropout=("", 0.0)),
    assumed={**assume_sizes(103424, 1024, 3072, 18, 16), "num_key_value_heads": 2},
)
