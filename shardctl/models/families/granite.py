"""Granite: Llama's names, with biases where the config wants them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.decoder import DECODER, decoder_classes, decoder_facts
from shardctl.models.family import Family
from shardctl.models.layer_traits import LayerTraits

if TYPE_CHECKING:
    from shardctl.models.config import Config
    from shardctl.models.family import Facts


def _facts(config: Config) -> Facts:
    bias = config.switch("attention_bias", default=False)
    return decoder_facts(config, qkv_bias=bias, o_bias=bias, mlp_bias=config.switch("mlp_bias", default=False))


GRANITE: Final = Family(
    name="granite",
    rows=DECODER,
    facts=_facts,
    classes=decoder_classes("Granite", question=None, sentences=False, tokens=None),
    prefixes=("model",),
    traits=LayerTraits(activation=("hidden_act", "silu"), norm="rms"),
)
