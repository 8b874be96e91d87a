"""Describes StarCoder2: Llama's attention, an MLP without a gate, and biases everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import (
    BIASED_LAST_NORM,
    BIASED_NORMS,
    EMBEDDING,
    HEADS,
    LAYER,
    QKVO,
    assume_sizes,
    build_decoder_classes,
    build_decoder_facts,
)
from shardctl.models.tables.family import Family, Row
from shardctl.models.tables.layer_features import LayerFeatures
from shardctl.models.tables.windows import WindowRule

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_KV_HEADS: Final = 2
"""What `Starcoder2Config` assumes where a config is silent."""
_STARCODER2_ROWS: Final = (
    *EMBEDDING,
    *QKVO,
    Row(f"{LAYER}.mlp.c_fc.weight", "ffn hidden"),
    Row(f"{LAYER}.mlp.c_fc.bias", "ffn", when="mlp_bias"),
    Row(f"{LAYER}.mlp.c_proj.weight", "hidden ffn"),
    Row(f"{LAYER}.mlp.c_proj.bias", "hidden", when="mlp_bias"),
    *BIASED_NORMS,
    *BIASED_LAST_NORM,
    *HEADS,
)


def _build_facts(config: ModelConfig) -> ModelDims:
    bias = config.read_flag("use_bias", default=True)
    facts = build_decoder_facts(config, tied=True, kv_heads=_KV_HEADS, qkv_bias=bias, o_bias=bias, mlp_bias=bias)
    return facts.extend_dims(flags={"sequential": True})


STARCODER2: Final = Family(
    name="starcoder2",
    rows=_STARCODER2_ROWS,
    facts=_build_facts,
    classes=build_decoder_classes("Starcoder2", question=None),
    prefixes=("model",),
    traits=LayerFeatures(
        activation=("hidden_act", "gelu_pytorch_tanh"), dropout=("residual_dropout", 0.0), window=WindowRule(None)
    ),
    assumed=assume_sizes(49152, 3072, 12288, 30, 24),
)
