"""Describes Granite: Llama's names, with biases where the config wants them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.decoder import DECODER, assume_sizes, build_decoder_classes, build_decoder_facts
from shardctl.models.family import Family
from shardctl.models.layer_traits import LayerTraits

if TYPE_CHECKING:
    from shardctl.models.config import ModelConfig
    from shardctl.models.family import FamilyFacts


def _build_facts(config: ModelConfig) -> FamilyFacts:
    bias = config.switch("attention_bias", default=False)
    return build_decoder_facts(config, qkv_bias=bias, o_bias=bias, mlp_bias=config.switch("mlp_bias", default=False))


GRANITE: Final = Family(
    name="granite",
    rows=DECODER,
    facts=_build_facts,
    classes=build_decoder_classes("Granite", question=None, sentences=False, tokens=None),
    prefixes=("model",),
    traits=LayerTraits(activation=("hidden_act", "silu"), norm="rms"),
    assumed=assume_sizes(32000, 4096, 11008, 32, 32),
)
