"""Mistral: Llama without biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.decoder import DECODER, decoder_classes, decoder_facts
from shardctl.models.family import Family

if TYPE_CHECKING:
    from shardctl.models.config import Config
    from shardctl.models.family import Facts

_KV_HEADS: Final = 8
"""What `MistralConfig` assumes where a config is silent."""


def _facts(config: Config) -> Facts:
    return decoder_facts(config, kv_heads=_KV_HEADS)


MISTRAL: Final = Family(
    name="mistral",
    rows=DECODER,
    facts=_facts,
    classes=decoder_classes("Mistral"),
    prefixes=("model",),
)
