"""Gemma 1, 2 and the text model of 3: tied, with a head dim of its own, and from Gemma 2 on four norms a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.decoder import DECODER, decoder_classes, decoder_facts
from shardctl.models.family import Family, ModelClass

if TYPE_CHECKING:
    from shardctl.models.config import Config
    from shardctl.models.family import Facts

_HEAD_DIM: Final = 256
"""What the three config classes assume where a config is silent."""


def _facts(config: Config, *, kv_heads: int, sandwich_norm: bool = False, qk_norm: bool = False) -> Facts:
    bias = config.switch("attention_bias", default=False)
    return decoder_facts(
        config,
        tied=True,
        head_dim=_HEAD_DIM,
        kv_heads=kv_heads,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=qk_norm,
        sandwich_norm=sandwich_norm,
    )


def _gemma(config: Config) -> Facts:
    return _facts(config, kv_heads=16)


def _gemma2(config: Config) -> Facts:
    return _facts(config, kv_heads=4, sandwich_norm=True)


def _gemma3(config: Config) -> Facts:
    return _facts(config, kv_heads=4, sandwich_norm=True, qk_norm=True)


GEMMA: Final = Family(
    name="gemma",
    rows=DECODER,
    facts=_gemma,
    classes=decoder_classes("Gemma", question=None),
    prefixes=("model",),
)
GEMMA2: Final = Family(
    name="gemma2",
    rows=DECODER,
    facts=_gemma2,
    classes=decoder_classes("Gemma2", question=None),
    prefixes=("model",),
)
GEMMA3_TEXT: Final = Family(
    name="gemma3_text",
    rows=DECODER,
    facts=_gemma3,
    classes={
        "Gemma3ForCausalLM": ModelClass("model", "lm"),
        "Gemma3TextModel": ModelClass(),
        "Gemma3TextForSequenceClassification": ModelClass("model", "score"),
    },
    prefixes=("model",),
)
