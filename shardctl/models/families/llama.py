"""Describes Llama 1 to 3, and Helium and CWM, which differ in a bias, a default or a window."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import (
    DECODER,
    assume_sizes,
    build_biased_facts,
    build_decoder_classes,
    build_decoder_facts,
)
from shardctl.models.tables.family import Family, LogicalDim
from shardctl.models.tables.layer_features import LayerFeatures
from shardctl.models.tables.windows import WindowRule

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_LAYER_FEATURES: Final = LayerFeatures(activation=("hidden_act", "silu"), norm="rms")


def _build_helium_facts(config: ModelConfig) -> ModelDims:
    """The last projection of attention is as wide as the hidden size, whatever the heads (`HeliumAttention`)."""
    width, head = config.size("hidden_size"), config.divided("hidden_size", "num_attention_heads")
    facts = build_decoder_facts(
        config,
        head_dim=128,
        kv_heads=20,
        qkv_bias=config.read_flag("attention_bias", default=False),
        mlp_bias=config.read_flag("mlp_bias", default=False),
    )
    return facts.extend_dims(dims={"attended": LogicalDim(width, head, "tp", noun="attention heads")})


def _build_cwm_facts(config: ModelConfig) -> ModelDims:
    return build_decoder_facts(config, head_dim=128, kv_heads=8, mlp_bias=config.read_flag("mlp_bias", default=False))


LLAMA: Final = Family(
    name="llama",
    rows=DECODER,
    facts=build_biased_facts,
    classes=build_decoder_classes("Llama", question="transformer"),
    prefixes=("model", "transformer"),
    renamed={"LLaMAForCausalLM": "LlamaForCausalLM"},
    outer_classes=("LlavaLlamaForCausalLM",),
    traits=_LAYER_FEATURES,
    assumed=assume_sizes(32000, 4096, 11008, 32, 32),
    inner_kinds={
        "paddleocr_vl_text": {  # ERNIE 4.5 with Llama's order of rotated elements
            **assume_sizes(103424, 1024, 3072, 18, 16),
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "max_position_embeddings": 131072,
        }
    },
)
HELIUM: Final = Family(
    name="helium",
    rows=tuple(replace(row, dims="hidden attended") if ".o_proj.w" in row.name else row for row in DECODER),
    facts=_build_helium_facts,
    classes=build_decoder_classes("Helium", question=None),
    prefixes=("model",),
    traits=replace(_LAYER_FEATURES, norm="rms32"),
    assumed=assume_sizes(48000, 2560, 7040, 24, 20),
)
CWM: Final = Family(
    name="cwm",
    rows=DECODER,
    facts=_build_cwm_facts,
    classes=build_decoder_classes("Cwm", question=None, sentences=False, tokens=None),
    prefixes=("model",),
    traits=replace(_LAYER_FEATURES, window=WindowRule(8192, "all but first of every n", period=4)),
    assumed=assume_sizes(128256, 6144, 21504, 64, 48),
)
