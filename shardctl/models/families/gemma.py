"""Describes Gemma 1, 2 and the text model of 3, and VaultGemma, which is Gemma 2 without norms behind its blocks.

They are tied, with a head dim of their own; from 2 on a layer has four norms.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import DECODER, assume_sizes, build_decoder_classes, build_decoder_facts
from shardctl.models.tables.family import Family, ModelClass
from shardctl.models.tables.layer_features import LayerFeatures
from shardctl.models.tables.windows import WindowRule

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_HEAD_DIM: Final = 256
"""What the config classes assume where a config is silent."""


def _build_facts(
    config: ModelConfig, *, kv_heads: int, sandwich_norm: bool = False, qk_norm: bool = False
) -> ModelDims:
    bias = config.read_flag("attention_bias", default=False)
    return build_decoder_facts(
        config,
        tied=True,
        head_dim=_HEAD_DIM,
        kv_heads=kv_heads,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=qk_norm,
        sandwich_norm=sandwich_norm,
    )


def _build_gemma_facts(config: ModelConfig) -> ModelDims:
    return _build_facts(config, kv_heads=16)


def _build_gemma2_facts(config: ModelConfig) -> ModelDims:
    return _build_facts(config, kv_heads=4, sandwich_norm=True)


def _build_gemma3_facts(config: ModelConfig) -> ModelDims:
    return _build_facts(config, kv_heads=4, sandwich_norm=True, qk_norm=True)


GEMMA: Final = Family(
    name="gemma",
    rows=DECODER,
    facts=_build_gemma_facts,
    classes=build_decoder_classes("Gemma", question=None),
    prefixes=("model",),
    traits=LayerFeatures(activation=("hidden_act", "gelu_pytorch_tanh"), norm="rms32"),
    assumed=assume_sizes(256000, 3072, 24576, 28, 16),
)
GEMMA2: Final = Family(
    name="gemma2",
    rows=DECODER,
    facts=_build_gemma2_facts,
    classes=build_decoder_classes("Gemma2", question=None),
    prefixes=("model",),
    traits=LayerFeatures(
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        norm="rms32",
        window=WindowRule(4096, "even"),
        score_cap=("attn_logit_softcapping", 50.0),
        logit_cap=("final_logit_softcapping", 30.0),
    ),
    assumed=assume_sizes(256000, 2304, 9216, 26, 8),
)
GEMMA3_TEXT: Final = Family(
    name="gemma3_text",
    rows=DECODER,
    facts=_build_gemma3_facts,
    classes={
        "Gemma3ForCausalLM": ModelClass("model", "lm"),
        "Gemma3TextModel": ModelClass(),
        "Gemma3TextForSequenceClassification": ModelClass("model", "score"),
    },
    prefixes=("model",),
    traits=LayerFeatures(
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        norm="rms32",
        window=WindowRule(4096, "all but every nth", period=6, period_key="sliding_window_pattern"),
        score_cap=("attn_logit_softcapping", 0.0),
        logit_cap=("final_logit_softcapping", 0.0),
    ),
    assumed=assume_sizes(262208, 2304, 9216, 26, 8),
)
VAULTGEMMA: Final = replace(
    GEMMA2,
    name="vaultgemma",
    rows=tuple(row for row in DECODER if ".post_" not in row.name),
    classes=build_decoder_classes("VaultGemma", question=None, sentences=False, tokens=None),
)
